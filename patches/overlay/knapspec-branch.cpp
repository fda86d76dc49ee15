#include "knapspec-branch.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache-iswa.h"
#include "llama-model.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cstring>

namespace {

// Graphs of different numbers of branches that are kept: a row that is computed in turns needs two or three.
constexpr size_t MAX_BUILT = 4;

llama_kv_cache::slot_info slot_of(const std::vector<uint32_t> & cells, size_t n) {
    llama_kv_cache::slot_info slot;
    slot.s0 = slot.s1 = 0;
    slot.resize(1);
    slot.strm[0] = 0;
    slot.idxs[0].assign(cells.begin(), cells.begin() + n);
    return slot;
}

} // namespace

std::string knapspec_context::find_branch_refusal(const llm_graph_result & res, const std::vector<knapspec_item> & items) const {
    if (items.empty()) {
        return "its sublayers are not recognised";
    }
    if (!dynamic_cast<llama_kv_cache *>(ctx.memory.get()) && !dynamic_cast<llama_kv_cache_iswa *>(ctx.memory.get())) {
        return "its cache is of a kind that cannot be shared by branches";
    }
    size_t first = 0; // of the sublayers behind the first layer
    while (first < items.size() && items[first].info.layer == items[0].info.layer) {
        first++;
    }
    std::string reason;
    for (size_t i = first; i <= items.size() && reason.empty(); ++i) {
        knapspec_part(res, items, i, i, reason);
    }
    return reason;
}

knapspec_context::branching::branching(knapspec_context & owner) : owner(owner), ctx(owner.ctx) {}

knapspec_context::branching::~branching() {
    if (open) {
        end();
    }
}

//
// cells
//

std::vector<llama_kv_cache *> knapspec_context::branching::caches() const {
    if (auto * sliding = dynamic_cast<llama_kv_cache_iswa *>(ctx.memory.get())) {
        return { sliding->get_base(), sliding->get_swa() };
    }
    return { dynamic_cast<llama_kv_cache *>(ctx.memory.get()) };
}

// Cells for the windows of up to n_branches branches: empty ones, then those of sequence 0 that no pass sees any more.
bool knapspec_context::branching::find_cells(placed & place, int32_t n_tokens, int32_t n_branches, int32_t & n_fit) const {
    const auto & cells  = place.cache->v_cells[0];
    const size_t wanted = (size_t) n_tokens*n_branches;
    place.cells.clear();
    place.taken.clear();
    for (uint32_t i = 0; i < cells.size() && place.cells.size() < wanted; ++i) {
        if (cells.is_empty(i)) {
            place.cells.push_back(i);
        }
    }
    if (place.cache->swa_type != LLAMA_SWA_TYPE_NONE) {
        for (uint32_t i = 0; i < cells.size() && place.cells.size() + place.taken.size() < wanted; ++i) {
            if (!cells.is_empty(i) && cells.pos_get(i) < place.first) {
                place.taken.push_back(i);
            }
        }
    }
    n_fit = std::min<size_t>(n_branches, (place.cells.size() + place.taken.size())/n_tokens);
    const size_t needed = (size_t) n_tokens*n_fit;
    place.taken.resize(needed > place.cells.size() ? needed - place.cells.size() : 0);
    place.cells.resize(needed - place.taken.size());
    place.cells.insert(place.cells.end(), place.taken.begin(), place.taken.end());
    std::sort(place.cells.begin(), place.cells.end());
    return n_fit > 0;
}

// Keys and values of the cells that are taken from sequence 0.
void knapspec_context::branching::copy_data(placed & place, bool save) const {
    size_t done = 0;
    const auto copy = [&](ggml_tensor * t, size_t offset, size_t size) {
        if (save) {
            place.data.resize(done + size);
            ggml_backend_tensor_get(t, place.data.data() + done, offset, size);
        } else {
            ggml_backend_tensor_set(t, place.data.data() + done, offset, size);
        }
        done += size;
    };
    const auto & taken = place.taken;
    for (const auto & layer : place.cache->layers) {
        for (size_t i = 0, n = 0; i < taken.size(); i += n) {
            for (n = 1; i + n < taken.size() && taken[i + n] == taken[i] + n; ++n) {}
            for (ggml_tensor * t : { layer.k, layer.v }) {
                if (!t) {
                    continue;
                }
                if (t == layer.v && place.cache->v_trans) {
                    const size_t size = ggml_type_size(t->type);
                    for (int64_t row = 0; row < t->ne[0]; ++row) {
                        copy(t, (row*t->ne[1] + taken[i])*size, n*size);
                    }
                } else {
                    copy(t, taken[i]*t->nb[1], n*t->nb[1]);
                }
            }
        }
    }
}

