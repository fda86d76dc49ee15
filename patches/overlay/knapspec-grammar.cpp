#include "knapspec-grammar.h"

#include "llama-impl.h"
#include "llama-model.h"
#include "llama-vocab.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>

namespace {

// States kept behind the latest one: more than a draft and a pass beside the text look back. An older one is computed
// again from the answer's first token.
constexpr size_t MAX_STATES = 256;

// The parser calls itself for every group within a group, on a stack of unknown size.
constexpr size_t MAX_NESTED = 1000;

// Repetitions are written out. Elements and rules (each as much as several elements) that a grammar may grow to.
constexpr size_t MAX_ELEMENTS  = 16 << 20;
constexpr size_t RULE_ELEMENTS = 16;

// Ways to read a text that are followed at once. Most grammars have a handful, a choice among values as many as there are;
// one that can read each character in two ways has twice as many with every character.
constexpr size_t MAX_STACKS = 16384;

const char * skip_blank(const char * text) {
    while (*text == ' ' || *text == '\t' || *text == '\r' || *text == '\n' || *text == '#') {
        if (*text == '#') {
            while (*text && *text != '\n') {
                text++;
            }
        } else {
            text++;
        }
    }
    return text;
}

// Throws where the text is more than the parser can take.
void check_size(const char * text) {
    size_t depth = 0, n_elements = 0, latest = 1; // elements of the latest symbol
    const auto skip_to = [&](char end) {
        latest = 0;
        for (text++; *text && *text != end; ++text) {
            text += *text == '\\' && text[1];
            latest++;
        }
    };
    for (; *text; text += *text != 0) {
        switch (*text) {
            case '"': skip_to('"'); break;
            case '[': skip_to(']'); break;
            case '#': text += strcspn(text, "\r\n"); break;
            case '<': text += strcspn(text, ">"); latest = 1; break;
            case '(':
                if (++depth > MAX_NESTED) {
                    throw std::runtime_error("groups are nested too deeply");
                }
                break;
            case ')': depth -= depth > 0; latest = 1; break;
            case '{': {
                size_t times = 0;
                for (text++; *text && *text != '}'; ++text) {
                    const size_t n = isdigit((uint8_t) *text) ? strtoul(text, nullptr, 10) : 0;
                    times = std::max(times, std::min<size_t>(n, MAX_ELEMENTS));
                }
                n_elements += times*(latest + RULE_ELEMENTS);
                break;
            }
            default: latest = 1;
        }
        if (n_elements > MAX_ELEMENTS) {
            throw std::runtime_error("its repetitions are too long");
        }
    }
}

bool ends_alternative(const llama_grammar_element & element) {
    return element.type == LLAMA_GRETYPE_END || element.type == LLAMA_GRETYPE_ALT;
}

// Throws for a rule that can begin with itself and something behind it, of which llama.cpp would look for a beginning for
// ever, and for one that can begin in too many ways. llama.cpp's own check overlooks rules that can be empty by others that
// can, and takes forever (or more stack than there is) for some that are fine.
void check_beginnings(const llama_grammar_parser & parser) {
    const auto & rules = parser.rules;
    const auto name_of = [&parser](size_t rule) {
        for (const auto & symbol : parser.symbol_ids) {
            if (symbol.second == rule) {
                return symbol.first.substr(0, 80);
            }
        }
        return std::string("?");
    };

    // Rules that can be empty: those with an alternative of nothing but such.
    std::vector<bool>                empty(rules.size());
    std::vector<size_t>              owner, n_left, found; // by alternative: its rule, and what is not known to be empty
    std::vector<std::vector<size_t>> used_in(rules.size()); // alternatives, once for each time
    for (size_t rule = 0; rule < rules.size(); ++rule) {
        for (size_t i = 0; i < rules[rule].size(); ++i) {
            const size_t begin = i;
            bool only_rules = true;
            for (; !ends_alternative(rules[rule][i]); ++i) {
                only_rules = only_rules && rules[rule][i].type == LLAMA_GRETYPE_RULE_REF;
            }
            if (!only_rules) {
                continue;
            }
            for (size_t k = begin; k < i; ++k) {
                used_in[rules[rule][k].value].push_back(owner.size());
            }
            owner.push_back(rule);
            n_left.push_back(i - begin);
            if (i == begin && !empty[rule]) {
                empty[rule] = true;
                found.push_back(rule);
            }
        }
    }
    while (!found.empty()) {
        const size_t rule = found.back();
        found.pop_back();
        for (const size_t alternative : used_in[rule]) {
            const size_t other = owner[alternative];
            if (--n_left[alternative] == 0 && !empty[other]) {
                empty[other] = true;
                found.push_back(other);
            }
        }
    }

    // Tarjan's strongly connected components, without recursion: `at` is the element of the rule that is being looked into.
    struct step { size_t rule, at; };
    struct edge { size_t from, to; };
    std::vector<step>   path;
    std::vector<edge>   growing; // rules that begin with another and leave something behind it
    std::vector<size_t> order(rules.size()), low(rules.size()), open, group(rules.size()); // order 0: not seen, group 0: open
    std::vector<double> n_ways(rules.size()); // in which it can begin
    size_t n_seen = 0, n_groups = 0;
    const auto enter = [&](size_t rule) {
        order[rule] = low[rule] = ++n_seen;
        open.push_back(rule);
        path.push_back({ rule, 0 });
    };
    for (size_t start = 0; start < rules.size(); ++start) {
        if (order[start] == 0) {
            enter(start);
        }
        while (!path.empty()) {
            const size_t now  = path.back().rule;
            size_t     & at   = path.back().at;
            const auto & rule = rules[now];
            if (at >= rule.size()) {
                path.pop_back();
                if (n_ways[now] > MAX_STACKS) {
                    throw std::runtime_error("rule " + name_of(now) + " can begin in too many ways");
                }
                if (n_ways[now] == 0.0 && !empty[now]) {
                    throw std::runtime_error("rule " + name_of(now) + " begins with nothing but itself");
                }
                if (low[now] == order[now]) {
                    n_groups++;
                    while (group[now] == 0) {
                        group[open.back()] = n_groups;
                        open.pop_back();
                    }
                }
                continue;
            }
            bool more = false; // whether the next element may be a beginning as well
            if (rule[at].type == LLAMA_GRETYPE_RULE_REF) {
                const size_t other = rule[at].value;
                if (order[other] == 0) {
                    enter(other);
                    continue; // and then here again
                }
                if (group[other] == 0) {
                    low[now] = std::min(low[now], low[other]);
                }
                if (!ends_alternative(rule[at + 1])) {
                    growing.push_back({ now, other });
                }
                n_ways[now] += n_ways[other];
                more = empty[other];
            } else if (!ends_alternative(rule[at])) {
                n_ways[now] += 1.0;
            }
            while (!more && !ends_alternative(rule[at])) {
                at++;
            }
            at++;
        }
    }
    for (const edge & e : growing) {
        if (group[e.from] == group[e.to]) {
            throw std::runtime_error("rule " + name_of(e.from) + " begins with itself (left recursion)");
        }
    }
}

// What llama_grammar_parser::parse does, which prints what is wrong straight to standard error, the whole text included.
void parse(llama_grammar_parser & parser, const char * text, const char * root) {
    check_size(text);
    for (const char * pos = skip_blank(text); *pos; ) {
        pos = parser.parse_rule(pos);
    }
    if (parser.rules.empty()) {
        throw std::runtime_error("it has no rules");
    }
    const auto check_defined = [&parser](uint32_t id) {
        if (id < parser.rules.size() && !parser.rules[id].empty()) {
            return;
        }
        for (const auto & symbol : parser.symbol_ids) {
            if (symbol.second == id) {
                throw std::runtime_error("rule " + symbol.first + " is used and not defined");
            }
        }
        throw std::runtime_error("a rule is used and not defined");
    };
    for (const auto & rule : parser.rules) {
        for (const auto & element : rule) {
            if (element.type == LLAMA_GRETYPE_RULE_REF) {
                check_defined(element.value);
            }
        }
    }
    for (const auto & symbol : parser.symbol_ids) {
        check_defined(symbol.second);
    }
    if (!parser.symbol_ids.count(root)) {
        throw std::runtime_error(std::string("it has no rule ") + root);
    }
    check_beginnings(parser);
}

// one line, and not the rest of the text that the parser's messages end with
std::string shortened(const std::string & message) {
    const size_t n = std::min(message.find_first_of("\r\n"), (size_t) 160);
    return n < message.size() ? message.substr(0, n) + " ..." : message;
}

// A character of which this is the first byte.
llama_partial_utf8 begun(uint8_t byte) {
    const int left = byte < 0x80 ? 0 : byte < 0xe0 ? 1 : byte < 0xf0 ? 2 : 3;
    return { left == 0 ? byte : byte & ((1u << (6 - left)) - 1), left };
}

// Whether a token's text goes on as UTF-8 after `partial`. The grammar would take some bytes for a character that are none,
// such as half of a pair of surrogates, and what is shown for them is something else.
bool is_utf8(llama_partial_utf8 partial, const std::string & piece) {
    uint32_t value = partial.value;
    int      left  = partial.n_remain;
    for (const char c : piece) {
        const uint8_t byte = (uint8_t) c;
        if (left == 0) {
            if (byte >= 0x80 && (byte < 0xc2 || byte > 0xf4)) {
                return false;
            }
            const llama_partial_utf8 first = begun(byte);
            value = first.value;
            left  = first.n_remain;
            continue;
        }
        const uint32_t next = (value << 6) | (byte & 0x3fu);
        // written longer than it has to be, surrogates, beyond the last code point
        if (byte >> 6 != 2 || (left == 2 && ((value == 0 && next < 0x20) || (value == 0xd && next >= 0x360))) ||
                (left == 3 && ((value == 0 && next < 0x10) || (value == 4 && next >= 0x110)))) {
            return false;
        }
        value = next;
        left--;
    }
    return left >= 0;
}

// The code points that become complete with a token's text, and what is left over. For text that is_utf8 accepts.
llama_partial_utf8 decode(llama_partial_utf8 partial, const std::string & piece, std::vector<uint32_t> & code_points) {
    for (const char c : piece) {
        const uint8_t byte = (uint8_t) c;
        if (partial.n_remain > 0) {
            partial = { (partial.value << 6) | (byte & 0x3fu), partial.n_remain - 1 };
        } else {
            partial = begun(byte);
        }
        if (partial.n_remain == 0) {
            code_points.push_back(partial.value);
            partial = { 0, 0 };
        }
    }
    return partial;
}

} // namespace

