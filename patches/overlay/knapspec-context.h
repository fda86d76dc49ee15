// What a llama_context carries for knapspec: the plan, the graphs kept alive, interruption. Called from llama-context.cpp.
#pragma once

#include "knapspec.h"
#include "knapspec-graph.h"
#include "knapspec-head.h"
#include "knapspec-sampling.h"

#include "llama-graph.h"

#include "ggml-cpp.h"

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

struct llama_batch_ext;
struct llama_context;

class knapspec_context {
public:
    explicit knapspec_context(llama_context & ctx);
    ~knapspec_context();

    // the state of a context, made on first use; a context that nobody asks for has none and takes upstream's path
    static knapspec_context & of(llama_context * ctx);

    // --- hooks, called by llama_context ---

    // Before a graph is taken for this ubatch: make the scheduler and the graphs kept for (plan, tokens, outputs) those of
    // the context. So a graph is only ever reused under the plan it was built for.
    void before_graph(const llama_ubatch & ubatch);

    // After the architecture built its graph: leave out what the plan skips. False: the plan cannot be honoured.
    bool after_build(llm_graph_result & res);

    // A graph was built for inspection or reservation. With several backends the scheduler then cuts it where data moves
    // from one to another, and the residual chain with it.
    void before_split(const llm_graph_result & res);

    // Give the context its own scheduler back, before it reserves graphs or is destroyed.
    void restore();

    // Free all kept graphs: they were allocated for settings that no longer hold.
    void drop_graphs();

    // --- services behind the C interface ---

    const std::vector<knapspec_sublayer_info> & sublayers();
    const std::vector<knapspec_traits> & traits();
    int64_t learned_positions();
    const std::vector<std::string> & uncovered_weights();
    const std::string & refusal();
    const std::vector<std::string> & window_refusals(); // one per sublayer

    int32_t set_plan(const int32_t * modes, int32_t n, const knapspec_window * windows);
    void    keep_graphs(int32_t n);

    // the short head; nullptr, with a reason, where there can be none
    knapspec_head * short_head();
    const std::string & head_refusal();
    int32_t reserve_head(int32_t n_rows, const char * path);
    int32_t set_head(const int32_t * places, const llama_token * tokens, int32_t n);
    int32_t use_head(int32_t n_rows);
    int32_t head_logits(int32_t row, float * out, int32_t n_rows);

    int32_t eval(
            const llama_token       * tokens,
            int32_t                   n_tokens,
            llama_pos                 pos,
            int32_t                   n_outputs,
            const knapspec_sampling & sampling,
            llama_token             * tokens_out,
            float                   * probs_out,
            float                   * margins_out);

    int32_t beside(
            const llama_token       * tokens,
            int32_t                   n_blocks,
            const llama_pos         * starts,
            const int32_t           * lengths,
            const llama_token       * expected,
            const knapspec_sampling & sampling,
            llama_token             * tokens_out,
            float                   * probs_out,
            float                   * margins_out);

    int32_t fill(int32_t n_tokens, llama_pos pos);

    int32_t logprobs(int32_t row, llama_token token, int32_t n_top, float * logprob_out, llama_token * tokens_out, float * logprobs_out);

    // From now on passes keep the residual stream after every sublayer; `captured` copies that of the latest one.
    int32_t capture(bool enable);
    int32_t captured(float * out, int32_t n_tokens);
    int32_t n_hidden();

    // Add the mean of what a skipped sublayer added to the latest tokens; learned in every interval-th verification. 0: off.
    void    set_repair(int32_t interval);
    int64_t get_repair(float * out);

    class windowing; // knapspec-window.h
    class branching; // knapspec-branch.h
    branching & branches();
    const std::string & branch_refusal();

    void interrupt(bool value) { interrupted.store(value); }

    knapspec_graph_stats graph_stats() const;

private:
    llama_context & ctx;

    knapspec_plan plan;
    int32_t       n_head = 0; // rows of the short head; 0: the full one

    bool                                analysed  = false;
    bool                                analysing = false;
    std::vector<knapspec_sublayer_info> found;
    std::vector<knapspec_traits>        found_traits;
    std::vector<std::string>            found_uncovered;
    std::vector<std::string>            found_window_refusals;
    int64_t                             n_learned_positions = 0;
    int32_t                             n_stream = 0; // width of the residual stream
    std::string                         why_not;
    std::string                         why_no_branches;
    std::string                         why_no_head;
    const ggml_tensor *                 head_weight = nullptr;
    std::unique_ptr<knapspec_head>      head;