llama_ubatch knapspec_context::branching::make_ubatch(int32_t n_branches) const {
    const int32_t n_tokens = window.size();
    const int32_t n = n_tokens*n_branches;
    std::vector<llama_token>    tokens(n);
    std::vector<llama_pos>      positions(n);
    std::vector<int32_t>        counts(n, 1);
    std::vector<llama_seq_id>   sequences(n);
    std::vector<llama_seq_id *> pointers(n);
    std::vector<int8_t>         outputs(n, 1);
    for (int32_t i = 0; i < n; ++i) {
        tokens[i]    = window[i % n_tokens];
        positions[i] = start + i % n_tokens;
        sequences[i] = 1 + i/n_tokens;
        pointers[i]  = &sequences[i];
    }
    const auto & hparams = ctx.get_model().hparams;
    const auto & vocab   = ctx.get_model().vocab;
    llama_batch_ext batch(
            n, hparams.n_embd_inp(), hparams.n_embd_inp_enc(), n_branches + 1, nullptr, vocab.n_tokens(), hparams.n_pos_per_embd());
    llama_batch_compat::init(batch, {
        n, tokens.data(), nullptr, positions.data(), counts.data(), pointers.data(), outputs.data(),
    });
    llama_batch_allocr split(hparams.n_pos_per_embd());
    if (!split.init(batch, vocab, true)) {
        return {};
    }
    return split.split_simple(n);
}

int32_t knapspec_context::branching::begin(llama_pos start, const llama_token * tokens, int32_t n_tokens, int32_t n_branches) {
    const llama_pos n_past = ctx.memory ? ctx.memory->seq_pos_max(0) + 1 : 0;
    if (open || !owner.branch_refusal().empty() || !ctx.cparams.kv_unified || start < 0 || start > n_past || n_tokens < 1 ||
            n_tokens > (int32_t) std::min(ctx.cparams.n_ubatch, ctx.cparams.n_outputs_max) || n_branches < 1) {
        LLAMA_LOG_ERROR("%s: %d branches of %d tokens cannot start at %d of %d %s\n", __func__, n_branches, n_tokens, start, n_past,
                owner.branch_refusal().c_str());
        return KNAPSPEC_BAD_ARGUMENT;
    }
    ctx.synchronize();
    ctx.sched_reserve();
    owner.restore();
    owner.watch_interrupt();

    this->start = start;
    window.assign(tokens, tokens + n_tokens);
    n_room = std::min<int32_t>({ n_branches, (int32_t) ctx.cparams.n_ubatch/n_tokens, LLAMA_MAX_SEQ - 1 });
    places.clear();
    for (llama_kv_cache * cache : caches()) {
        placed place = { cache, 0, cache->v_heads[0], {}, {}, {}, {} };
        if (cache->swa_type != LLAMA_SWA_TYPE_NONE) {
            place.first = std::max<llama_pos>(0, start - (llama_pos) cache->n_swa);
            const llama_pos oldest = cache->seq_pos_min(0);
            if (start > 0 && (oldest < 0 || oldest > place.first)) {
                LLAMA_LOG_ERROR("%s: the sliding window begins at %d, %d is needed\n", __func__, oldest, place.first);
                return KNAPSPEC_NO_SLOT;
            }
        }
        if (!find_cells(place, n_tokens, n_room, n_room)) {
            LLAMA_LOG_ERROR("%s: there are no cells for %d tokens\n", __func__, n_tokens);
            return KNAPSPEC_NO_SLOT;
        }
        places.push_back(std::move(place));
    }
    const llama_ubatch ubatch = make_ubatch(n_room);
    if (ubatch.n_tokens == 0) {
        return KNAPSPEC_BAD_ARGUMENT;
    }
    for (placed & place : places) {
        find_cells(place, n_tokens, n_room, n_room); // another cache may have fewer
        place.meta = place.cache->v_cells[0].cp(place.taken);
        copy_data(place, true);
    }
    open = true; // from here on there is something to undo
    for (placed & place : places) {
        for (const uint32_t i : place.taken) {
            place.cache->v_cells[0].rm(i);
        }
        for (int32_t s = 1; s <= n_room; ++s) {
            place.cache->seq_cp(0, s, place.first, start);
        }
        place.cache->apply_ubatch(slot_of(place.cells, place.cells.size()), ubatch);
    }
    return KNAPSPEC_OK;
}

