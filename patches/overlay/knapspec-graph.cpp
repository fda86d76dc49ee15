#include "knapspec-graph.h"

#include "llama-graph.h"

#include "ggml-backend.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <set>
#include <unordered_map>
#include <unordered_set>

namespace {

using tensor_set = std::unordered_set<const ggml_tensor *>;

bool starts_with(const char * name, const char * prefix) {
    return strncmp(name, prefix, strlen(prefix)) == 0;
}

// the tensor that owns the memory behind a chain of views
const ggml_tensor * root_of(const ggml_tensor * t) {
    while (t->view_src) {
        t = t->view_src;
    }
    return t;
}

// layer index of a weight named blk.<layer>.*, or -1
int32_t layer_of_weight(const ggml_tensor * t) {
    int32_t layer = -1;
    if (t->op != GGML_OP_NONE || sscanf(t->name, "blk.%d.", &layer) != 1) {
        return -1;
    }
    return layer;
}

bool is_kv_cache   (const ggml_tensor * t) { return starts_with(t->name, "cache_k_l") || starts_with(t->name, "cache_v_l"); }
bool is_state_cache(const ggml_tensor * t) { return starts_with(t->name, "cache_r_l") || starts_with(t->name, "cache_s_l"); }

bool is_attention(const ggml_tensor * t) {
    // an expert router's softmax has no mask
    return t->op == GGML_OP_FLASH_ATTN_EXT || (t->op == GGML_OP_SOFT_MAX && t->src[1]);
}

// nodes that are in the graph for what they write, not for their value
std::vector<ggml_tensor *> find_writes(const std::vector<ggml_tensor *> & nodes) {
    tensor_set used;
    for (const ggml_tensor * t : nodes) {
        for (int k = 0; k < GGML_MAX_SRC; ++k) {
            used.insert(t->src[k]);
        }
    }
    std::vector<ggml_tensor *> writes;
    for (ggml_tensor * t : nodes) {
        if (t->view_src && !used.count(t)) {
            writes.push_back(t);
        }
    }
    return writes;
}

// the same values in another arrangement: selected rows, reshaped, copied
const ggml_tensor * strip(const ggml_tensor * t) {
    while (t->src[0] && t->src[0]->op != GGML_OP_NONE &&
           (t->op == GGML_OP_GET_ROWS || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_VIEW ||
            t->op == GGML_OP_CONT     || t->op == GGML_OP_CPY     || t->op == GGML_OP_PERMUTE ||
            t->op == GGML_OP_TRANSPOSE)) {
        t = t->src[0];
    }
    return t;
}

std::vector<ggml_tensor *> nodes_of(ggml_cgraph * gf) {
    std::vector<ggml_tensor *> nodes(ggml_graph_n_nodes(gf));
    for (size_t i = 0; i < nodes.size(); ++i) {
        nodes[i] = ggml_graph_node(gf, i);
    }
    return nodes;
}

class finder {
public:
    finder(const llm_graph_result & res, bool with_traits) : res(res), with_traits(with_traits), nodes(nodes_of(res.gf)) {
        for (size_t i = 0; i < nodes.size(); ++i) {
            order[nodes[i]] = i;
        }
    }

    std::vector<knapspec_item> run(std::string & reason);

private:
    const llm_graph_result & res;
    const bool with_traits;

    std::vector<ggml_tensor *> nodes;

    std::unordered_map<const ggml_tensor *, size_t> order; // place in the graph: nothing depends on a later node
    std::unordered_map<const ggml_tensor *, bool>   dynamic_memo;

    tensor_set covered; // weights that belong to a sublayer or to the trunk

    bool check_covered(const tensor_set & trunk, const ggml_tensor * origin, std::string & reason);

    // whether the value of t depends on the tokens (weights and functions of weights do not)
    bool is_dynamic(const ggml_tensor * t) {
        if (t->op == GGML_OP_NONE && !t->view_src) {
            return (t->flags & GGML_TENSOR_FLAG_INPUT) != 0;
        }
        auto it = dynamic_memo.find(t);
        if (it != dynamic_memo.end()) {
            return it->second;
        }
        bool dynamic = false;
        for (int k = 0; k < GGML_MAX_SRC && !dynamic; ++k) {
            dynamic = t->src[k] && is_dynamic(t->src[k]);
        }
        return dynamic_memo[t] = dynamic;
    }

