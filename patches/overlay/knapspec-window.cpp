#include "knapspec-window.h"

#include "llama-graph.h"
#include "llama-kv-cache.h"
#include "llama-kv-cache-iswa.h"

#include "ggml-backend.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace {

// the cells of the cache that a mask is about, at the pass that is prepared now
using cells_of = std::function<const llama_kv_cells &()>;

constexpr int64_t CACHE_PAD = 256; // llama_kv_cache::get_n_kv pads the cells in use to a multiple of so many

bool is_host(const ggml_tensor * t) {
    const ggml_tensor * owner = t->view_src ? t->view_src : t;
    return owner->buffer && ggml_backend_buffer_is_host(owner->buffer);
}

// The two ranges of cells that are joined: 0 .. n_first-1 and from `second` on.
struct ranges {
    int64_t n_cells = 0;
    int64_t n_first = 0;
    int64_t second  = 0; // 0: all cells, nothing is joined

    bool joined() const { return second > 0; }
    int64_t size() const { return joined() ? n_first + n_cells - second : n_cells; }
    int64_t cell(int64_t i) const { return !joined() || i < n_first ? i : second + i - n_first; }
};

// Cells that some of the latest n_tokens tokens may see, however far the last 256 cells are filled.
ranges ranges_for(const knapspec_window & window, int64_t n_cells, int64_t n_tokens, int64_t step) {
    const int64_t first = n_cells - CACHE_PAD - (n_tokens - 1) - (window.n_recent - 1);
    ranges r = { n_cells, GGML_PAD(window.n_sinks, step), 0 };
    if (first > r.n_first + step) {
        r.second = first/step*step;
    }
    return r;
}

// Whether t is nothing but cells of a cache, rows of numbers side by side.
bool is_view_of_cells(const ggml_tensor * t, int dim, int64_t n_cells) {
    return t->view_src && t->view_src->op == GGML_OP_NONE && t->ne[dim] == n_cells && t->ne[3] == 1 &&
        t->nb[0] == ggml_type_size(t->type);
}

// A view of t with another type of the same size in all.
ggml_tensor * as_type(ggml_context * ctx, ggml_tensor * t, ggml_type type) {
    const int64_t n_row = t->ne[0]*ggml_type_size(t->type)/ggml_blck_size(t->type);
    ggml_tensor * view = ggml_view_4d(ctx, t, t->ne[0], t->ne[1], t->ne[2], t->ne[3], t->nb[1], t->nb[2], t->nb[3], 0);
    view->type  = type;
    view->ne[0] = n_row/ggml_type_size(type)*ggml_blck_size(type);
    view->nb[0] = ggml_type_size(type);
    return view;
}

// the cells of these ranges, side by side along `dim`
ggml_tensor * join_cells(ggml_context * ctx, ggml_tensor * t, int dim, const ranges & r) {
    // the CPU copies numbers of two bytes one by one, but whole rows of numbers of eight
    const ggml_type type = t->type;
    if (is_host(t) && ggml_type_size(type) == 2 && t->ne[0] % 4 == 0) {
        t = as_type(ctx, t, GGML_TYPE_I64);
    }
    const int64_t per = dim == 0 && t->type != type ? 4 : 1;
    const auto part = [&](int64_t from, int64_t to) {
        int64_t ne[4] = { t->ne[0], t->ne[1], t->ne[2], t->ne[3] };
        ne[dim] = (to - from)/per;
        return ggml_view_4d(ctx, t, ne[0], ne[1], ne[2], ne[3], t->nb[1], t->nb[2], t->nb[3], from/per*t->nb[dim]);
    };
    ggml_tensor * joined = part(r.second, r.n_cells);
    if (r.n_first > 0) {
        joined = ggml_concat(ctx, part(0, r.n_first), joined, dim);
    }
    return joined->type == type ? joined : as_type(ctx, joined, type);
}

// Keys or values of an attention: a view of the cache, or a view in another type.
ggml_tensor * cells_behind(ggml_tensor * t) {
    return t->op == GGML_OP_CPY && t->src[1] == t ? t->src[0] : t;
}

ggml_tensor * join(ggml_context * ctx, ggml_tensor * t, int dim, const ranges & r) {
    ggml_tensor * joined = join_cells(ctx, cells_behind(t), dim, r);
    return joined->type == t->type ? joined : ggml_cast(ctx, joined, t->type);
}