std::unique_ptr<knapspec_grammar> knapspec_grammar::make(
        const llama_vocab & vocab, const char * text, const char * root, const std::vector<llama_token> & ends) {
    std::unique_ptr<knapspec_grammar> made;
    try {
        llama_grammar_parser parser(&vocab);
        parse(parser, text, root);
        made = std::make_unique<knapspec_grammar>();
        // one rule more: a character, and then the root. Behind that character the grammar stands at the beginning.
        const uint32_t n_rules = (uint32_t) parser.rules.size();
        parser.rules.push_back({
            { LLAMA_GRETYPE_CHAR, 1 }, { LLAMA_GRETYPE_RULE_REF, parser.symbol_ids.at(root) }, { LLAMA_GRETYPE_END, 0 } });
        made->grammar.reset(new llama_grammar {
            &vocab, std::move(parser.rules), {}, {}, false, false, "", {}, {}, {} });
        made->grammar->stacks.push_back({ &made->grammar->rules[n_rules][0] });
        llama_grammar_accept(made->grammar.get(), 1);
    } catch (const std::out_of_range &) {
        LLAMA_LOG_ERROR("a number in it is too large\n");
        return nullptr;
    } catch (const std::exception & error) {
        LLAMA_LOG_ERROR("%s\n", shortened(error.what()).c_str());
        return nullptr;
    }
    made->vocab = &vocab;
    for (const auto & rule : made->grammar->rules) {
        for (const auto & element : rule) {
            made->names_tokens |= element.type == LLAMA_GRETYPE_TOKEN || element.type == LLAMA_GRETYPE_TOKEN_NOT;
        }
    }
    for (llama_token token = 0; token < (llama_token) vocab.n_tokens(); ++token) {
        const bool ends_it = vocab.is_eog(token) || std::find(ends.begin(), ends.end(), token) != ends.end();
        // the text of these is not part of an answer's, whatever a grammar would say about it
        const bool unseen  = vocab.token_get_attr(token) & (LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNKNOWN);
        const std::string & piece = vocab.token_to_piece(token);
        // llama.cpp takes a zero byte for the end of a text
        const bool fits = !(unseen && !made->names_tokens) && piece.find('\0') == std::string::npos;
        made->parts.push_back(ends_it ? part::end : fits ? part::text : part::none);
        made->first_byte.push_back((uint8_t) piece.c_str()[0]);
        made->is_ascii.push_back(std::all_of(piece.begin(), piece.end(), [](char c) { return (uint8_t) c < 0x80; }));
    }
    made->initial.stacks = made->grammar->stacks;
    made->states.push_back(made->initial);
    return made;
}