    struct cone {
        bool          hit       = false; // a stop tensor was met
        bool          product   = false; // holds a matrix product
        bool          attention = false;
        bool          recurrent = false;
        bool          ffn       = false;
        std::set<int> layers;
        tensor_set    weights;
        tensor_set    caches;
        tensor_set    nodes;
    };

    std::unordered_map<const ggml_tensor *, size_t> masks; // in the order in which sublayers use them

    knapspec_traits traits_of(cone branch, const tensor_set & trunk);

    // everything `from` depends on, looking neither behind `stops` nor at nodes that come before all of them
    cone cone_of(const ggml_tensor * from, const tensor_set & stops) const {
        size_t first = stops.empty() ? 0 : nodes.size();
        for (const ggml_tensor * stop : stops) {
            auto it = order.find(stop);
            first = std::min(first, it == order.end() ? 0 : it->second);
        }
        cone                             result;
        tensor_set                       seen;
        std::vector<const ggml_tensor *> stack = { from };
        while (!stack.empty()) {
            const ggml_tensor * t = stack.back();
            stack.pop_back();
            if (!t || !seen.insert(t).second) {
                continue;
            }
            if (stops.count(t)) {
                result.hit = true;
                continue;
            }
            if (auto it = order.find(t); it != order.end() && it->second < first) {
                continue;
            }
            if (t->op != GGML_OP_NONE) {
                result.nodes.insert(t);
            }
            switch (t->op) {
                case GGML_OP_NONE:
                    if (is_kv_cache(t)) {
                        result.attention = true;
                        result.caches.insert(t);
                    } else if (is_state_cache(t)) {
                        result.recurrent = true;
                        result.caches.insert(t);
                    } else if (const int32_t layer = layer_of_weight(t); layer >= 0) {
                        result.layers.insert(layer);
                        result.weights.insert(t);
                        // blk.<layer>.ffn_*; a feed-forward norm alone is not yet a feed-forward network
                        const char * part = strchr(t->name + 4, '.');
                        if (part && starts_with(part, ".ffn_") && !strstr(part, "norm")) {
                            result.ffn = true;
                        }
                    }
                    break;
                case GGML_OP_MUL_MAT:
                case GGML_OP_MUL_MAT_ID:
                    result.product = true;
                    break;
                case GGML_OP_SSM_CONV:
                case GGML_OP_SSM_SCAN:
                case GGML_OP_RWKV_WKV6:
                case GGML_OP_RWKV_WKV7:
                case GGML_OP_GATED_LINEAR_ATTN:
                case GGML_OP_GATED_DELTA_NET:
                    result.recurrent = true;
                    break;
                default:
                    result.attention = result.attention || is_attention(t);
                    break;
            }
            for (int k = 0; k < GGML_MAX_SRC; ++k) {
                stack.push_back(t->src[k]);
            }
            stack.push_back(t->view_src);
        }
        return result;
    }