void knapspec_context::branching::end() {
    if (!open) {
        return;
    }
    ctx.synchronize();
    if (sched) {
        ggml_backend_sched_synchronize(sched.get());
    }
    for (placed & place : places) {
        for (int32_t s = 1; s <= n_room; ++s) {
            place.cache->seq_rm(s, -1, -1);
        }
        place.cache->v_cells[0].set(place.taken, place.meta);
        copy_data(place, false);
        place.cache->v_heads[0] = place.head;
    }
    kept.clear();
    sched.reset();
    places.clear();
    open = false;
}

bool knapspec_context::branching::hold(const llama_batch_ext & batch) {
    held.clear();
    if (!dynamic_cast<llama_kv_cache *>(ctx.memory.get()) && !dynamic_cast<llama_kv_cache_iswa *>(ctx.memory.get())) {
        return true; // of another kind, none of which has a sliding window alone
    }
    llama_batch_allocr split(ctx.get_model().hparams.n_pos_per_embd());
    if (!split.init(batch, ctx.get_model().vocab, true)) {
        return false;
    }
    const llama_ubatch ubatch = split.split_simple(batch.tokens.size());
    for (llama_kv_cache * cache : caches()) {
        placed place = { cache, 0, cache->v_heads[0], {}, {}, {}, {} };
        const auto slot = cache->find_slot(ubatch, false);
        if (slot.empty()) {
            held.clear();
            return false;
        }
        const auto & cells = cache->v_cells[0];
        llama_pos newest = -1;
        for (const uint32_t i : slot.idxs[0]) {
            if (!cells.is_empty(i)) {
                place.taken.push_back(i);
                newest = std::max(newest, cells.pos_get(i));
            }
        }
        for (uint32_t i = 0; i < cells.size() && newest >= 0; ++i) {
            if (!cells.is_empty(i) && cells.pos_get(i) <= newest) {
                place.dropped.push_back(i);
            }
        }
        place.dropped_meta = cells.cp(place.dropped);
        copy_data(place, true);
        held.push_back(std::move(place));
    }
    return true;
}

void knapspec_context::branching::give_back() {
    ctx.synchronize();
    for (placed & place : held) {
        place.cache->v_cells[0].set(place.dropped, place.dropped_meta);
        copy_data(place, false);
        place.cache->v_heads[0] = place.head;
    }
    held.clear();
}

//
// graphs
//

