// Branches beside sequence 0 that run one sublayer at a time on given states: what a search over hidden states asks for.
//
// A branch shares the first `start` tokens of sequence 0 and has cells of its own for a window behind them. A sublayer writes
// its keys into these cells and reads them in the same call, so all that lives on between two calls are the states, and
// those are the caller's.
#pragma once

#include "knapspec-context.h"

#include "llama-batch.h"
#include "llama-kv-cache.h"

class knapspec_context::branching {
public:
    explicit branching(knapspec_context & owner);
    ~branching();

    bool is_open() const { return open; }

    // Room for up to n_branches branches of n_tokens tokens at a time, more are computed in turns.
    int32_t begin(llama_pos start, const llama_token * tokens, int32_t n_tokens, int32_t n_branches);

    // Gives sequence 0 back as it was before `begin`, whatever happened since.
    void end();

    // The same around a pass of llama.cpp's own over this batch, whose sequences are not those of sequence 0: what it takes
    // from a sliding window is put back, and so is the place where the search for cells begins. False: there are no cells.
    bool hold(const llama_batch_ext & batch);
    void give_back();

    int32_t embed(int32_t last, float * states_out);
    int32_t apply(int32_t sublayer, int32_t n_branches, const float * states, float * states_out);
    int32_t head (int32_t n_branches, const float * states, llama_token * tokens_out, float * probs_out);

private:
    knapspec_context & owner;
    llama_context    & ctx;

    bool                     open  = false;
    llama_pos                start = 0;
    std::vector<llama_token> window;
    int32_t                  n_room = 0; // branches that are computed at once

    // What is done to one cache: cells for the windows, and what stood in them.
    struct placed {
        llama_kv_cache *      cache;
        llama_pos             first; // of the positions before `start` that branches share
        uint32_t              head;
        std::vector<uint32_t> cells; // of branch 1, of branch 2, ...
        std::vector<uint32_t> taken; // cells that had left the sliding window, but could come back into it
        llama_kv_cells        meta;
        std::vector<uint8_t>  data;
        // cells that llama.cpp drops with those taken, as older ones of their sequence; their data stays
        std::vector<uint32_t> dropped     = {};
        llama_kv_cells        dropped_meta = {};
    };
    std::vector<placed> held;
    std::vector<placed> places; // the cache; or the full one and the sliding one

    // A part of a graph that is computed by itself.
    struct part {
        struct node {
            ggml_tensor *                             tensor;
            std::array<ggml_tensor *, GGML_MAX_SRC>   src;
            void *                                    data;
            ggml_backend_buffer_t                     buffer;
        };
        std::vector<node> nodes;
        ggml_cgraph *     graph = nullptr;
        ggml_tensor *     out   = nullptr;
    };

    // The graph of a whole pass over so many branches, and the parts cut out of it so far.
    struct built {
        int32_t                    n_branches = 0;
        bool                       from_tokens = false;
        llama_ubatch               ubatch;
        llama_memory_context_ptr   memory;
        llm_graph_result_ptr       res;
        std::vector<knapspec_item> items;
        ggml_context_ptr           own;    // the stream that parts start from, and their graphs
        ggml_backend_buffer_ptr    inputs; // filled once
        ggml_tensor *              stream = nullptr;
        std::vector<part>          parts;  // one per sublayer, and the head
        uint64_t                   last_used = 0;
    };
    std::vector<std::unique_ptr<built>> kept;
    uint64_t                            clock = 0;
    ggml_backend_sched_ptr              sched;

    std::vector<float> logits;

    std::vector<llama_kv_cache *> caches() const;
    bool         find_cells(placed & place, int32_t n_tokens, int32_t n_branches, int32_t & n_fit) const;
    llama_ubatch make_ubatch(int32_t n_branches) const;
    void         copy_data(placed & place, bool save) const;

    built * build(int32_t n_branches, bool from_tokens);
    part *  cut  (built & graph, size_t first, size_t last);
    int32_t run  (built & graph, part & which, const float * states, const std::function<void(ggml_tensor *)> & read);
};