    // Is x = branch + residual, the branch computed from the residual? Beside the plain form this accepts sums of several
    // branches: x = (other + shared) + branch, where `branch` starts from `shared`, further down the chain of additions.
    bool split(const ggml_tensor * x, ggml_tensor *& residual, ggml_tensor *& branch, int depth = 3) const {
        for (int k = 0; k < 2; ++k) {
            const cone c = cone_of(x->src[k], { strip(x->src[1 - k]) });
            if (c.hit) {
                residual = x->src[1 - k];
                branch   = x->src[k];
                return c.product;
            }
        }
        for (int k = 0; k < 2; ++k) {
            const ggml_tensor * inner = strip(x->src[1 - k]);
            for (int d = 0; d < depth && inner->op == GGML_OP_ADD; ++d) {
                ggml_tensor * shared = nullptr;
                ggml_tensor * other  = nullptr;
                if (!split(inner, shared, other, 0)) {
                    break;
                }
                inner = strip(shared);
                const cone c = cone_of(x->src[k], { inner });
                if (c.hit && !c.product) {
                    break;
                }
                if (c.hit) {
                    residual = x->src[1 - k];
                    branch   = x->src[k];
                    return true;
                }
            }
        }
        return false;
    }
};

std::vector<knapspec_item> finder::run(std::string & reason) {
    std::vector<knapspec_item> items;
    std::vector<ggml_tensor *> branches;

    ggml_tensor * x = res.t_logits ? res.t_logits : res.t_embd;
    if (!x) {
        reason = "the graph has no output";
        return {};
    }

    while (x->op != GGML_OP_NONE) {
        ggml_tensor * only = nullptr;
        int n_dynamic = 0;
        for (int k = 0; k < GGML_MAX_SRC; ++k) {
            if (x->src[k] && is_dynamic(x->src[k])) {
                // the row ids of a gather select, they carry no values
                if (x->op == GGML_OP_GET_ROWS && k == 1 && n_dynamic == 1) {
                    continue;
                }
                n_dynamic++;
                only = x->src[k];
            }
        }

        if (n_dynamic == 2 && x->op == GGML_OP_ADD) {
            ggml_tensor * residual = nullptr;
            ggml_tensor * branch   = nullptr;
            if (split(x, residual, branch)) {
                items.push_back({ x, residual, {}, {}, {} });
                branches.push_back(branch);
                x = residual;
                continue;
            }
            // a term without any product (the token embedding, scaled) is added to the stream and never left out
            int k = 0;
            cone term = cone_of(x->src[0], {});
            if (term.product) {
                k = 1;
                term = cone_of(x->src[1], {});
            }
            if (term.product) {
                break;
            }
            covered.insert(term.weights.begin(), term.weights.end());
            x = x->src[1 - k];
            continue;
        }

        if (n_dynamic != 1) {
            break;
        }

        // one value flows through: head, norms, scales, biases, gathers. A product with a layer's matrix is no trunk.
        for (int k = 0; k < GGML_MAX_SRC; ++k) {
            if (x->src[k] && layer_of_weight(x->src[k]) >= 0) {
                if (x->op == GGML_OP_MUL_MAT || x->op == GGML_OP_MUL_MAT_ID) {
                    reason = std::string("the residual stream passes through ") + x->src[k]->name;
                    return {};
                }
                covered.insert(x->src[k]);
            }
        }
        x = only;
    }

    if (items.empty()) {
        reason = "no residual addition was recognised";
        return {};
    }
    std::reverse(items.begin(), items.end());
    std::reverse(branches.begin(), branches.end());

    tensor_set trunk = { x };
    for (const knapspec_item & item : items) {
        trunk.insert(item.add);
        trunk.insert(strip(item.residual));
    }
    for (size_t i = 0; i < items.size(); ++i) {
        const cone branch = cone_of(branches[i], trunk);
        if (branch.layers.size() != 1) {
            reason = "a residual branch holds weights of " + std::to_string(branch.layers.size()) + " layers";
            return {};
        }
        const int32_t kind = branch.recurrent               ? KNAPSPEC_KIND_RECURRENT :
                             branch.attention && branch.ffn ? KNAPSPEC_KIND_BLOCK     :
                             branch.attention               ? KNAPSPEC_KIND_ATTENTION : KNAPSPEC_KIND_MLP;
        items[i].info = { *branch.layers.begin(), kind };
        for (const ggml_tensor * t : branch.nodes) {
            if (is_attention(t)) {
                items[i].attention.push_back(const_cast<ggml_tensor *>(t));
            }
        }
        if (with_traits) {
            items[i].traits = traits_of(branch, trunk);
        }
        covered.insert(branch.weights.begin(), branch.weights.end());
    }
    return check_covered(trunk, x, reason) ? items : std::vector<knapspec_item>();
}

// What a branch computes, where and on how much data. The signature leaves out rearrangements, so that the last layer,
// which gathers the rows of its outputs, is not told apart from the others.
knapspec_traits finder::traits_of(cone branch, const tensor_set & trunk) {
    // keys and values are computed beside the chain
    for (const ggml_tensor * t : find_writes(nodes)) {
        if (branch.caches.count(root_of(t))) {
            const cone written = cone_of(t, trunk);
            branch.nodes.insert(written.nodes.begin(), written.nodes.end());
            branch.weights.insert(written.weights.begin(), written.weights.end());
        }
    }

    uint64_t hash = 14695981039346656037ull; // FNV-1a
    const auto mix = [&](uint64_t value) {
        for (int byte = 0; byte < 8; ++byte) {
            hash = (hash ^ ((value >> 8*byte) & 0xff))*1099511628211ull;
        }
    };
    const auto mix_text = [&](const char * text) {
        for (; *text; ++text) {
            mix((uint64_t) (unsigned char) *text);
        }
    };
    const auto mix_tensor = [&](const ggml_tensor * t) {
        mix(t->type);
        for (int d = 0; d < GGML_MAX_DIMS; ++d) {
            mix(t->ne[d]);
        }
    };
    const auto place_of = [](const ggml_tensor * t) {
        return t->buffer ? ggml_backend_buft_name(ggml_backend_buffer_get_type(t->buffer)) : "";
    };

    knapspec_traits traits = {};
    int64_t largest = 0;

    std::vector<const ggml_tensor *> ordered(branch.nodes.begin(), branch.nodes.end());
    std::sort(ordered.begin(), ordered.end(), [&](const ggml_tensor * a, const ggml_tensor * b) {
        return order.at(a) < order.at(b);
    });
    tensor_set counted;
    for (const ggml_tensor * t : ordered) {
        switch (t->op) {
            case GGML_OP_VIEW:
            case GGML_OP_RESHAPE:
            case GGML_OP_PERMUTE:
            case GGML_OP_TRANSPOSE:
            case GGML_OP_GET_ROWS:
                continue;
            default:
                break;
        }
        mix(t->op);
        mix_tensor(t);
        if (const ggml_tensor * mask = is_attention(t) ? knapspec_mask_of(t) : nullptr) {
            mix(masks.emplace(root_of(mask), masks.size()).first->second);
        }
        for (int k = 0; k < GGML_MAX_SRC; ++k) {
            const ggml_tensor * w = t->src[k] ? root_of(t->src[k]) : nullptr;
            if (!w || !branch.weights.count(w)) {
                continue;
            }
            mix_tensor(w);
            mix_text(place_of(w));
            if (!counted.insert(w).second) {
                continue;
            }
            int64_t bytes = ggml_nbytes(w);
            if (t->op == GGML_OP_MUL_MAT_ID && k == 0) {
                traits.n_experts      = w->ne[2];
                traits.n_experts_used = t->src[2]->ne[0];
                bytes = bytes/traits.n_experts*traits.n_experts_used;
            }
            traits.weight_bytes += bytes;
            if (bytes > largest) {
                largest = bytes;
                snprintf(traits.device, sizeof(traits.device), "%s", place_of(w));
            }
        }
    }
    for (const ggml_tensor * cache : branch.caches) {
        // one row per cell
        traits.cell_bytes += ggml_row_size(cache->type, cache->ne[0]);
        traits.n_cells = std::max<int64_t>(traits.n_cells, cache->ne[1]);
    }
    mix(traits.cell_bytes);
    mix(traits.n_cells);
    traits.signature = hash;
    return traits;
}

// Every weight of every layer must belong to a sublayer or to the trunk, or something would be left out of the account.
bool finder::check_covered(const tensor_set & trunk, const ggml_tensor * origin, std::string & reason) {
    // behind the chain there is only the embedding of the tokens
    for (const ggml_tensor * w : cone_of(origin, {}).weights) {
        reason = std::string("the residual chain ends before ") + w->name;
        return false;
    }
    // keys, values and states are computed beside the chain and reach it through a layer's cache
    for (const ggml_tensor * t : find_writes(nodes)) {
        const ggml_tensor * memory = root_of(t);
        if (is_kv_cache(memory) || is_state_cache(memory)) {
            const cone written = cone_of(t, trunk);
            covered.insert(written.weights.begin(), written.weights.end());
        }
    }
    for (const ggml_tensor * t : nodes) {
        for (int k = 0; k < GGML_MAX_SRC; ++k) {
            const ggml_tensor * w = t->src[k] ? root_of(t->src[k]) : nullptr;
            if (w && layer_of_weight(w) >= 0 && !covered.count(w)) {
                reason = std::string(w->name) + " belongs to no sublayer";
                return false;
            }
        }
    }
    return true;
}

} // namespace