bool knapspec_grammar::may_end(const state & at) const {
    return std::any_of(at.stacks.begin(), at.stacks.end(), [](const auto & stack) { return stack.empty(); });
}

knapspec_grammar::state knapspec_grammar::after(const state & at, llama_token token) {
    state next;
    next.over = true;
    if (at.over || token < 0 || token >= (llama_token) parts.size() || parts[token] == part::end) {
        return next;
    }
    const std::string & piece = vocab->token_to_piece(token);
    if (!fits_utf8(at, token)) {
        return next;
    }
    grammar->stacks       = at.stacks;
    grammar->partial_utf8 = at.partial;
    if (names_tokens) {
        try {
            llama_grammar_accept_token(*grammar, token, piece);
        } catch (const std::exception &) {
            return next;
        }
    } else {
        code_points.clear();
        grammar->partial_utf8 = decode(at.partial, piece, code_points);
        for (size_t i = 0; i < code_points.size() && !grammar->stacks.empty() && grammar->stacks.size() <= MAX_STACKS; ++i) {
            llama_grammar_accept(grammar.get(), code_points[i]);
        }
        if (grammar->stacks.empty()) {
            return next;
        }
    }
    next.over    = false;
    next.lost    = at.lost || grammar->stacks.size() > MAX_STACKS;
    next.partial = grammar->partial_utf8;
    if (!next.lost) {
        next.stacks = grammar->stacks;
    }
    return next;
}