    // One scheduler holds one allocated graph, so a kept graph has a scheduler of its own. While a slot is current it has
    // swapped places with the context's own scheduler, which then lives in the slot.
    struct graph_slot {
        knapspec_plan        plan;
        uint32_t             n_tokens  = 0;
        uint32_t             n_outputs = 0;
        bool                 capturing = false;
        bool                 repaired  = false; // skipped sublayers have their mean added
        int32_t              n_head    = 0;

        std::vector<ggml_tensor *> captured; // one per sublayer
        ggml_tensor *              logits = nullptr; // of a short head

        uint64_t             last_used = 0;
        int64_t              n_nodes = 0;

        ggml_backend_sched_ptr              sched;
        std::array<llm_graph_result_ptr, 2> res;
        llm_graph_result *                  active = nullptr;
    };

    std::vector<std::unique_ptr<graph_slot>> kept;
    std::unique_ptr<graph_slot>              aside; // of the latest pass beside sequence 0: many plans once, none for long

    graph_slot   own;               // bookkeeping only: the context holds the contents itself
    graph_slot * current = nullptr; // the kept slot that stands in for the context's own, if any
    size_t       n_keep  = 0;
    uint64_t     clock   = 0;

    int64_t n_computed = 0;
    int64_t n_built    = 0;
    int64_t n_evicted  = 0;
    int64_t n_nodes    = 0;

    std::atomic<bool> interrupted{ false };
    bool              callback_set = false;
    bool              is_beside    = false; // the pass that runs is one beside sequence 0
    bool              is_picking   = false; // it is one of ours, which may have a short head
    bool              capturing    = false;

    struct {
        int32_t interval = 0;  // 0: off
        int64_t n_passes = 0;  // that could be looked at
        int64_t n_tokens = 0;  // seen

        std::vector<float>         means;   // [sublayer][hidden]
        std::vector<ggml_tensor *> vectors; // their copies beside the weights, one per sublayer; NULL: not repaired

        std::vector<ggml_context_ptr>        contexts;
        std::vector<ggml_backend_buffer_ptr> buffers;
        std::vector<uint8_t>                 repairable; // by sublayer
    } repair;

    std::unique_ptr<branching> branched;

    knapspec_sampler         sampler;
    std::vector<llama_token> text; // of sequence 0 by position, as far as it came through eval; -1: unknown
    int32_t                  n_rows = 0; // of logits of the latest pass
    int32_t                  n_columns = 0; // logits of such a row, where a short head made them
    std::vector<float>       short_rows; // of the latest pass, where the device's memory is not ours

    std::vector<llama_token>    batch_tokens; // of cells that are filled without computing
    std::vector<llama_pos>      batch_pos;
    std::vector<int32_t>        batch_n_seq_id;
    std::vector<llama_seq_id *> batch_seq_id;
    std::vector<int8_t>         batch_logits;
    std::vector<llama_seq_id>   batch_branch; // sequences beside sequence 0

    void analyse();
    llama_batch make_batch(const llama_token * tokens, int32_t n_tokens, llama_pos pos, int32_t n_outputs);
    void swap_with(graph_slot & slot);
    graph_slot & slot_for(uint32_t n_tokens, uint32_t n_outputs);
    std::unique_ptr<graph_slot> make_slot(uint32_t n_tokens, uint32_t n_outputs) const;

    // sequence `branch` begins with the first `start` tokens of sequence 0; false if they are no longer there
    bool fork(llama_seq_id branch, llama_pos start);

    std::string find_branch_refusal(const llm_graph_result & res, const std::vector<knapspec_item> & items) const;

    bool has_captured(int32_t n_tokens) const; // whether the latest pass kept the states of so many tokens
    bool repairs() const; // whether passes under a plan are repaired
    bool make_repairs();  // the vectors; false: there is no memory for them
    void learn_repairs(int32_t n_tokens); // from the states that the latest pass kept

    int32_t head_now() const { return is_picking ? n_head : 0; }
    // the rows of the latest pass under a short head, [row][n_head]; nullptr, with a line in the log, if they are not there
    float * short_logits(int32_t n_outputs);

    void    watch_interrupt();
    int32_t compute(const llama_batch_ext & batch);
    void    set_text(llama_pos pos, const llama_token * tokens, int32_t n_tokens);
    // rows first_row .. of the latest pass, for the tokens at positions pos + 1 ..
    int32_t pick(
            llama_pos                 pos,
            int32_t                   first_row,
            int32_t                   n_outputs,
            const knapspec_sampling & sampling,
            llama_token             * tokens_out,
            float                   * probs_out,
            float                   * margins_out);
    int32_t pick_beside(
            const llama_token       * tokens,
            int32_t                   n_blocks,
            const llama_pos         * starts,
            const int32_t           * lengths,
            const knapspec_sampling & sampling,
            llama_token             * tokens_out,
            float                   * probs_out,
            float                   * margins_out);
};