std::vector<knapspec_item> knapspec_find_sublayers(const llm_graph_result & res, std::string & reason, bool with_traits) {
    return finder(res, with_traits).run(reason);
}

int64_t knapspec_learned_positions(const llm_graph_result & res) {
    int64_t n = 0;
    for (const ggml_tensor * t : nodes_of(res.gf)) {
        if (t->op == GGML_OP_GET_ROWS && starts_with(root_of(t->src[0])->name, "position_embd.")) {
            n = t->src[0]->ne[1];
        }
    }
    return n;
}

bool knapspec_repairable(const std::vector<knapspec_item> & items, size_t i) {
    if (i == 0) {
        return false; // the stream before it is the embedding, which no pass keeps
    }
    const ggml_tensor * add = items[i].add;
    return add->op == GGML_OP_ADD && (add->src[0] == items[i].residual || add->src[1] == items[i].residual) &&
           add->type == GGML_TYPE_F32 && items[i].residual->type == GGML_TYPE_F32 &&
           ggml_are_same_shape(add, items[i].residual) && strip(items[i].residual) == items[i - 1].add;
}

knapspec_output knapspec_find_output(const llm_graph_result & res, std::string & reason) {
    knapspec_output output;
    ggml_tensor * t = res.t_logits;
    if (!t) {
        reason = "the graph has no logits";
        return {};
    }
    for (; t->op == GGML_OP_SCALE || t->op == GGML_OP_UNARY; t = t->src[0]) {
        if (t->view_src) {
            reason = "its logits are changed in place";
            return {};
        }
        output.after.push_back(t);
    }
    const ggml_tensor * w = t->src[0];
    if (t->op != GGML_OP_MUL_MAT || !w || w->op != GGML_OP_NONE || !w->buffer || layer_of_weight(w) >= 0) {
        const ggml_tensor * other = nullptr;
        for (int k = 0; k < GGML_MAX_SRC && !other; ++k) {
            other = t->src[k] && t->src[k]->op == GGML_OP_NONE ? t->src[k] : nullptr;
        }
        reason = std::string("its logits are made by ") + ggml_op_name(t->op) + (other ? std::string(" with ") + other->name : "");
        return {};
    }
    if (w->ne[2] != 1 || w->ne[3] != 1 || t->ne[2] != 1 || t->ne[3] != 1 || !ggml_is_contiguous(w) || t->ne[0] != res.t_logits->ne[0]) {
        reason = std::string(w->name) + " is not one row per token";
        return {};
    }
    output.product = t;
    return output;
}