bool knapspec_grammar::fits_utf8(const state & at, llama_token token) const {
    // upstream's test says no to a character that is broken off by another
    return is_ascii[token] || is_utf8(at.partial, vocab->token_to_piece(token));
}

bool knapspec_grammar::is_lost() const {
    return states.back().lost;
}

void knapspec_grammar::move_to(const llama_token * answer, size_t n) {
    size_t n_same = 0;
    const size_t n_most = std::min(n, path.size());
    while (n_same < n_most && path[n_same] == answer[n_same]) {
        n_same++;
    }
    if (n_same < n_before) {
        n_same   = 0;
        n_before = 0;
        states.clear();
        states.push_back(initial);
    }
    path.resize(n_same);
    states.resize(n_same - n_before + 1);
    for (size_t i = n_same; i < n; ++i) {
        states.push_back(after(states.back(), answer[i]));
        path.push_back(answer[i]);
        if (states.size() > MAX_STATES) {
            states.pop_front();
            n_before++;
        }
    }
}

// A byte stands for a text of its own if it is a character, and for the beginning of one otherwise.
void knapspec_grammar::find_first_bytes(state & at) const {
    at.looked = true;
    if (names_tokens || at.partial.n_remain != 0) {
        at.first_bytes.set();
        return;
    }
    uint32_t texts[256][2] = {};
    llama_grammar_candidates left;
    for (uint32_t byte = 1; byte < 256; ++byte) {
        if (byte < 0x80) {
            texts[byte][0] = byte;
            left.push_back({ byte, texts[byte], { 0, 0 }, LLAMA_TOKEN_NULL });
        } else if (byte >= 0xc0) {
            left.push_back({ byte, texts[byte], begun(byte), LLAMA_TOKEN_NULL });
        }
    }
    at.first_bytes.reset();
    for (const auto & candidate : left) {
        at.first_bytes.set(candidate.index);
    }
    for (const auto & stack : at.stacks) {
        left = llama_grammar_reject_candidates_for_stack(grammar->rules, stack, left);
    }
    for (const auto & candidate : left) {
        at.first_bytes.reset(candidate.index);
    }
}