knapspec_context::branching::built * knapspec_context::branching::build(int32_t n_branches, bool from_tokens) {
    for (auto & graph : kept) {
        if (graph->n_branches == n_branches && graph->from_tokens == from_tokens) {
            graph->last_used = ++clock;
            return graph.get();
        }
    }
    if (kept.size() >= MAX_BUILT) {
        kept.erase(std::min_element(kept.begin(), kept.end(), [](const auto & a, const auto & b) {
            return a->last_used < b->last_used;
        }));
    }
    auto graph = std::make_unique<built>();
    graph->n_branches  = n_branches;
    graph->from_tokens = from_tokens;
    graph->ubatch      = make_ubatch(n_branches);
    const size_t n_rows = graph->ubatch.n_tokens;

    // the cells are in place already: their memory context is told so, not asked to find some
    const auto look_at = [](const llama_kv_cache_context * cells, const placed & place, const llama_kv_cache::slot_info & slot) {
        const_cast<llama_kv_cache_context *>(cells)->n_kv = place.cache->get_n_kv(slot);
    };
    if (auto * sliding = dynamic_cast<llama_kv_cache_iswa *>(ctx.memory.get())) {
        const auto base = slot_of(places[0].cells, n_rows);
        const auto swa  = slot_of(places[1].cells, n_rows);
        auto memory = std::make_unique<llama_kv_cache_iswa_context>(
                sliding, llama_kv_cache::slot_info_vec_t{ base }, llama_kv_cache::slot_info_vec_t{ swa },
                std::vector<llama_ubatch>{ graph->ubatch });
        look_at(memory->get_base(), places[0], base);
        look_at(memory->get_swa (), places[1], swa);
        graph->memory = std::move(memory);
    } else {
        const auto slot = slot_of(places[0].cells, n_rows);
        auto memory = std::make_unique<llama_kv_cache_context>(
                places[0].cache, llama_kv_cache::slot_info_vec_t{ slot }, std::vector<llama_ubatch>{ graph->ubatch });
        look_at(memory.get(), places[0], slot);
        graph->memory = std::move(memory);
    }

    if (!sched) {
        sched.reset(ggml_backend_sched_new(
                ctx.backend_ptrs.data(), ctx.backend_buft.data(), ctx.backend_ptrs.size(),
                ctx.gf_res_reserve->get_max_nodes(), false, ctx.cparams.op_offload));
    }
    graph->res = std::make_unique<llm_graph_result>(ctx.gf_res_reserve->get_max_nodes());
    graph->res->reset();
    const auto n_outputs = ctx.n_outputs;
    ctx.n_outputs = n_rows;
    std::swap(ctx.sched, sched);
    ggml_cgraph * gf = ctx.model.build_graph(ctx.graph_params(
            graph->res.get(), graph->ubatch, graph->memory.get(), LLM_GRAPH_TYPE_DEFAULT));
    std::swap(ctx.sched, sched);
    ctx.n_outputs = n_outputs;
    if (!gf) {
        return nullptr;
    }
    std::string reason;
    graph->items = knapspec_find_sublayers(*graph->res, reason);
    if (graph->items.size() != owner.found.size()) {
        LLAMA_LOG_ERROR("%s: the model has %zu sublayers, this graph %zu %s\n", __func__, owner.found.size(), graph->items.size(),
                reason.c_str());
        return nullptr;
    }
    graph->parts.resize(graph->items.size() + 1);

    graph->own.reset(ggml_init({
        (graph->parts.size() + 1)*ggml_graph_overhead_custom(gf->n_nodes + gf->n_leafs, false) + 2*ggml_tensor_overhead(), nullptr, true,
    }));
    graph->stream = ggml_new_tensor_2d(graph->own.get(), GGML_TYPE_F32, owner.n_hidden(), n_rows);
    ggml_set_input(graph->stream);

    // All inputs are filled once, in a buffer of their own: the parts share them.
    std::vector<ggml_tensor *> inputs = { graph->stream };
    for (int i = 0; i < gf->n_leafs; ++i) {
        if ((gf->leafs[i]->flags & GGML_TENSOR_FLAG_INPUT) && !gf->leafs[i]->buffer) {
            inputs.push_back(gf->leafs[i]);
        }
    }
    ggml_backend_buffer_type_t type = ggml_backend_get_default_buffer_type(ctx.backend_cpu);
    const size_t align = ggml_backend_buft_get_alignment(type);
    size_t size = align;
    for (ggml_tensor * t : inputs) {
        size += GGML_PAD(ggml_backend_buft_get_alloc_size(type, t), align);
    }
    graph->inputs.reset(ggml_backend_buft_alloc_buffer(type, size));
    if (!graph->inputs) {
        return nullptr;
    }
    ggml_tallocr alloc = ggml_tallocr_new(graph->inputs.get());
    for (ggml_tensor * t : inputs) {
        if (ggml_tallocr_alloc(&alloc, t) != GGML_STATUS_SUCCESS) {
            return nullptr;
        }
    }
    graph->res->set_inputs(&graph->ubatch);

    graph->last_used = ++clock;
    kept.push_back(std::move(graph));
    return kept.back().get();
}