void knapspec_shorten_output(llm_graph_result & res, const knapspec_output & output, ggml_tensor * rows) {
    ggml_context * ctx = res.get_ctx();
    ggml_tensor * t = ggml_mul_mat(ctx, rows, output.product->src[1]);
    memcpy(t->op_params, output.product->op_params, sizeof(t->op_params));
    for (size_t i = output.after.size(); i-- > 0;) {
        const ggml_tensor * former = output.after[i];
        ggml_tensor * next = ggml_dup_tensor(ctx, t);
        next->op     = former->op;
        next->src[0] = t;
        memcpy(next->op_params, former->op_params, sizeof(next->op_params));
        t = next;
    }
    res.t_logits->flags &= ~GGML_TENSOR_FLAG_OUTPUT;
    res.t_logits = t;
    ggml_set_output(t);
    ggml_build_forward_expand(res.gf, t);
}

ggml_tensor * knapspec_mask_of(const ggml_tensor * attention) {
    return attention->src[attention->op == GGML_OP_FLASH_ATTN_EXT ? 3 : 1];
}

bool knapspec_plan::operator==(const knapspec_plan & other) const {
    return modes == other.modes && std::equal(
            windows.begin(), windows.end(), other.windows.begin(), other.windows.end(), [](const auto & a, const auto & b) {
        return a.n_sinks == b.n_sinks && a.n_recent == b.n_recent;
    });
}

