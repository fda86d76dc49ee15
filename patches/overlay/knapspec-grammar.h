// A grammar over the tokens of an answer. Its state is a function of the answer's tokens, so drafts, verification and passes
// beside the text each get theirs, and nothing has to be undone after a draft.
#pragma once

#include "knapspec.h"

#include "llama-grammar.h"

#include <deque>
#include <memory>
#include <vector>

struct llama_vocab;

struct knapspec_grammar {
    // nullptr, with an error line in the log, if the text cannot be read
    static std::unique_ptr<knapspec_grammar> make(
            const llama_vocab & vocab, const char * text, const char * root, std::vector<llama_token> ends);

    // Stand behind these tokens of an answer.
    void move_to(const llama_token * answer, size_t n);

    // Whether each of these tokens may come next, in allowed[0..n).
    void test(const llama_token * tokens, size_t n, bool * allowed);

private:
    struct deleter { void operator()(llama_grammar * grammar) const { llama_grammar_free_impl(grammar); } };

    // what changes while a grammar accepts text; its stacks point into the rules of `grammar`
    struct state {
        llama_grammar_stacks stacks;
        llama_partial_utf8   partial = {};
        bool                 over    = false; // behind an end, or behind text that it does not allow: nothing is constrained
    };

    const llama_vocab * vocab = nullptr;
    std::unique_ptr<llama_grammar, deleter> grammar;
    std::vector<llama_token> ends;
    bool names_tokens = false; // tokens are matched by id as well, not by their text alone

    state                    initial;
    std::vector<llama_token> path;     // the answer so far
    std::deque<state>        states;   // after the first n_before + i tokens of it
    size_t                   n_before = 0;

    std::vector<llama_token_data> candidates;

    bool is_end(llama_token token) const;
    bool may_end(const state & at) const;
    state after(const state & at, llama_token token);
};
