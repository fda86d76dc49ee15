#include "knapspec-grammar.h"

#include "llama-impl.h"
#include "llama-model.h"
#include "llama-vocab.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>

namespace {

// States kept behind the latest one: more than a draft and a pass beside the text look back. An older one is computed
// again from the answer's first token.
constexpr size_t MAX_STATES = 256;

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

// What llama_grammar_parser::parse does, which prints what is wrong straight to standard error, the whole text included.
void parse(llama_grammar_parser & parser, const char * text) {
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
}

// one line, and not the rest of the text that the parser's messages end with
std::string shortened(const std::string & message) {
    const size_t n = std::min(message.find('\n'), (size_t) 160);
    return n < message.size() ? message.substr(0, n) + " ..." : message;
}

} // namespace

std::unique_ptr<knapspec_grammar> knapspec_grammar::make(
        const llama_vocab & vocab, const char * text, const char * root, const std::vector<llama_token> & ends) {
    std::unique_ptr<knapspec_grammar> made;
    try {
        llama_grammar_parser parser(&vocab);
        parse(parser, text);
        made = std::make_unique<knapspec_grammar>();
        made->grammar.reset(llama_grammar_init_impl(&vocab, text, root, false, nullptr, 0, nullptr, 0));
    } catch (const std::exception & error) {
        LLAMA_LOG_ERROR("%s\n", shortened(error.what()).c_str());
        return nullptr;
    }
    if (!made->grammar) {
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
        made->parts.push_back(ends_it ? part::end : unseen && !made->names_tokens ? part::none : part::text);
        made->first_byte.push_back((uint8_t) vocab.token_to_piece(token).c_str()[0]);
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
    grammar->stacks       = at.stacks;
    grammar->partial_utf8 = at.partial;
    try {
        llama_grammar_accept_token(*grammar, token, vocab->token_to_piece(token));
    } catch (const std::exception &) {
        return next;
    }
    next.over    = false;
    next.stacks  = grammar->stacks;
    next.partial = grammar->partial_utf8;
    return next;
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
        const int length = byte < 0x80 ? 1 : byte < 0xc0 ? 0 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
        if (length == 1) {
            texts[byte][0] = byte;
            left.push_back({ byte, texts[byte], { 0, 0 }, LLAMA_TOKEN_NULL });
        } else if (length > 1) {
            const uint32_t value = byte & ((1u << (7 - length)) - 1);
            left.push_back({ byte, texts[byte], { value, length - 1 }, LLAMA_TOKEN_NULL });
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
        if (parts[tokens[i]] == part::end) {
            allowed[i] = end;
        } else if (parts[tokens[i]] == part::text) {
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