// An attention without flash attention: logits, functions of each of them, softmax, weighted sum.
struct plain_attention {
    std::vector<ggml_tensor *> rows; // from the product with the keys to the softmax, one column per cell
    ggml_tensor * sum = nullptr;     // the product with the values
};

bool find_plain_attention(ggml_cgraph * gf, ggml_tensor * softmax, plain_attention & found) {
    ggml_tensor * t = softmax;
    for (; t->op == GGML_OP_SOFT_MAX || t->op == GGML_OP_SCALE || t->op == GGML_OP_UNARY; t = t->src[0]) {
        found.rows.push_back(t);
    }
    if (t->op != GGML_OP_MUL_MAT) {
        return false;
    }
    found.rows.push_back(t);
    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        ggml_tensor * reader = ggml_graph_node(gf, i);
        for (ggml_tensor * row : found.rows) {
            if (reader->view_src == row) {
                return false;
            }
            for (int k = 0; k < GGML_MAX_SRC; ++k) {
                if (reader->src[k] != row || std::count(found.rows.begin(), found.rows.end(), reader)) {
                    continue;
                }
                if (row != softmax || reader->op != GGML_OP_MUL_MAT || k != 1 || found.sum) {
                    return false;
                }
                found.sum = reader;
            }
        }
    }
    return found.sum;
}

} // namespace

// The mask of the model, which hides what a window leaves out as well; without the columns that are not joined.
class knapspec_context::windowing::mask : public llm_graph_input_i {
public:
    mask(ggml_context * ctx, ggml_tensor * source, cells_of cells, const knapspec_window & window, const ranges & seen)
        : tensor(ggml_new_tensor_4d(ctx, source->type, seen.size(), source->ne[1], 1, 1)), source(source), seen(seen),
          window(window), cells(std::move(cells)) {
        ggml_set_input(tensor);
        ggml_format_name(tensor, "knapspec_window_%d_%d", window.n_sinks, window.n_recent);
    }

    ggml_tensor * const tensor;
    ggml_tensor * const source;
    const ranges        seen;
    const knapspec_window window;

    // inputs are filled in the order in which they were added, so the model's mask is there
    void set_input(const llama_ubatch * ubatch) override {
        GGML_ASSERT(is_host(tensor) && is_host(source));
        if (tensor->type == GGML_TYPE_F16) {
            fill<ggml_fp16_t>(ubatch, ggml_fp32_to_fp16(-INFINITY));
        } else {
            GGML_ASSERT(tensor->type == GGML_TYPE_F32);
            fill<float>(ubatch, -INFINITY);
        }
    }

    // The size is that of the model's mask, which is asked as well. Whoever makes a graph asks `in_order` himself.
    bool can_reuse(const llm_graph_params &) override { return !seen.joined() || in_order(cells(), seen.n_cells); }

    static bool in_order(const llama_kv_cells & cells, int64_t n_cells) {
        for (int64_t i = 0; i < n_cells; ++i) {
            if (!cells.is_empty(i) && cells.pos_get(i) != i) {
                return false;
            }
        }
        return true;
    }

    static cells_of find_cells(const llm_graph_result & res, const ggml_tensor * mask);

private:
    const cells_of cells;

    template <typename T> void fill(const llama_ubatch * ubatch, T hidden) {
        const auto & placed = cells();
        for (int64_t row = 0; row < tensor->ne[1]; ++row) {
            const T * from = (const T *) source->data + row*source->ne[0];
            T       * to   = (T *) tensor->data + row*tensor->ne[0];
            const llama_pos last = ubatch->pos[row] - window.n_recent; // of those that lie before the window
            for (int64_t i = 0; i < tensor->ne[0]; ++i) {
                const int64_t cell = seen.cell(i);
                const llama_pos pos = placed.is_empty(cell) ? -1 : placed.pos_get(cell);
                to[i] = window.n_sinks <= pos && pos <= last ? hidden : from[cell];
            }
        }
    }
};

