// knapspec: sublayer plans for llama.cpp. The C interface that knapspec-edge binds with ctypes.
//
// All functions are additions; no public struct or signature of llama.cpp changes. A context without a plan behaves
// exactly as in the unpatched library.
#pragma once

#include "llama.h"

#include <stdint.h>

// Raised with every change that a caller can notice; equals abi in patches/UPSTREAM.toml.
#define KNAPSPEC_ABI 6

#ifdef __cplusplus
extern "C" {
#endif

// what a sublayer is made of
enum knapspec_kind {
    KNAPSPEC_KIND_ATTENTION = 0,
    KNAPSPEC_KIND_MLP       = 1,
    KNAPSPEC_KIND_BLOCK     = 2, // attention and MLP behind one residual addition (parallel residual)
    KNAPSPEC_KIND_RECURRENT = 3, // state-space or linear-attention mixer
};

// how a sublayer takes part
enum knapspec_mode {
    KNAPSPEC_MODE_FULL   = 0,
    KNAPSPEC_MODE_SKIP   = 1,
    KNAPSPEC_MODE_WINDOW = 2, // its attention sees the first and the most recent tokens only; it writes all its keys
};

// what a windowed attention sees, of what the model lets it see; 0, 0 for other modes
struct knapspec_window {
    int32_t n_sinks;  // tokens at positions below this one
    int32_t n_recent; // most recent tokens, the one that looks included; 1 or more
};

// return codes of knapspec_eval and others, next to those of llama_decode (1: no slot, 2: aborted, < 0: failed)
enum knapspec_status {
    KNAPSPEC_OK           =   0,
    KNAPSPEC_NO_SLOT      =   1,
    KNAPSPEC_ABORTED      =   2,
    KNAPSPEC_BAD_ARGUMENT = -10,
    KNAPSPEC_BAD_LOGITS   = -11, // a row without any finite logit
    KNAPSPEC_DEAD_END     = -12, // the grammar allows no token
    KNAPSPEC_COMPLETE     = -13, // nor need there be one: the answer is complete, and the vocabulary has no token that says so
    KNAPSPEC_UNREADABLE   = -14, // weights that can be read neither from memory nor from the model's file
};

struct knapspec_graph_stats {
    int64_t n_builds;   // graphs built and allocated
    int64_t n_reuses;   // graphs computed again as they were
    int64_t n_evicted;  // kept graphs given up for newer ones
    int64_t n_nodes;    // nodes of the graph that was computed last
    int64_t n_kept;     // graphs kept now
};

// what a sublayer works on when one token is computed; see knapspec_sublayer_traits
struct knapspec_traits {
    uint64_t signature;       // equal for sublayers that do the same work on weights of the same types in the same place
    int64_t  weight_bytes;    // weights read for one token; of experts, those that are used
    int64_t  cell_bytes;      // keys and values of one cell, or one recurrent state
    int32_t  n_cells;         // cells of the cache it reads; 0 without one
    int32_t  n_experts;       // 0 without experts
    int32_t  n_experts_used;
    char     device[36];      // name of the buffer type that holds its largest weight
};

struct knapspec_grammar; // a grammar and where it stands, see knapspec_grammar_init

// How a token is picked from a row of logits: bias, penalties, then top_k, typical_p, top_p, min_p and the temperature, in
// the order and with the meaning of llama.cpp's sampler chain; then Gumbel-max with noise that is a hash of (seed,
// position, token id). A grammar is asked about the pick alone; only if it rejects that, the chain is run again over what
// it allows, as llama.cpp does. Of equal logits the lower token id comes first.
struct knapspec_sampling {
    float    temperature;       // <= 0: the most probable token that is left
    float    min_p;             // drop tokens less probable than min_p times the most probable one; <= 0: off
    uint64_t seed;
    float    top_p;             // >= 1: off
    float    typical_p;         // >= 1: off
    int32_t  top_k;             // <= 0: off
    int32_t  temperature_first; // not 0: the temperature comes before the filters
    float    repeat_penalty;    // 1: off
    float    presence_penalty;
    float    frequency_penalty;
    int32_t  penalty_last_n;    // tokens that penalties look back on; 0: none, < 0: all
    int32_t  n_bias;
    int32_t  answer_start;      // position of the first token that the grammar is about
    const struct llama_logit_bias * bias;    // tokens in ascending order
    struct knapspec_grammar       * grammar; // NULL: none
};

LLAMA_API int32_t knapspec_abi(void);

// Recognised sublayers in execution order. A negative count means that the architecture is not recognised;
// knapspec_refusal then says why (valid until the context is freed, empty otherwise).
LLAMA_API int32_t      knapspec_n_sublayers(struct llama_context * ctx);
LLAMA_API const char * knapspec_refusal    (struct llama_context * ctx);
LLAMA_API int32_t      knapspec_sublayer   (struct llama_context * ctx, int32_t i, int32_t * layer, int32_t * kind);

// Returns 0, or KNAPSPEC_BAD_ARGUMENT for an i outside the sublayers.
LLAMA_API int32_t knapspec_sublayer_traits(struct llama_context * ctx, int32_t i, struct knapspec_traits * out);

// Positions that the model has learned embeddings for; 0 where positions have no end. A pass beyond them ends the process.
LLAMA_API int32_t knapspec_learned_positions(struct llama_context * ctx);

// One mode per sublayer for all following llama_decode calls of this context, and one window per sublayer, or NULL where no
// mode is a window; n = 0 returns to the full model.
// Works on any context, also one that belongs to a llama_cpp.Llama object. Returns 0, or KNAPSPEC_BAD_ARGUMENT for a
// wrong length, an unknown mode or an attention that cannot be windowed; the previous plan then stays.
LLAMA_API int32_t knapspec_set_plan(
        struct llama_context         * ctx,
        const int32_t                * modes,
        int32_t                        n,
        const struct knapspec_window * windows);

// Why the attention of sublayer i cannot be windowed; empty if it can, NULL for an i outside the sublayers. A sliding-window
// attention can, and stays as it is under a window that holds all it sees. Valid until the context is freed.
LLAMA_API const char * knapspec_window_refusal(struct llama_context * ctx, int32_t i);

// Repair of skipped sublayers: what a sublayer adds to the residual stream has a mean over the latest tokens, and a draft adds that
// where it skips the sublayer. The means are learned from passes of the full model over 2 to 64 tokens with logits for all of them, that is from
// verification; every `interval`-th of those is looked at (1: each). 0, as at first: skipped sublayers add nothing, and
// what was learned is forgotten. The first sublayer, and those whose
// addition holds more than the stream and one branch, are not repaired.
LLAMA_API void    knapspec_set_repair(struct llama_context * ctx, int32_t interval);
// The means, [sublayer][hidden], zero where there is none; returns the number of tokens seen, of which drafts take no
// notice before there are some. `out` may be NULL.
LLAMA_API int64_t knapspec_get_repair(struct llama_context * ctx, float * out);

// Short head: a list of some of the vocabulary's tokens, whose rows of the output projection are copied as they are into
// a tensor of its own, on the same device. knapspec_use_head makes following knapspec_eval and knapspec_beside calls multiply the first
// n_rows of the list alone (0: the whole projection): their picks, and the probabilities of these, are among those tokens, and
// equal to what a whole row would give if all other logits were -inf. Passes of llama_decode always have whole rows. Neither changing
// the list nor n_rows takes part in what the cache holds. A pass with a short head may not be longer than n_ubatch.
//
// knapspec_head_weight: name of the tensor that holds the projection in the model's file; NULL where logits are no plain product,
// perhaps scaled or capped, of one: knapspec_head_refusal then says why, it is empty otherwise.
LLAMA_API const char * knapspec_head_weight (struct llama_context * ctx);
LLAMA_API const char * knapspec_head_refusal(struct llama_context * ctx);
// A list of n_rows places, all of them empty; 0 frees the memory. `path`: the model's file (of several, the first), which rows are
// read from where they cannot be read back because they have been packed. Returns 0, KNAPSPEC_UNREADABLE where they cannot be
// had, or KNAPSPEC_BAD_ARGUMENT.
LLAMA_API int32_t knapspec_head_reserve(struct llama_context * ctx, int32_t n_rows, const char * path);
// places[i] of the list becomes tokens[i], for i below n; no graph is built again. Returns 0, or KNAPSPEC_BAD_ARGUMENT, with
// the list as it was, for a place or a token that does not exist and for a token that would be there twice.
LLAMA_API int32_t knapspec_head_set    (struct llama_context * ctx, const int32_t * places, const llama_token * tokens, int32_t n);
// Returns 0, or KNAPSPEC_BAD_ARGUMENT where one of the first n_rows places is empty.
LLAMA_API int32_t knapspec_use_head    (struct llama_context * ctx, int32_t n_rows);
// The n_rows logits of row `row` of the latest pass, which had a head of so many rows. Returns 0 or KNAPSPEC_BAD_ARGUMENT.
LLAMA_API int32_t knapspec_head_logits (struct llama_context * ctx, int32_t row, float * out, int32_t n_rows);

// Keep up to n allocated graphs alive, one per (plan, tokens, outputs). 0: only llama.cpp's own.
LLAMA_API void knapspec_keep_graphs(struct llama_context * ctx, int32_t n);
LLAMA_API void knapspec_get_graph_stats(struct llama_context * ctx, struct knapspec_graph_stats * out);

// Append n_tokens to sequence 0 at positions pos .. pos+n_tokens-1 under the current plan, compute logits for the last
// n_outputs of them, and pick one token per output row: the token after position pos + n_tokens - n_outputs + row. Where a
// row other than the first has no finite logit, or the grammar allows nothing there, its token is -1.
// tokens_out, probs_out and margins_out hold n_outputs entries.
LLAMA_API int32_t knapspec_eval(
        struct llama_context           * ctx,
        const llama_token              * tokens,
        int32_t                          n_tokens,
        llama_pos                        pos,
        int32_t                          n_outputs,
        const struct knapspec_sampling * sampling,
        llama_token                    * tokens_out,
        float                          * probs_out,
        float                          * margins_out);

// Evaluate n_blocks blocks of tokens beside sequence 0, in one pass under the current plan: block i holds lengths[i] tokens at
// positions starts[i] .., behind the first starts[i] tokens of sequence 0, and sees nothing of the other blocks. One pick
// per token, block after block. Sequence 0 is left as it is; the context needs kv_unified, and as many free cells as there
// are tokens. A row without a pick has the token -1. With `expected`, one token per row, a margin is that of the expected token over the best other one, negative
// where that is picked (greedy only), NaN where the short head lacks it; without, that of the pick. KNAPSPEC_NO_SLOT: no free cells, or a sliding-window cache
// no longer holds the tokens before a block.
LLAMA_API int32_t knapspec_beside(
        struct llama_context           * ctx,
        const llama_token              * tokens,
        int32_t                          n_blocks,
        const llama_pos                * starts,
        const int32_t                  * lengths,
        const llama_token              * expected,
        const struct knapspec_sampling * sampling,
        llama_token                    * tokens_out,
        float                          * probs_out,
        float                          * margins_out);

// Hidden states. n_hidden is the width of the residual stream. While capturing, every pass keeps the stream after each sublayer
// (after a skipped one: what stood before it), and knapspec_captured copies that of the latest pass into
// out[sublayer][token][hidden]. It returns KNAPSPEC_BAD_ARGUMENT unless the pass had n_tokens tokens, all of them with logits.
LLAMA_API int32_t knapspec_n_hidden(struct llama_context * ctx);
LLAMA_API int32_t knapspec_capture (struct llama_context * ctx, bool enable);
LLAMA_API int32_t knapspec_captured(struct llama_context * ctx, float * out, int32_t n_tokens);

// Branches: single sublayers applied to given states of many candidate networks at once. A branch sees the first `start`
// tokens of sequence 0 and, causally, its own window of n_tokens tokens behind them; branches see nothing of each other.
// Between begin and end no other pass can be computed; after end sequence 0 is as it was before, bit for bit. The context
// needs kv_unified and free cells for at least one window; branches that do not fit are computed in turns.
// States are [branch][token][hidden]. All return as knapspec_eval does; begin returns KNAPSPEC_NO_SLOT where there are no
// cells or a sliding-window cache no longer holds the tokens before the window.
// knapspec_branch_refusal: why the sublayers behind the first layer cannot be computed by themselves; empty if they can.
LLAMA_API const char * knapspec_branch_refusal(struct llama_context * ctx);
LLAMA_API int32_t      knapspec_branch_begin  (
        struct llama_context * ctx,
        llama_pos              start,
        const llama_token    * tokens,
        int32_t                n_tokens,
        int32_t                n_branches);
// The states of one branch, the full model, after sublayer `last`.
LLAMA_API int32_t      knapspec_branch_embed  (struct llama_context * ctx, int32_t last, float * states_out);
// Sublayer 1 or higher; states_out may be states.
LLAMA_API int32_t      knapspec_branch_apply  (
        struct llama_context * ctx,
        int32_t                sublayer,
        int32_t                n_branches,
        const float          * states,
        float                * states_out);
// Final norm and head: the most probable token and its probability, [branch][token].
LLAMA_API int32_t      knapspec_branch_head   (
        struct llama_context * ctx,
        int32_t                n_branches,
        const float          * states,
        llama_token          * tokens_out,
        float                * probs_out);
LLAMA_API void         knapspec_branch_end    (struct llama_context * ctx);

// Mark the cells of positions pos .. pos+n_tokens-1 of sequence 0 as filled without computing them: what they hold is
// undefined. For timing passes at a long context; clear the memory before anything else is computed. Returns as
// llama_decode does.
LLAMA_API int32_t knapspec_fill(struct llama_context * ctx, int32_t n_tokens, llama_pos pos);

// Pick from one row of logits, the function knapspec_eval uses. `position` is the position of the picked token, `history`
// the n_history tokens of the text right before it. A grammar has to have been started with the same model's vocabulary.
LLAMA_API int32_t knapspec_pick(
        const float                    * logits,
        int32_t                          n_vocab,
        const struct knapspec_sampling * sampling,
        int64_t                          position,
        const llama_token              * history,
        int32_t                          n_history,
        llama_token                    * token_out,
        float                          * prob_out,
        float                          * margin_out);

// Log-probabilities before any setting changes them, of row `row` of the latest pass: that of `token`, and the n_top most
// probable tokens with theirs, best first. Returns how many those are, or KNAPSPEC_BAD_ARGUMENT.
LLAMA_API int32_t knapspec_logprobs(
        struct llama_context * ctx,
        int32_t                row,
        llama_token            token,
        int32_t                n_top,
        float                * logprob_out,
        llama_token          * tokens_out,
        float                * logprobs_out);

// A grammar in GBNF for the texts of this model, or NULL if it cannot be read; knapspec_last_error says why. `ends` are
// tokens that end an answer besides those of the vocabulary. Tokens without visible text are not allowed unless the
// grammar names them. Free it after the last pass that uses it.
LLAMA_API struct knapspec_grammar * knapspec_grammar_init(
        const struct llama_model * model,
        const char               * text,
        const char               * root,
        const llama_token        * ends,
        int32_t                    n_ends);
LLAMA_API void knapspec_grammar_free(struct knapspec_grammar * grammar);
// Whether the grammar allows `token` behind the n_answer tokens of an answer. For tests and tools.
LLAMA_API bool knapspec_grammar_allows(
        struct knapspec_grammar * grammar,
        const llama_token       * answer,
        int32_t                   n_answer,
        llama_token               token);

// The CPU kernels of ours (overlay/ggml-cpu), on unless the environment has KNAPSPEC_EDGE_KERNELS=0. Off, every node is
// computed by upstream's. For the whole process, and not while a context computes. get is false where no CPU backend is
// loaded.
LLAMA_API void knapspec_set_kernels(bool enable);
LLAMA_API bool knapspec_get_kernels(void);

// Weights whose products may depend, bit for bit, on how many tokens are computed at once: no kernel of ours covers them
// (their type, their layout, experts, another device). With the switch off that holds of all of them. What is not listed gives a token the same
// bits alone and among up to 16. Attention is not looked at. `name` is valid until the context is freed; NULL outside.
LLAMA_API int32_t      knapspec_n_varying_weights(struct llama_context * ctx);
LLAMA_API const char * knapspec_varying_weight   (struct llama_context * ctx, int32_t i);

// Make the running (or the next) computation of this context return KNAPSPEC_ABORTED. Safe from any thread.
LLAMA_API void knapspec_interrupt      (struct llama_context * ctx);
LLAMA_API void knapspec_interrupt_clear(struct llama_context * ctx);
// While guarded, SIGINT interrupts the computation of this context and then runs the handler that was there before.
// One context at a time; returns 0 or KNAPSPEC_BAD_ARGUMENT.
LLAMA_API int32_t knapspec_sigint_guard(struct llama_context * ctx, bool enable);

// Log lines of llama.cpp and ggml: those of at least `level` go to standard error (GGML_LOG_LEVEL_NONE: none do), the
// error lines since the last clear are kept, up to 4 KiB of the latest.
LLAMA_API void    knapspec_log_install(int32_t level);
LLAMA_API int32_t knapspec_last_error (char * buf, int32_t size); // returns its length, 0 if there was none
LLAMA_API void    knapspec_clear_error(void);

#ifdef __cplusplus
}
#endif