bool knapspec_prune(
        llm_graph_result                       & res,
        const std::vector<knapspec_item>       & items,
        const std::vector<int32_t>             & modes,
        const std::vector<const ggml_tensor *> & replaced,
        const std::vector<ggml_tensor *>       & repairs,
        std::string                            & reason) {
    ggml_cgraph * gf = res.gf;

    // from a skipped addition to what stands for it; a chain of skips resolves to the first residual kept
    std::unordered_map<const ggml_tensor *, ggml_tensor *> stand_in;
    for (size_t i = 0; i < items.size(); ++i) {
        if (modes[i] == KNAPSPEC_MODE_SKIP && i < repairs.size() && repairs[i] && knapspec_repairable(items, i)) {
            // the operand that is repeated for every token comes second
            items[i].add->src[0] = items[i].residual;
            items[i].add->src[1] = repairs[i];
        } else if (modes[i] == KNAPSPEC_MODE_SKIP) {
            auto it = stand_in.find(items[i].residual);
            stand_in[items[i].add] = it == stand_in.end() ? items[i].residual : it->second;
        }
    }
    const auto resolve = [&](ggml_tensor *& t) {
        if (t) {
            auto it = stand_in.find(t);
            if (it != stand_in.end()) {
                t = it->second;
            }
        }
    };

    const std::vector<ggml_tensor *> nodes  = nodes_of(gf);
    const std::vector<ggml_tensor *> writes = find_writes(nodes);
    const std::vector<ggml_tensor *> leafs(gf->leafs, gf->leafs + gf->n_leafs);

    tensor_set read_before(replaced.begin(), replaced.end()); // memory read by any node
    for (ggml_tensor * t : nodes) {
        for (int k = 0; k < GGML_MAX_SRC; ++k) {
            if (t->src[k]) {
                read_before.insert(root_of(t->src[k]));
            }
            resolve(t->src[k]);
        }
        if (t->view_src && stand_in.count(t->view_src)) {
            ggml_tensor * base = stand_in.at(t->view_src);
            // strides of a view were taken from the addition, which is contiguous
            if (!ggml_is_contiguous(base) || !ggml_are_same_shape(base, t->view_src)) {
                reason = std::string("a view of ") + t->view_src->name + " cannot be moved";
                return false;
            }
            t->view_offs += base->view_src ? base->view_offs : 0;
            t->view_src   = base->view_src ? base->view_src  : base;
        }
    }
    resolve(res.t_embd);
    resolve(res.t_h_nextn);
    for (ggml_tensor *& t : res.t_layer_inp) {
        resolve(t);
    }

    // what the outputs need
    tensor_set keep;
    tensor_set read; // memory read by kept nodes
    const auto need = [&](ggml_tensor * output) {
        std::vector<ggml_tensor *> stack = { output };
        while (!stack.empty()) {
            ggml_tensor * t = stack.back();
            stack.pop_back();
            if (!t || !keep.insert(t).second) {
                continue;
            }
            for (int k = 0; k < GGML_MAX_SRC; ++k) {
                if (t->src[k]) {
                    read.insert(root_of(t->src[k]));
                    stack.push_back(t->src[k]);
                }
            }
            stack.push_back(t->view_src);
        }
    };
    for (ggml_tensor * t : nodes) {
        if (t->flags & GGML_TENSOR_FLAG_OUTPUT) {
            need(t);
        }
    }
    need(res.t_logits);
    need(res.t_embd);
    need(res.t_embd_pooled);

    // A write into a layer's cache is kept while something kept reads that cache (layers may share one); a write elsewhere
    // is always kept.
    for (bool changed = true; changed;) {
        changed = false;
        for (ggml_tensor * t : writes) {
            const ggml_tensor * memory = root_of(t);
            const bool is_cache = is_kv_cache(memory) || is_state_cache(memory);
            if (!keep.count(t) && (!is_cache || read.count(memory))) {
                need(t);
                changed = true;
            }
        }
    }

    ggml_graph_clear(gf);
    // Inputs stay allocated although nothing may read them: llama.cpp fills each of them before every computation. A view
    // reads those that nothing does any more: when the cache has grown, the allocator looks only at what nodes read to see that
    // its buffers have become too small.
    for (ggml_tensor * t : leafs) {
        if (t->flags & GGML_TENSOR_FLAG_INPUT) {
            const bool lost = read_before.count(t) && !read.count(t);
            ggml_build_forward_expand(gf, lost ? ggml_view_1d(res.get_ctx(), t, 1, 0) : t);
        }
    }
    for (ggml_tensor * t : nodes) {
        if (keep.count(t)) {
            ggml_build_forward_expand(gf, t);
        }
    }
    return true;
}

