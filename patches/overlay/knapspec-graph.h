// Recognise the residual additions of a built graph, and prune those a plan leaves out.
//
// Knows ggml tensors only: no context, no scheduler, no architecture.
#pragma once

#include "knapspec.h"

#include "ggml.h"

#include <cstdint>
#include <string>
#include <vector>

class llm_graph_result;

struct knapspec_sublayer_info {
    int32_t layer;
    int32_t kind; // enum knapspec_kind

    bool operator==(const knapspec_sublayer_info & other) const { return layer == other.layer && kind == other.kind; }
};

struct knapspec_item {
    ggml_tensor * add;      // the residual addition
    ggml_tensor * residual; // its operand that stays when the sublayer is skipped
    knapspec_sublayer_info info;
    knapspec_traits        traits;
    std::vector<ggml_tensor *> attention; // what weighs its keys: flash attention or softmax
};

// The mask of one of these; null without one.
ggml_tensor * knapspec_mask_of(const ggml_tensor * attention);

// How each sublayer takes part; no modes: the full model.
struct knapspec_plan {
    std::vector<int32_t>         modes;
    std::vector<knapspec_window> windows; // one per mode

    bool empty() const { return modes.empty(); }
    bool operator==(const knapspec_plan & other) const;
};

// The sublayers of a graph in execution order. Empty, with a reason, if any part of the network is not covered by them.
// The traits are filled in on demand.
std::vector<knapspec_item> knapspec_find_sublayers(const llm_graph_result & res, std::string & reason, bool with_traits = false);

// Rows of the table of learned position embeddings; 0 for a model without one, whose positions have no end.
int64_t knapspec_learned_positions(const llm_graph_result & res);

// What makes the logits: a product with the head, and what is done to each logit after it (scaled, capped).
struct knapspec_output {
    ggml_tensor *              product = nullptr; // nullptr: another form, see the reason
    std::vector<ggml_tensor *> after;             // from the logits back
};
knapspec_output knapspec_find_output(const llm_graph_result & res, std::string & reason);

// Logits of these rows of the head in place of all; the former ones are no output any more.
void knapspec_shorten_output(llm_graph_result & res, const knapspec_output & output, ggml_tensor * rows);

// Rewire the graph so that every skipped item is passed over, and drop what nothing needs any more. `replaced`: inputs that
// something has read until now. Where repairs holds a vector for a skipped item, that is added to the stream in place of what the item
// computes; repairs may be empty. Returns false, with a reason, and leaves the graph unusable if that is impossible.
bool knapspec_prune(
        llm_graph_result                       & res,
        const std::vector<knapspec_item>       & items,
        const std::vector<int32_t>             & modes,
        const std::vector<const ggml_tensor *> & replaced,
        const std::vector<ggml_tensor *>       & repairs,
        std::string                            & reason);

// Whether a vector can stand in for what item i adds: it is added, by itself, to the stream as item i - 1 left it.
bool knapspec_repairable(const std::vector<knapspec_item> & items, size_t i);

// The nodes, in graph order, that compute the stream after sublayer `last` from the stream before sublayer `first`, with the
// cache writes that they depend on. first = 0: from the tokens; first = last = the number of sublayers: the logits. Empty, with
// a reason, if anything else of the network would be needed, or if a skip of the sublayer would leave anything behind.
std::vector<ggml_tensor *> knapspec_part(
        const llm_graph_result           & res,
        const std::vector<knapspec_item> & items,
        size_t                             first,
        size_t                             last,
        std::string                      & reason);
