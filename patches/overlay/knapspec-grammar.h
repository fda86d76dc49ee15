// A grammar over the tokens of an answer. Its state is a function of the answer's tokens, so drafts, verification and passes
// beside the text each get theirs, and nothing has to be undone after a draft.
#pragma once

#include "knapspec.h"

#include "llama-grammar.h"

#include <bitset>
#include <deque>
#include <memory>
#include <vector>

struct llama_vocab;

struct knapspec_grammar {
    // nullptr, with an error line in the log, if the text cannot be read
    static std::unique_ptr<knapspec_grammar> make(
            const llama_vocab & vocab, const char * text, const char * root, const std::vector<llama_token> & ends);

    // Stand behind these tokens of an answer.
    void move_to(const llama_token * answer, size_t n);

    // Tokens of the vocabulary, below n_vocab, of which all others are known not to be allowed next.
    void likely(llama_token n_vocab, std::vector<llama_token> & out);

    // Whether each of these tokens may come next, in allowed[0..n).
    void test(const llama_token * tokens, size_t n, bool * allowed);

    // Whether there were too many ways to read the text: then nothing is allowed.
    bool is_lost() const;

    // Whether the answer may end here.
    bool is_complete() const { return may_end(states.back()); }

private:
    struct deleter { void operator()(llama_grammar * grammar) const { llama_grammar_free_impl(grammar); } };

    // what changes while a grammar accepts text; its stacks point into the rules of `grammar`
    struct state {
        llama_grammar_stacks stacks;
        llama_partial_utf8   partial = {};
        bool                 over    = false; // behind an end, or behind text that it does not allow: nothing is constrained
        bool                 lost    = false; // so many ways to read the text that they are not followed: nothing is allowed
        bool                 looked  = false; // whether first_bytes is known
        std::bitset<256>     first_bytes;     // that the next token's text may begin with
    };

    const llama_vocab * vocab = nullptr;
    std::unique_ptr<llama_grammar, deleter> grammar;
    enum class part : uint8_t { text, end, none };
    std::vector<part>    parts;       // by token: what it is of an answer
    std::vector<uint8_t> first_byte;  // by token, of its text
    std::vector<bool>    is_ascii;    // by token
    bool names_tokens = false; // tokens are matched by id as well, not by their text alone

    state                    initial;
    std::vector<llama_token> path;     // the answer so far
    std::deque<state>        states;   // after the first n_before + i tokens of it
    size_t                   n_before = 0;

    std::vector<llama_token_data> candidates;
    std::vector<size_t>           places;
    std::vector<uint32_t>         code_points;

    bool may_end(const state & at) const;
    bool fits_utf8(const state & at, llama_token token) const;
    state after(const state & at, llama_token token);
    void  find_first_bytes(state & at) const;
};