std::vector<ggml_tensor *> knapspec_part(
        const llm_graph_result           & res,
        const std::vector<knapspec_item> & items,
        size_t                             first,
        size_t                             last,
        std::string                      & reason) {
    const size_t n = items.size();
    const auto name_of = [&](size_t i) {
        static const char * kinds[] = { "attention", "mlp", "block", "recurrent" };
        return i >= n ? std::string("the head") : std::string(kinds[items[i].info.kind]) + " " + std::to_string(items[i].info.layer);
    };
    const ggml_tensor * from = first > 0 ? items[first - 1].add : nullptr;
    ggml_tensor       * to   = last < n ? items[last].add : res.t_logits;
    if (!to) {
        reason = "the graph has no logits";
        return {};
    }
    if (from && (from->type != GGML_TYPE_F32 || from->view_src || !ggml_is_contiguous(from))) {
        reason = "the stream before " + name_of(first) + " is not an F32 tensor of its own";
        return {};
    }
    if (from && first == last && first < n) {
        if (strip(items[first].residual) != from) {
            reason = "something stands between " + name_of(first - 1) + " and " + name_of(first);
            return {};
        }
        if (!ggml_are_same_shape(from, to)) {
            // one row per token on either side, or one per output
            if (from->ne[0] != to->ne[0]) {
                reason = name_of(first) + " changes the width of the stream";
                return {};
            }
        }
    }
    tensor_set others; // additions that a part which starts from one of them may not reach
    if (from) {
        for (const knapspec_item & item : items) {
            if (item.add != from && item.add != to) {
                others.insert(item.add);
            }
        }
    }

    const std::vector<ggml_tensor *> nodes  = nodes_of(res.gf);
    const std::vector<ggml_tensor *> writes = find_writes(nodes);

    tensor_set keep;
    tensor_set caches; // read or written
    const auto need = [&](ggml_tensor * output) {
        std::vector<ggml_tensor *> stack = { output };
        while (!stack.empty()) {
            ggml_tensor * t = stack.back();
            stack.pop_back();
            if (!t || t == from || !keep.insert(t).second) {
                continue;
            }
            if (others.count(t)) {
                reason = name_of(last) + " reads more than the stream before it";
                return false;
            }
            if (is_state_cache(t)) {
                reason = name_of(last) + " keeps a recurrent state";
                return false;
            }
            if (t->op == GGML_OP_NONE && is_kv_cache(t)) {
                caches.insert(t);
            }
            for (int k = 0; k < GGML_MAX_SRC; ++k) {
                stack.push_back(t->src[k]);
            }
            stack.push_back(t->view_src);
        }
        return true;
    };
    if (!need(to)) {
        return {};
    }
    tensor_set written;
    for (bool changed = true; changed;) {
        changed = false;
        for (ggml_tensor * t : writes) {
            if (caches.count(root_of(t)) && !keep.count(t)) {
                if (!need(t)) {
                    reason = name_of(last) + " reads keys that another sublayer writes";
                    return {};
                }
                changed = true;
            }
            if (keep.count(t)) {
                written.insert(root_of(t));
            }
        }
    }
    for (const ggml_tensor * cache : caches) {
        if (!written.count(cache)) {
            reason = name_of(last) + " reads keys that it does not write";
            return {};
        }
    }

    std::vector<ggml_tensor *> part;
    for (ggml_tensor * t : nodes) {
        if (keep.count(t)) {
            part.push_back(t);
        }
    }
    return part;
}