knapspec_context::branching::part * knapspec_context::branching::cut(built & graph, size_t first, size_t last) {
    part & result = graph.parts[last];
    if (result.graph) {
        return &result;
    }
    std::string reason;
    const std::vector<ggml_tensor *> nodes = knapspec_part(*graph.res, graph.items, first, last, reason);
    ggml_tensor * out  = last < graph.items.size() ? graph.items[last].add : graph.res->t_logits;
    ggml_tensor * from = first > 0 ? graph.items[first - 1].add : nullptr;
    if (nodes.empty() || (from && !ggml_are_same_shape(from, graph.stream)) ||
            (last < graph.items.size() && !ggml_are_same_shape(out, graph.stream))) {
        LLAMA_LOG_ERROR("%s: sublayer %zu cannot be computed by itself %s\n", __func__, last, reason.c_str());
        return nullptr;
    }
    ggml_set_output(out);
    result.out   = out;
    result.graph = ggml_new_graph_custom(graph.own.get(), graph.res->get_gf()->n_nodes + graph.res->get_gf()->n_leafs, false);
    for (ggml_tensor * t : nodes) {
        for (int k = 0; k < GGML_MAX_SRC; ++k) {
            if (from && t->src[k] == from) {
                t->src[k] = graph.stream;
            }
        }
        if (from && t->view_src == from) {
            t->view_src = graph.stream;
        }
        part::node node = { t, {}, t->data, t->buffer };
        std::copy(t->src, t->src + GGML_MAX_SRC, node.src.begin());
        result.nodes.push_back(node);
        ggml_build_forward_expand(result.graph, t);
    }
    return &result;
}

// Compute a part on these states, and let `read` have its result before the memory serves the next one.
int32_t knapspec_context::branching::run(
        built & graph, part & which, const float * states, const std::function<void(ggml_tensor *)> & read) {
    if (owner.interrupted.load()) {
        return KNAPSPEC_ABORTED;
    }
    if (states) {
        ggml_backend_tensor_set(graph.stream, states, 0, ggml_nbytes(graph.stream));
    }
    // A scheduler takes a graph of as many nodes as the one before for the same one unless it is made to plan anew.
    ggml_backend_sched_reset(sched.get());
    int32_t ret = ggml_backend_sched_reserve(sched.get(), which.graph) ? KNAPSPEC_OK : -2;
    const auto reset = [&]() {
        // parts share nodes, and a scheduler with several backends rewires what it has split
        for (const part::node & node : which.nodes) {
            node.tensor->data   = node.data;
            node.tensor->buffer = node.buffer;
            std::copy(node.src.begin(), node.src.end(), node.tensor->src);
        }
    };
    reset();
    if (ret == KNAPSPEC_OK && !ggml_backend_sched_alloc_graph(sched.get(), which.graph)) {
        ret = -2;
    }
    if (ret == KNAPSPEC_OK) {
        std::swap(ctx.sched, sched);
        const ggml_status status = ctx.graph_compute(which.graph, graph.ubatch.n_tokens > 1);
        std::swap(ctx.sched, sched);
        ggml_backend_sched_synchronize(sched.get());
        ret = owner.interrupted.load() || status == GGML_STATUS_ABORTED ? KNAPSPEC_ABORTED :
              status == GGML_STATUS_SUCCESS                             ? KNAPSPEC_OK      : -3;
    }
    if (ret == KNAPSPEC_OK) {
        read(which.out);
    }
    reset();
    return ret;
}

//
// what callers ask for
//

int32_t knapspec_context::branching::embed(int32_t last, float * states_out) {
    if (!open || last < 0 || last >= (int32_t) owner.found.size()) {
        LLAMA_LOG_ERROR("%s: sublayer %d of %zu cannot be reached\n", __func__, last, owner.found.size());
        return KNAPSPEC_BAD_ARGUMENT;
    }
    built * graph = build(1, true);
    part  * which = graph ? cut(*graph, 0, last) : nullptr;
    if (!which) {
        return -2;
    }
    return run(*graph, *which, nullptr, [&](ggml_tensor * t) {
        ggml_backend_tensor_get(t, states_out, 0, ggml_nbytes(t));
    });
}