void knapspec_grammar::likely(llama_token n_vocab, std::vector<llama_token> & out) {
    state & at = states.back();
    if (!at.over && !at.looked) {
        find_first_bytes(at);
    }
    const bool end = may_end(at);
    out.clear();
    for (llama_token token = 0; token < std::min(n_vocab, (llama_token) parts.size()); ++token) {
        if (at.over || (parts[token] == part::end ? end : parts[token] == part::text && at.first_bytes[first_byte[token]])) {
            out.push_back(token);
        }
    }
}

void knapspec_grammar::test(const llama_token * tokens, size_t n, bool * allowed) {
    const state & at = states.back();
    if (at.over) {
        std::fill(allowed, allowed + n, true);
        return;
    }
    const bool end = may_end(at);
    candidates.clear();
    places.clear();
    for (size_t i = 0; i < n; ++i) {
        allowed[i] = false;
        if (tokens[i] < 0 || tokens[i] >= (llama_token) parts.size() || at.stacks.empty()) {
            continue;
        }
        if (parts[tokens[i]] == part::end) {
            allowed[i] = end;
        } else if (parts[tokens[i]] == part::text && fits_utf8(at, tokens[i])) {
            candidates.push_back({ tokens[i], 0.0f, 0.0f });
            places.push_back(i);
        }
    }
    if (candidates.empty()) {
        return;
    }
    grammar->stacks       = at.stacks;
    grammar->partial_utf8 = at.partial;
    llama_token_data_array array = { candidates.data(), candidates.size(), -1, false };
    llama_grammar_apply_impl(*grammar, &array);
    for (size_t i = 0; i < candidates.size(); ++i) {
        allowed[places[i]] = candidates[i].logit == 0.0f;
    }
}

extern "C" knapspec_grammar * knapspec_grammar_init(
        const llama_model * model,
        const char        * text,
        const char        * root,
        const llama_token * ends,
        int32_t             n_ends) {
    return knapspec_grammar::make(model->vocab, text, root, std::vector<llama_token>(ends, ends + n_ends)).release();
}

extern "C" void knapspec_grammar_free(knapspec_grammar * grammar) {
    delete grammar;
}

extern "C" bool knapspec_grammar_allows(
        knapspec_grammar  * grammar,
        const llama_token * answer,
        int32_t             n_answer,
        llama_token         token) {
    bool allowed = false;
    grammar->move_to(answer, n_answer);
    grammar->test(&token, 1, &allowed);
    return allowed;
}