cells_of knapspec_context::windowing::mask::find_cells(const llm_graph_result & res, const ggml_tensor * mask) {
    const auto of = [](const llama_kv_cache_context * cache) -> const llama_kv_cells & { return cache->kv->get_cells(0); };
    const auto plain = [&](auto * input) -> cells_of {
        if (input && input->get_kq_mask() == mask) {
            return [=]() -> const llama_kv_cells & { return of(input->mctx); };
        }
        return nullptr;
    };
    const auto both = [&](auto * input) -> cells_of {
        if (input && input->get_kq_mask() == mask) {
            return [=]() -> const llama_kv_cells & { return of(input->mctx->get_base()); };
        }
        if (input && input->get_kq_mask_swa() == mask) {
            return [=]() -> const llama_kv_cells & { return of(input->mctx->get_swa()); };
        }
        return nullptr;
    };
    for (const auto & input : res.inputs) {
        cells_of found = plain(dynamic_cast<llm_graph_input_attn_kv *>(input.get()));
        if (!found) { found = plain(dynamic_cast<llm_graph_input_attn_k       *>(input.get())); }
        if (!found) { found = both (dynamic_cast<llm_graph_input_attn_kv_iswa *>(input.get())); }
        if (!found) { found = both (dynamic_cast<llm_graph_input_attn_k_iswa  *>(input.get())); }
        if (found) {
            return found;
        }
    }
    return nullptr;
}

std::string knapspec_context::windowing::refusal(const llm_graph_result & res, const knapspec_item & item) {
    if (item.info.kind == KNAPSPEC_KIND_RECURRENT) {
        return "it keeps a state instead of keys";
    }
    if (item.attention.empty()) {
        return "it reads no keys";
    }
    for (const ggml_tensor * op : item.attention) {
        const ggml_tensor * mask = knapspec_mask_of(op);
        if (!mask || !mask::find_cells(res, mask)) {
            return "what it sees is not said by a mask over the cells of a cache alone";
        }
        if (mask->ne[2] != 1 || mask->ne[3] != 1) {
            return "its cache has a part of its own for each sequence";
        }
    }
    return "";
}

std::vector<const ggml_tensor *> knapspec_context::windowing::apply(
        llm_graph_result                 & res,
        const std::vector<knapspec_item> & items,
        const knapspec_plan              & plan,
        bool                               join_allowed) {
    ggml_context * ctx = res.get_ctx();
    std::vector<mask *> masks; // owned by the graph
    std::vector<const ggml_tensor *> replaced;

    const auto mask_for = [&](ggml_tensor * source, const knapspec_window & window, const ranges & seen) {
        for (mask * m : masks) {
            if (m->source == source && m->seen.second == seen.second && m->seen.n_first == seen.n_first &&
                    m->window.n_sinks == window.n_sinks && m->window.n_recent == window.n_recent) {
                return m->tensor;
            }
        }
        auto made = std::make_unique<mask>(ctx, source, mask::find_cells(res, source), window, seen);
        masks.push_back(made.get());
        res.add_input(std::move(made));
        return masks.back()->tensor;
    };

    for (size_t i = 0; i < items.size(); ++i) {
        if (plan.modes[i] != KNAPSPEC_MODE_WINDOW) {
            continue;
        }
        const knapspec_window & window = plan.windows[i];
        for (ggml_tensor * op : items[i].attention) {
            const bool    flash   = op->op == GGML_OP_FLASH_ATTN_EXT;
            ggml_tensor * source  = knapspec_mask_of(op);
            const int64_t n_cells = source->ne[0];
            replaced.push_back(source);

            plain_attention plain;
            ggml_tensor ** keys = nullptr, ** values = nullptr;
            if (flash) {
                keys   = &op->src[1];
                values = &op->src[2];
            } else if (find_plain_attention(res.get_gf(), op, plain)) {
                keys   = &plain.rows.back()->src[0];
                values = &plain.sum->src[0];
            }
            const int dim = flash ? 1 : 0; // of the values, that counts cells
            // kernels for other devices want keys in steps of as many as the cache is padded to
            ranges seen = ranges_for(window, n_cells, source->ne[1], flash ? CACHE_PAD : 32);
            const bool join_pays = seen.joined() && join_allowed && keys &&
                is_view_of_cells(cells_behind(*keys), 1, n_cells) && is_view_of_cells(cells_behind(*values), dim, n_cells) &&
                !(flash && is_host(cells_behind(*keys))) && mask::in_order(mask::find_cells(res, source)(), n_cells);
            if (!join_pays) {
                seen = { n_cells, 0, 0 };
            }
            op->src[flash ? 3 : 1] = mask_for(source, window, seen);
            if (seen.joined()) {
                *keys   = join(ctx, *keys, 1, seen);
                *values = join(ctx, *values, dim, seen);
                for (ggml_tensor * t : plain.rows) {
                    t->ne[0] = seen.size();
                    t->nb[1] = t->nb[0]*t->ne[0];
                    t->nb[2] = t->nb[1]*t->ne[1];
                    t->nb[3] = t->nb[2]*t->ne[2];
                }
            }
        }
    }
    return replaced;
}