int32_t knapspec_context::branching::apply(int32_t sublayer, int32_t n_branches, const float * states, float * states_out) {
    if (!open || sublayer < 1 || sublayer >= (int32_t) owner.found.size() || n_branches < 1) {
        LLAMA_LOG_ERROR("%s: sublayer %d cannot be applied to %d branches\n", __func__, sublayer, n_branches);
        return KNAPSPEC_BAD_ARGUMENT;
    }
    const size_t  branch_size = (size_t) owner.n_hidden()*window.size();
    const int32_t n_turns     = (n_branches + n_room - 1)/n_room;
    for (int32_t turn = 0, done = 0; turn < n_turns; ++turn) {
        // turns as equal as can be: two graphs at most
        const int32_t n = n_branches/n_turns + (turn < n_branches % n_turns);
        built * graph = build(n, false);
        part  * which = graph ? cut(*graph, sublayer, sublayer) : nullptr;
        if (!which) {
            return -2;
        }
        const int32_t ret = run(*graph, *which, states + done*branch_size, [&](ggml_tensor * t) {
            ggml_backend_tensor_get(t, states_out + done*branch_size, 0, ggml_nbytes(t));
        });
        if (ret != KNAPSPEC_OK) {
            return ret;
        }
        done += n;
    }
    return KNAPSPEC_OK;
}

int32_t knapspec_context::branching::head(int32_t n_branches, const float * states, llama_token * tokens_out, float * probs_out) {
    if (!open || n_branches < 1) {
        LLAMA_LOG_ERROR("%s: no head for %d branches\n", __func__, n_branches);
        return KNAPSPEC_BAD_ARGUMENT;
    }
    const int32_t n_tokens    = window.size();
    const int32_t n_vocab     = ctx.get_model().vocab.n_tokens();
    const size_t  branch_size = (size_t) owner.n_hidden()*n_tokens;
    // no more rows of logits at a time than a pass of this context may have
    const int32_t n_most  = std::max<int32_t>(1, std::min<int32_t>(n_room, ctx.cparams.n_outputs_max/n_tokens));
    const int32_t n_turns = (n_branches + n_most - 1)/n_most;
    const knapspec_sampling greedy = knapspec_sampler::greedy();
    for (int32_t turn = 0, done = 0; turn < n_turns; ++turn) {
        const int32_t n = n_branches/n_turns + (turn < n_branches % n_turns);
        built * graph = build(n, false);
        part  * which = graph ? cut(*graph, graph->items.size(), graph->items.size()) : nullptr;
        if (!which || ggml_nelements(which->out) != (int64_t) n_vocab*n*n_tokens) {
            return -2;
        }
        int32_t ret = run(*graph, *which, states + done*branch_size, [&](ggml_tensor * t) {
            logits.resize((size_t) n_vocab*n*n_tokens);
            ggml_backend_tensor_get(t, logits.data(), 0, ggml_nbytes(t));
        });
        for (int32_t i = 0; i < n*n_tokens && ret == KNAPSPEC_OK; ++i) {
            float margin = 0.0f;
            const size_t row = (size_t) done*n_tokens + i;
            ret = owner.sampler.pick(
                    { logits.data() + (size_t) i*n_vocab, n_vocab }, greedy, 0, nullptr, 0, &tokens_out[row], &probs_out[row], &margin);
        }
        if (ret != KNAPSPEC_OK) {
            return ret;
        }
        done += n;
    }
    return KNAPSPEC_OK;
}

extern "C" {

int32_t knapspec_n_hidden(llama_context * ctx) {
    return knapspec_context::of(ctx).n_hidden();
}

const char * knapspec_branch_refusal(llama_context * ctx) {
    return knapspec_context::of(ctx).branch_refusal().c_str();
}

int32_t knapspec_branch_begin(llama_context * ctx, llama_pos start, const llama_token * tokens, int32_t n_tokens, int32_t n_branches) {
    return knapspec_context::of(ctx).branches().begin(start, tokens, n_tokens, n_branches);
}

int32_t knapspec_branch_embed(llama_context * ctx, int32_t last, float * states_out) {
    return knapspec_context::of(ctx).branches().embed(last, states_out);
}

int32_t knapspec_branch_apply(llama_context * ctx, int32_t sublayer, int32_t n_branches, const float * states, float * states_out) {
    return knapspec_context::of(ctx).branches().apply(sublayer, n_branches, states, states_out);
}

int32_t knapspec_branch_head(llama_context * ctx, int32_t n_branches, const float * states, llama_token * tokens_out, float * probs_out) {
    return knapspec_context::of(ctx).branches().head(n_branches, states, tokens_out, probs_out);
}

void knapspec_branch_end(llama_context * ctx) {
    knapspec_context::of(ctx).branches().end();
}

} // extern "C"
