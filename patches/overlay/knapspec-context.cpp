#include "knapspec-branch.h"
#include "knapspec-context.h"
#include "knapspec-grammar.h"
#include "knapspec-kernels.h"
#include "knapspec-window.h"

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory.h"
#include "llama-model.h"

#include <algorithm>
#include <csignal>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

namespace {

// Wider batches are prompt processing: built once per prompt slice, not worth a scheduler of their own.
constexpr uint32_t MAX_KEPT_TOKENS = 64;

// Tokens whose updates make a mean worth adding, and those that it remembers.
constexpr int64_t REPAIR_LEAST_TOKENS  = 8;
constexpr int64_t REPAIR_MEMORY_TOKENS = 64;

std::atomic<knapspec_context *> sigint_target{ nullptr };

#if defined(_WIN32)
using sigint_action = void (*)(int);
#else
using sigint_action = struct sigaction;
#endif
sigint_action sigint_previous;

// Handlers that may still use what they have read above. A signal may arrive in any thread of the process, also while
// another one frees the context.
std::atomic<int> sigint_running{ 0 };

void on_sigint(int signum
#if !defined(_WIN32)
        , siginfo_t * info, void * ucontext
#endif
        ) {
    sigint_running++;
    if (knapspec_context * target = sigint_target.load()) {
        target->interrupt(true);
    }
    const sigint_action previous = sigint_previous; // which may not return
    sigint_running--;
#if defined(_WIN32)
    signal(SIGINT, on_sigint); // Windows resets the handler when it runs
    if (previous != SIG_DFL && previous != SIG_IGN) {
        previous(signum);
    }
#else
    if (previous.sa_flags & SA_SIGINFO) {
        previous.sa_sigaction(signum, info, ucontext);
    } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
        previous.sa_handler(signum);
    }
#endif
}

void sigint_release() {
    if (sigint_target.exchange(nullptr)) {
#if defined(_WIN32)
        signal(SIGINT, sigint_previous);
#else
        sigaction(SIGINT, &sigint_previous, nullptr);
#endif
        while (sigint_running.load() > 0) {
            std::this_thread::yield();
        }
    }
}

} // namespace

knapspec_context::knapspec_context(llama_context & ctx) : ctx(ctx) {}

knapspec_context::~knapspec_context() {
    if (sigint_target.load() == this) {
        sigint_release();
    }
}

knapspec_context & knapspec_context::of(llama_context * ctx) {
    if (!ctx->knapspec) {
        ctx->knapspec = std::make_unique<knapspec_context>(*ctx);
    }
    return *ctx->knapspec;
}

//
// graphs
//

void knapspec_context::swap_with(graph_slot & slot) {
    std::swap(ctx.sched,              slot.sched);
    std::swap(ctx.gf_res_prev,        slot.res);
    std::swap(ctx.gf_res_prev_active, slot.active);
}

void knapspec_context::restore() {
    if (current) {
        swap_with(*current);
        current = nullptr;
    }
}

void knapspec_context::drop_graphs() {
    restore();
    if (!kept.empty() || aside) {
        ctx.synchronize();
        kept.clear();
        aside.reset();
    }
}

std::unique_ptr<knapspec_context::graph_slot> knapspec_context::make_slot(uint32_t n_tokens, uint32_t n_outputs) const {
    auto slot = std::make_unique<graph_slot>();
    slot->plan      = plan;
    slot->n_tokens  = n_tokens;
    slot->n_outputs = n_outputs;
    slot->capturing = capturing;
    slot->repaired  = repairs();
    slot->n_head    = head_now();
    slot->sched.reset(ggml_backend_sched_new(
            ctx.backend_ptrs.data(), ctx.backend_buft.data(), ctx.backend_ptrs.size(),
            ctx.gf_res_reserve->get_max_nodes(), false, ctx.cparams.op_offload));
    return slot;
}

knapspec_context::graph_slot & knapspec_context::slot_for(uint32_t n_tokens, uint32_t n_outputs) {
    const auto serves = [&](const graph_slot & slot) {
        return slot.n_tokens == n_tokens && slot.n_outputs == n_outputs && slot.capturing == capturing && slot.repaired == repairs() &&
               slot.n_head == head_now() && slot.plan == plan;
    };
    if (is_beside) {
        if (!aside || !serves(*aside)) {
            restore();
            ctx.synchronize();
            aside = make_slot(n_tokens, n_outputs);
        }
        return *aside;
    }
    for (auto & slot : kept) {
        if (serves(*slot)) {
            return *slot;
        }
    }
    if (kept.size() >= std::max<size_t>(n_keep, 1)) {
        restore();
        ctx.synchronize();
        kept.erase(std::min_element(kept.begin(), kept.end(), [](const auto & a, const auto & b) {
            return a->last_used < b->last_used;
        }));
        n_evicted++;
    }
    kept.push_back(make_slot(n_tokens, n_outputs));
    return *kept.back();
}

void knapspec_context::before_graph(const llama_ubatch & ubatch) {
    // A scheduler trusts that a graph of as many nodes as the one before has the same topology, and places its tensors
    // as before. Two plans that skip equally much break that trust, so a pruned graph always has a scheduler of its own.
    // Single steps of the full model stay with the context's own, so that plain decoding is upstream's in every respect,
    // as do prompts, parallel pipelines and samplers inside the graph.
    const bool keep = !plan.empty() || head_now() > 0 || is_beside || capturing || (n_keep > 0 && ubatch.n_tokens > 1 && ubatch.n_tokens <= MAX_KEPT_TOKENS &&
                                        !ctx.cparams.pipeline_parallel && ctx.sampling.samplers.empty());
    if (keep) {
        graph_slot & slot = slot_for(ubatch.n_tokens, ctx.n_outputs);
        if (current != &slot) {
            restore();
            swap_with(slot);
            current = &slot;
        }
        slot.last_used = ++clock;
    } else {
        restore();
    }
    n_nodes = current ? current->n_nodes : own.n_nodes;
    n_computed++;
}

bool knapspec_context::after_build(llm_graph_result & res) {
    if (!plan.empty() || head_now() > 0 || capturing) {
        std::string reason;
        const auto items = knapspec_find_sublayers(res, reason);
        bool same = items.size() == found.size();
        for (size_t i = 0; same && i < items.size(); ++i) {
            same = items[i].info == found[i];
        }
        if (!same) {
            LLAMA_LOG_ERROR("%s: the plan has %zu sublayers, this graph %zu %s\n", __func__, found.size(), items.size(), reason.c_str());
            return false;
        }
        if (head_now() > 0) {
            const knapspec_output output = knapspec_find_output(res, reason);
            if (!output.product || output.product->src[0] != head_weight) {
                LLAMA_LOG_ERROR("%s: the logits are made otherwise than before %s\n", __func__, reason.c_str());
                return false;
            }
            knapspec_shorten_output(res, output, head->rows(res.get_ctx(), n_head));
        }
        if (!plan.empty() || head_now() > 0) {
            // beside the text tokens stand at many places, and behind cells that are not theirs
            const auto replaced = plan.empty() ? std::vector<const ggml_tensor *>() : windowing::apply(res, items, plan, !is_beside);
            const auto modes    = plan.empty() ? std::vector<int32_t>(items.size(), KNAPSPEC_MODE_FULL) : plan.modes;
            static const std::vector<ggml_tensor *> none;
            if (!knapspec_prune(res, items, modes, replaced, repairs() ? repair.vectors : none, reason)) {
                LLAMA_LOG_ERROR("%s: %s\n", __func__, reason.c_str());
                return false;
            }
        }
        if (head_now() > 0) {
            // llama.cpp would copy whole rows
            current->logits = res.t_logits;
            res.t_logits    = nullptr;
        }
        if (capturing) {
            auto & captured = current->captured;
            captured.clear();
            for (size_t i = 0; i < items.size(); ++i) {
                const bool skipped = !plan.empty() && plan.modes[i] == KNAPSPEC_MODE_SKIP && !(repairs() && repair.vectors[i]);
                // what stands for a skipped addition: the one before it, where nothing but rows lies in between
                ggml_tensor * t = !skipped ? items[i].add : i > 0 ? captured[i - 1] : items[i].residual;
                ggml_set_output(t);
                if (t->view_src) {
                    ggml_set_output(t->view_src);
                }
                captured.push_back(t);
            }
        }
    }
    n_nodes = (current ? current : &own)->n_nodes = ggml_graph_n_nodes(res.get_gf());
    n_built++;
    return true;
}

knapspec_graph_stats knapspec_context::graph_stats() const {
    return { n_built, n_computed - n_built, n_evicted, n_nodes, (int64_t) kept.size() };
}

void knapspec_context::keep_graphs(int32_t n) {
    drop_graphs();
    n_keep = std::max(0, n);
}

//
// plans
//

void knapspec_context::analyse() {
    if (analysed) {
        return;
    }
    analysed = true;

    if (!ctx.memory) {
        why_not = "the model has no KV cache to draft with";
        return;
    }
    ctx.synchronize();
    ctx.sched_reserve();
    const auto memory = ctx.memory->init_full();
    const uint32_t n_seqs = ctx.cparams.n_seq_max;
    analysing = true;
    const bool built = memory && ctx.graph_reserve(n_seqs, n_seqs, n_seqs, memory.get(), true);
    analysing = false;
    if (!built) {
        why_not = "its graph could not be built for inspection";
        found.clear();
        found_traits.clear();
        repair.repairable.clear();
        found_window_refusals.clear();
    }
    if (found.empty()) {
        why_no_branches = why_no_head = why_not.empty() ? "its sublayers are not recognised" : why_not;
        head_weight = nullptr;
    }
}

void knapspec_context::before_split(const llm_graph_result & res) {
    if (!analysing) {
        return;
    }
    n_learned_positions = knapspec_learned_positions(res);
    found_uncovered     = knapspec_uncovered_weights(res.get_gf());
    const auto items = knapspec_find_sublayers(res, why_not, true);
    for (const knapspec_item & item : items) {
        found.push_back(item.info);
        found_traits.push_back(item.traits);
        repair.repairable.push_back(knapspec_repairable(items, repair.repairable.size()));
        found_window_refusals.push_back(windowing::refusal(res, item));
        n_stream = item.add->ne[0];
    }
    why_no_branches = find_branch_refusal(res, items);
    const knapspec_output output = knapspec_find_output(res, why_no_head);
    if (output.product && output.product->src[0]->ne[1] != (int64_t) ctx.get_model().vocab.n_tokens()) {
        why_no_head = std::string(output.product->src[0]->name) + " is not one row per token";
    } else if (output.product) {
        head_weight = output.product->src[0];
    }
}

const std::vector<knapspec_traits> & knapspec_context::traits() {
    analyse();
    return found_traits;
}

const std::vector<std::string> & knapspec_context::window_refusals() {
    analyse();
    return found_window_refusals;
}

const std::vector<std::string> & knapspec_context::uncovered_weights() {
    analyse();
    return found_uncovered;
}

int64_t knapspec_context::learned_positions() {
    analyse();
    return n_learned_positions;
}

const std::vector<knapspec_sublayer_info> & knapspec_context::sublayers() {
    analyse();
    return found;
}

const std::string & knapspec_context::refusal() {
    analyse();
    return why_not;
}

const std::string & knapspec_context::branch_refusal() {
    analyse();
    return why_no_branches;
}

int32_t knapspec_context::n_hidden() {
    analyse();
    return n_stream;
}

knapspec_context::branching & knapspec_context::branches() {
    if (!branched) {
        branched = std::make_unique<branching>(*this);
    }
    return *branched;
}

int32_t knapspec_context::capture(bool enable) {
    analyse();
    if (enable && found.empty()) {
        LLAMA_LOG_ERROR("%s: there are no sublayers to capture\n", __func__);
        return KNAPSPEC_BAD_ARGUMENT;
    }
    capturing = enable;
    return KNAPSPEC_OK;
}

int32_t knapspec_context::captured(float * out, int32_t n_tokens) {
    if (!has_captured(n_tokens)) {
        LLAMA_LOG_ERROR("%s: the latest pass kept no states of %d tokens\n", __func__, n_tokens);
        return KNAPSPEC_BAD_ARGUMENT;
    }
    ctx.synchronize();
    const int64_t size = (int64_t) n_stream*n_tokens;
    for (size_t i = 0; i < current->captured.size(); ++i) {
        ggml_backend_tensor_get(current->captured[i], out + i*size, 0, size*sizeof(float));
    }
    return KNAPSPEC_OK;
}

bool knapspec_context::has_captured(int32_t n_tokens) const {
    return current && current->capturing && current->captured.size() == found.size() && (int32_t) current->n_tokens == n_tokens &&
           std::all_of(current->captured.begin(), current->captured.end(), [&](const ggml_tensor * t) {
               return t->type == GGML_TYPE_F32 && ggml_is_contiguous(t) && ggml_nelements(t) == (int64_t) n_stream*n_tokens;
           });
}

int32_t knapspec_context::set_plan(const int32_t * modes, int32_t n, const knapspec_window * windows) {
    if (n == 0) {
        plan = {};
        return KNAPSPEC_OK;
    }
    analyse();
    if (n != (int32_t) found.size()) {
        LLAMA_LOG_ERROR("%s: the plan has %d modes, the model %zu sublayers\n", __func__, n, found.size());
        return KNAPSPEC_BAD_ARGUMENT;
    }
    knapspec_plan wanted = { { modes, modes + n }, std::vector<knapspec_window>(n) };
    for (int32_t i = 0; i < n; ++i) {
        if (modes[i] < KNAPSPEC_MODE_FULL || modes[i] > KNAPSPEC_MODE_WINDOW) {
            LLAMA_LOG_ERROR("%s: mode %d of sublayer %d is unknown\n", __func__, modes[i], i);
            return KNAPSPEC_BAD_ARGUMENT;
        }
        if (modes[i] != KNAPSPEC_MODE_WINDOW) {
            continue;
        }
        if (!found_window_refusals[i].empty()) {
            LLAMA_LOG_ERROR("sublayer %d cannot have a window: %s\n", i, found_window_refusals[i].c_str());
            return KNAPSPEC_BAD_ARGUMENT;
        }
        if (!windows || windows[i].n_sinks < 0 || windows[i].n_recent < 1) {
            LLAMA_LOG_ERROR("the window of sublayer %d holds no token\n", i);
            return KNAPSPEC_BAD_ARGUMENT;
        }
        wanted.windows[i] = windows[i];
    }
    const bool full = std::all_of(modes, modes + n, [](int32_t mode) { return mode == KNAPSPEC_MODE_FULL; });
    plan = full ? knapspec_plan() : std::move(wanted);
    return KNAPSPEC_OK;
}

//
// repair
//

bool knapspec_context::repairs() const {
    return !plan.empty() && repair.interval > 0;
}

void knapspec_context::set_repair(int32_t interval) {
    analyse();
    repair.interval = found.empty() ? 0 : std::max(0, interval);
    repair.n_passes = 0;
    repair.n_tokens = 0;
    repair.means.assign(found.size()*n_stream, 0.0f);
    if (repair.interval > 0 && repair.vectors.empty() && !make_repairs()) {
        LLAMA_LOG_ERROR("%s: there is no memory for the vectors\n", __func__);
        repair.interval = 0;
        repair.vectors.clear();
    }
    // zero until enough is known: so the graph stays the same when it is
    for (const auto & buffer : repair.buffers) {
        if (buffer) {
            ggml_backend_buffer_clear(buffer.get(), 0);
        }
    }
}

bool knapspec_context::make_repairs() {
    // each beside the weights of its layer
    std::map<ggml_backend_buffer_type_t, std::vector<size_t>> by_device;
    for (size_t i = 0; i < found.size(); ++i) {
        if (repair.repairable[i]) {
            ggml_backend_dev_t device = ctx.get_model().dev_layer(found[i].layer);
            by_device[ggml_backend_dev_buffer_type(device)].push_back(i);
        }
    }
    repair.vectors.assign(found.size(), nullptr);
    for (const auto & [buffer_type, sublayers] : by_device) {
        ggml_context_ptr tensors(ggml_init({ sublayers.size()*ggml_tensor_overhead(), nullptr, true }));
        for (size_t i : sublayers) {
            repair.vectors[i] = ggml_new_tensor_1d(tensors.get(), GGML_TYPE_F32, n_stream);
            ggml_format_name(repair.vectors[i], "knapspec_repair-%zu", i);
        }
        repair.buffers.emplace_back(ggml_backend_alloc_ctx_tensors_from_buft(tensors.get(), buffer_type));
        repair.contexts.push_back(std::move(tensors));
        if (!repair.buffers.back()) {
            return false;
        }
        ggml_backend_buffer_set_usage(repair.buffers.back().get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    }
    return true;
}

void knapspec_context::learn_repairs(int32_t n_tokens) {
    if (!has_captured(n_tokens)) {
        return;
    }
    std::vector<float> before(n_stream*n_tokens);
    std::vector<float> after(before.size());
    repair.n_tokens += n_tokens;
    const float weight = (float) n_tokens/std::min<int64_t>(repair.n_tokens, std::max<int64_t>(n_tokens, REPAIR_MEMORY_TOKENS));
    for (size_t i = 0; i < found.size(); ++i) {
        ggml_backend_tensor_get(current->captured[i], after.data(), 0, after.size()*sizeof(float));
        if (repair.vectors[i]) {
            float * mean = repair.means.data() + i*n_stream;
            for (int32_t k = 0; k < n_stream; ++k) {
                float sum = 0.0f;
                for (int32_t t = 0; t < n_tokens; ++t) {
                    sum += after[t*n_stream + k] - before[t*n_stream + k];
                }
                if (std::isfinite(sum)) {
                    mean[k] += weight*(sum/n_tokens - mean[k]);
                }
            }
            if (repair.n_tokens >= REPAIR_LEAST_TOKENS) {
                ggml_backend_tensor_set(repair.vectors[i], mean, 0, n_stream*sizeof(float));
            }
        }
        std::swap(before, after);
    }
}

int64_t knapspec_context::get_repair(float * out) {
    if (out) {
        std::copy(repair.means.begin(), repair.means.end(), out);
    }
    return repair.n_tokens;
}

//
// short head
//

const std::string & knapspec_context::head_refusal() {
    analyse();
    return why_no_head;
}

knapspec_head * knapspec_context::short_head() {
    analyse();
    if (!head && head_weight) {
        head = std::make_unique<knapspec_head>(ctx.get_model(), head_weight);
    }
    if (!head) {
        LLAMA_LOG_ERROR("%s: no short head with this model: %s\n", __func__, why_no_head.c_str());
    }
    return head.get();
}

int32_t knapspec_context::reserve_head(int32_t n_rows, const char * path) {
    knapspec_head * own = short_head();
    if (!own) {
        return KNAPSPEC_BAD_ARGUMENT;
    }
    drop_graphs(); // they may read what is given up here
    n_head = n_columns = 0;
    return own->reserve(n_rows, path);
}

int32_t knapspec_context::set_head(const int32_t * places, const llama_token * tokens, int32_t n) {
    knapspec_head * own = short_head();
    if (!own) {
        return KNAPSPEC_BAD_ARGUMENT;
    }
    ctx.synchronize();
    const int32_t ret = own->set(places, tokens, n);
    if (ret == KNAPSPEC_UNREADABLE) {
        reserve_head(0, nullptr);
    }
    return ret;
}

int32_t knapspec_context::use_head(int32_t n_rows) {
    if (n_rows < 0 || (n_rows > 0 && (!head || n_rows > head->n_set()))) {
        LLAMA_LOG_ERROR("%s: a head of %d rows was asked for, the list has %d\n", __func__, n_rows, head ? head->n_set() : 0);
        return KNAPSPEC_BAD_ARGUMENT;
    }
    n_head = n_rows;
    return KNAPSPEC_OK;
}

float * knapspec_context::short_logits(int32_t n_outputs) {
    ggml_tensor * t = current ? current->logits : nullptr;
    if (!t || current->n_head != t->ne[0] || n_outputs > t->ne[1] || !ctx.output_swaps.empty()) {
        LLAMA_LOG_ERROR("%s: the latest pass has not got %d rows of a short head\n", __func__, n_outputs);
        return nullptr;
    }
    if (ggml_backend_buffer_is_host(t->buffer)) {
        return (float *) t->data;
    }
    short_rows.resize(ggml_nelements(t));
    ggml_backend_tensor_get(t, short_rows.data(), 0, ggml_nbytes(t));
    return short_rows.data();
}

int32_t knapspec_context::head_logits(int32_t row, float * out, int32_t n) {
    float * logits = row >= 0 && row < n_rows && n > 0 && n == n_columns ? short_logits(n_rows) : nullptr;
    if (!logits) {
        LLAMA_LOG_ERROR("%s: the latest pass has no row %d of %d logits\n", __func__, row, n);
        return KNAPSPEC_BAD_ARGUMENT;
    }
    memcpy(out, logits + (size_t) row*n, n*sizeof(float));
    return KNAPSPEC_OK;
}

//
// evaluation
//

// one sequence, logits for the last n_outputs tokens; the arrays are this object's
llama_batch knapspec_context::make_batch(const llama_token * tokens, int32_t n_tokens, llama_pos pos, int32_t n_outputs) {
    static llama_seq_id sequence = 0;
    batch_pos.resize(n_tokens);
    batch_n_seq_id.assign(n_tokens, 1);
    batch_seq_id.assign(n_tokens, &sequence);
    batch_logits.assign(n_tokens, 0);
    for (int32_t i = 0; i < n_tokens; ++i) {
        batch_pos[i]    = pos + i;
        batch_logits[i] = i >= n_tokens - n_outputs;
    }
    return {
        n_tokens, const_cast<llama_token *>(tokens), nullptr,
        batch_pos.data(), batch_n_seq_id.data(), batch_seq_id.data(), batch_logits.data(),
    };
}

// What llama_context::decode does to the memory, without the passes in between.
int32_t knapspec_context::fill(int32_t n_tokens, llama_pos pos) {
    if (!ctx.memory || n_tokens < 0 || pos < 0 || (branched && branched->is_open())) {
        LLAMA_LOG_ERROR("%s: %d cells after position %d cannot be filled\n", __func__, n_tokens, pos);
        return KNAPSPEC_BAD_ARGUMENT;
    }
    ctx.synchronize();
    text.resize(std::min<size_t>(text.size(), pos));
    text.resize(pos + n_tokens, -1);
    const int32_t n_batch = ctx.n_batch();
    for (int32_t done = 0; done < n_tokens; done += n_batch) {
        const int32_t n = std::min(n_batch, n_tokens - done);
        batch_tokens.assign(n, 0);
        llama_batch_compat batch(&ctx, make_batch(batch_tokens.data(), n, pos + done, 0));
        if (!ctx.balloc->init(*batch.batch_ext, ctx.get_model().vocab, false)) {
            return KNAPSPEC_BAD_ARGUMENT;
        }
        ctx.memory_update(false);
        const auto cells = ctx.memory->init_batch(*ctx.balloc, ctx.cparams.n_ubatch, false);
        if (!cells || cells->get_status() != LLAMA_MEMORY_STATUS_SUCCESS) {
            return KNAPSPEC_NO_SLOT;
        }
        do {
            if (!cells->apply()) {
                return KNAPSPEC_NO_SLOT;
            }
        } while (cells->next());
    }
    return KNAPSPEC_OK;
}

int32_t knapspec_context::eval(
        const llama_token       * tokens,
        int32_t                   n_tokens,
        llama_pos                 pos,
        int32_t                   n_outputs,
        const knapspec_sampling & sampling,
        llama_token             * tokens_out,
        float                   * probs_out,
        float                   * margins_out) {
    if (n_tokens <= 0 || n_outputs < 0 || n_outputs > n_tokens || n_tokens > (int32_t) ctx.n_batch() ||
            n_outputs > (int32_t) ctx.cparams.n_outputs_max) {
        LLAMA_LOG_ERROR("%s: %d tokens with %d outputs do not make a batch\n", __func__, n_tokens, n_outputs);
        return KNAPSPEC_BAD_ARGUMENT;
    }
    if (n_head > 0 && n_tokens > (int32_t) ctx.cparams.n_ubatch) {
        LLAMA_LOG_ERROR("%s: a short head takes %d tokens at once, not %d\n", __func__, (int32_t) ctx.cparams.n_ubatch, n_tokens);
        return KNAPSPEC_BAD_ARGUMENT;
    }
    const llama_batch batch = make_batch(tokens, n_tokens, pos, n_outputs);
    n_rows = n_columns = 0;
    is_picking = n_outputs > 0;
    // The states are kept by every pass that may be looked at, so that one graph serves.
    const bool learns = repair.interval > 0 && plan.empty() && n_head == 0 && !capturing && n_tokens > 1 && n_outputs == n_tokens &&
                        n_tokens <= (int32_t) std::min(MAX_KEPT_TOKENS, ctx.cparams.n_ubatch);
    capturing = capturing || learns;
    const int32_t ret = compute(*llama_batch_compat(&ctx, batch).batch_ext);
    capturing = capturing && !learns;
    is_picking = false;
    if (ret != KNAPSPEC_OK) {
        return ret;
    }
    if (learns && repair.n_passes++ % repair.interval == 0) {
        learn_repairs(n_tokens);
    }
    set_text(pos, tokens, n_tokens);
    n_rows    = n_outputs;
    n_columns = n_outputs > 0 ? n_head : 0;
    return pick(pos + n_tokens - n_outputs, 0, n_outputs, sampling, tokens_out, probs_out, margins_out);
}

void knapspec_context::watch_interrupt() {
    if (!callback_set) {
        callback_set = true;
        ctx.set_abort_callback([](void * data) { return ((knapspec_context *) data)->interrupted.load(); }, this);
    }
}

// a pass of llama.cpp, interruptible
int32_t knapspec_context::compute(const llama_batch_ext & batch) {
    if (branched && branched->is_open()) {
        LLAMA_LOG_ERROR("%s: branches are open\n", __func__);
        return KNAPSPEC_BAD_ARGUMENT;
    }
    watch_interrupt();
    // backends other than the CPU ignore the abort callback
    if (interrupted.load()) {
        return KNAPSPEC_ABORTED;
    }
    const int32_t ret = ctx.decode(batch);
    if (ret != 0) {
        return ret;
    }
    ctx.synchronize();
    // the pass may have ended before it noticed; its caller counts on the interruption
    return interrupted.load() ? KNAPSPEC_ABORTED : KNAPSPEC_OK;
}

// Positions behind these tokens hold nothing any more, whatever was there: a draft, or a text that has been cut.
void knapspec_context::set_text(llama_pos pos, const llama_token * tokens, int32_t n_tokens) {
    text.resize(pos, -1);
    text.insert(text.end(), tokens, tokens + n_tokens);
}

int32_t knapspec_context::pick(
        llama_pos                 pos,
        int32_t                   first_row,
        int32_t                   n_outputs,
        const knapspec_sampling & sampling,
        llama_token             * tokens_out,
        float                   * probs_out,
        float                   * margins_out) {
    if (n_outputs == 0) {
        return KNAPSPEC_OK;
    }
    const int32_t n_vocab = ctx.get_model().vocab.n_tokens();
    const int32_t n       = n_head > 0 ? n_head : n_vocab;
    float * logits = n_head > 0 ? short_logits(first_row + n_outputs) : ctx.get_logits();
    if (!logits) {
        return KNAPSPEC_BAD_ARGUMENT;
    }
    logits += (size_t) first_row*n;
    for (int32_t i = 0; i < n_outputs; ++i, logits += n) {
        const int64_t position = (int64_t) pos + i + 1;
        const int32_t picked = sampler.pick(
                n_head > 0 ? head->row(logits, n) : knapspec_row{ logits, n_vocab }, sampling, position, text.data(), std::min<size_t>(text.size(), position),
                &tokens_out[i], &probs_out[i], &margins_out[i]);
        if (picked != KNAPSPEC_OK) {
            // The first row belongs to the text, the others to what a draft made of it: they may never come to be asked for.
            tokens_out[i] = LLAMA_TOKEN_NULL;
            probs_out[i] = margins_out[i] = 0.0f;
            if (i > 0 || is_beside) {
                continue;
            }
            if (picked == KNAPSPEC_DEAD_END && sampling.grammar->is_lost()) {
                LLAMA_LOG_ERROR("the grammar has too many ways to read the text\n");
            } else if (picked == KNAPSPEC_COMPLETE) {
                LLAMA_LOG_ERROR("the answer is complete\n");
            } else if (picked == KNAPSPEC_DEAD_END) {
                LLAMA_LOG_ERROR("the grammar allows no token of this model there\n");
            } else {
                LLAMA_LOG_ERROR("no logit is a number\n");
            }
            return picked;
        }
    }
    return KNAPSPEC_OK;
}

int32_t knapspec_context::logprobs(
        int32_t row, llama_token token, int32_t n_top, float * logprob_out, llama_token * tokens_out, float * logprobs_out) {
    if (row < 0 || row >= n_rows || n_columns > 0) {
        LLAMA_LOG_ERROR("%s: the latest pass has %d whole rows, not row %d\n", __func__, n_columns > 0 ? 0 : n_rows, row);
        return KNAPSPEC_BAD_ARGUMENT;
    }
    const int32_t n_vocab = ctx.get_model().vocab.n_tokens();
    return sampler.logprobs(ctx.get_logits() + (size_t) row*n_vocab, n_vocab, token, n_top, logprob_out, tokens_out, logprobs_out);
}

//
// beside sequence 0
//

bool knapspec_context::fork(llama_seq_id branch, llama_pos start) {
    auto * iswa = dynamic_cast<llama_kv_cache_iswa *>(ctx.memory.get());
    if (!iswa) {
        ctx.memory->seq_cp(0, branch, 0, start);
        return true;
    }
    // A cell of two sequences cannot be reused, so a branch takes only the part of the window that it sees.
    const llama_pos first = std::max<llama_pos>(0, start - (llama_pos) ctx.get_model().hparams.n_swa);
    if (start > 0 && (iswa->get_swa()->seq_pos_min(0) < 0 || iswa->get_swa()->seq_pos_min(0) > first)) {
        return false;
    }
    iswa->get_base()->seq_cp(0, branch, 0, start);
    iswa->get_swa() ->seq_cp(0, branch, first, start);
    return true;
}

int32_t knapspec_context::beside(
        const llama_token       * tokens,
        int32_t                   n_blocks,
        const llama_pos         * starts,
        const int32_t           * lengths,
        const llama_token       * expected,
        const knapspec_sampling & sampling,
        llama_token             * tokens_out,
        float                   * probs_out,
        float                   * margins_out) {
    const llama_pos n_past = ctx.memory ? ctx.memory->seq_pos_max(0) + 1 : 0;
    const int64_t   n_most = std::min<int64_t>({ ctx.n_batch(), ctx.cparams.n_outputs_max, ctx.cparams.n_ubatch });
    int64_t n_tokens = 0;
    bool    valid    = ctx.memory && ctx.cparams.kv_unified && n_blocks > 0 && n_blocks < LLAMA_MAX_SEQ;
    for (int32_t i = 0; valid && i < n_blocks; ++i) {
        valid = lengths[i] > 0 && starts[i] >= 0 && starts[i] <= n_past && (n_tokens += lengths[i]) <= n_most;
    }
    for (int64_t i = 0; valid && expected && i < n_tokens; ++i) {
        valid = expected[i] >= 0 && expected[i] < (llama_token) ctx.get_model().vocab.n_tokens();
    }
    if (!valid) {
        LLAMA_LOG_ERROR("%s: %d blocks with %lld tokens cannot be evaluated beside %d tokens\n", __func__, n_blocks,
                (long long) n_tokens, n_past);
        return KNAPSPEC_BAD_ARGUMENT;
    }
    ctx.synchronize();
    n_rows = n_columns = 0;

    batch_branch.resize(n_blocks);
    batch_pos.clear();
    batch_seq_id.clear();
    batch_n_seq_id.assign(n_tokens, 1);
    batch_logits.assign(n_tokens, 1);
    int32_t ret = KNAPSPEC_OK;
    for (int32_t i = 0; i < n_blocks && ret == KNAPSPEC_OK; ++i) {
        batch_branch[i] = i + 1;
        for (int32_t k = 0; k < lengths[i]; ++k) {
            batch_pos.push_back(starts[i] + k);
            batch_seq_id.push_back(&batch_branch[i]);
        }
        ret = fork(i + 1, starts[i]) ? KNAPSPEC_OK : KNAPSPEC_NO_SLOT;
    }
    if (ret == KNAPSPEC_OK) {
        // the context was made for one sequence, and a batch of its own would take no others
        const auto & hparams = ctx.get_model().hparams;
        llama_batch_ext batch(
                n_tokens, hparams.n_embd_inp(), hparams.n_embd_inp_enc(), n_blocks + 1, ctx.memory.get(),
                ctx.get_model().vocab.n_tokens(), hparams.n_pos_per_embd());
        llama_batch_compat::init(batch, {
            (int32_t) n_tokens, const_cast<llama_token *>(tokens), nullptr,
            batch_pos.data(), batch_n_seq_id.data(), batch_seq_id.data(), batch_logits.data(),
        });
        if (branches().hold(batch)) {
            is_beside = is_picking = true;
            ret = compute(batch);
            is_picking = false;
            if (ret == KNAPSPEC_OK) {
                ret = pick_beside(tokens, n_blocks, starts, lengths, sampling, tokens_out, probs_out, margins_out);
            }
            is_beside = false;
        } else {
            ret = KNAPSPEC_NO_SLOT;
        }
    }
    if (ret == KNAPSPEC_OK && expected) {
        const int32_t n_vocab = ctx.get_model().vocab.n_tokens();
        float * logits = n_head > 0 ? short_logits(n_tokens) : ctx.get_logits();
        for (int32_t i = 0; i < (int32_t) n_tokens; ++i, logits += n_head > 0 ? n_head : n_vocab) {
            if (tokens_out[i] != expected[i] && tokens_out[i] >= 0) {
                const knapspec_row row = n_head > 0 ? head->row(logits, n_head) : knapspec_row{ logits, n_vocab };
                margins_out[i] = row.logit(expected[i]) - row.logit(tokens_out[i]);
            }
        }
    }
    for (int32_t i = 0; i < n_blocks; ++i) {
        ctx.memory->seq_rm(i + 1, -1, -1);
    }
    branches().give_back();
    return ret;
}

// Each block is a text of its own, for as long as it is picked from.
int32_t knapspec_context::pick_beside(
        const llama_token       * tokens,
        int32_t                   n_blocks,
        const llama_pos         * starts,
        const int32_t           * lengths,
        const knapspec_sampling & sampling,
        llama_token             * tokens_out,
        float                   * probs_out,
        float                   * margins_out) {
    const bool      reads = knapspec_sampler::needs_text(sampling);
    const size_t    first = std::min<size_t>(text.size(), *std::min_element(starts, starts + n_blocks));
    const std::vector<llama_token> rest(text.begin() + first, text.end());
    int32_t ret = KNAPSPEC_OK;
    for (int32_t i = 0, row = 0; i < n_blocks && ret == KNAPSPEC_OK; row += lengths[i++]) {
        if (reads) {
            text.resize(first);
            text.insert(text.end(), rest.begin(), rest.begin() + std::min(rest.size(), starts[i] - first));
            set_text(starts[i], tokens + row, lengths[i]);
        }
        ret = pick(starts[i], row, lengths[i], sampling, tokens_out + row, probs_out + row, margins_out + row);
    }
    if (reads) {
        text.resize(first);
        text.insert(text.end(), rest.begin(), rest.end());
    }
    return ret;
}

//
// log
//

namespace {

struct {
    std::mutex  mutex;
    std::string lines; // of errors since the last clear
    int         level     = GGML_LOG_LEVEL_NONE;
    bool        last_kept = false; // whether a continuation belongs to the kept error line
    bool        last_shown = false;
} log_state;

constexpr size_t MAX_ERROR_BYTES = 4096;

void on_log(ggml_log_level level, const char * text, void *) {
    std::lock_guard<std::mutex> lock(log_state.mutex);
    const bool continues = level == GGML_LOG_LEVEL_CONT;
    const bool keep = continues ? log_state.last_kept  : level == GGML_LOG_LEVEL_ERROR;
    const bool show = continues ? log_state.last_shown :
                      log_state.level != GGML_LOG_LEVEL_NONE && level >= log_state.level;
    if (keep) {
        // The first line names the cause, the later ones what failed with it.
        log_state.lines += text;
        if (log_state.lines.size() > MAX_ERROR_BYTES) {
            const size_t cut = log_state.lines.find('\n', log_state.lines.size() - MAX_ERROR_BYTES);
            log_state.lines.erase(0, cut == std::string::npos ? cut : cut + 1);
        }
    }
    if (show) {
        fputs(text, stderr);
    }
    log_state.last_kept  = keep;
    log_state.last_shown = show;
}

} // namespace

extern "C" {

int32_t knapspec_abi(void) {
    return KNAPSPEC_ABI;
}

int32_t knapspec_n_sublayers(llama_context * ctx) {
    const auto & found = knapspec_context::of(ctx).sublayers();
    return found.empty() ? -1 : (int32_t) found.size();
}

const char * knapspec_refusal(llama_context * ctx) {
    return knapspec_context::of(ctx).refusal().c_str();
}

int32_t knapspec_sublayer(llama_context * ctx, int32_t i, int32_t * layer, int32_t * kind) {
    const auto & found = knapspec_context::of(ctx).sublayers();
    if (i < 0 || i >= (int32_t) found.size()) {
        return KNAPSPEC_BAD_ARGUMENT;
    }
    *layer = found[i].layer;
    *kind  = found[i].kind;
    return KNAPSPEC_OK;
}

int32_t knapspec_sublayer_traits(llama_context * ctx, int32_t i, knapspec_traits * out) {
    const auto & traits = knapspec_context::of(ctx).traits();
    if (i < 0 || i >= (int32_t) traits.size()) {
        return KNAPSPEC_BAD_ARGUMENT;
    }
    *out = traits[i];
    return KNAPSPEC_OK;
}

int32_t knapspec_n_varying_weights(llama_context * ctx) {
    return (int32_t) knapspec_context::of(ctx).uncovered_weights().size();
}

const char * knapspec_varying_weight(llama_context * ctx, int32_t i) {
    const auto & names = knapspec_context::of(ctx).uncovered_weights();
    return i >= 0 && i < (int32_t) names.size() ? names[i].c_str() : nullptr;
}

int32_t knapspec_learned_positions(llama_context * ctx) {
    return (int32_t) knapspec_context::of(ctx).learned_positions();
}

int32_t knapspec_logprobs(
        llama_context * ctx, int32_t row, llama_token token, int32_t n_top, float * logprob_out, llama_token * tokens_out, float * logprobs_out) {
    return knapspec_context::of(ctx).logprobs(row, token, n_top, logprob_out, tokens_out, logprobs_out);
}

int32_t knapspec_fill(llama_context * ctx, int32_t n_tokens, llama_pos pos) {
    return knapspec_context::of(ctx).fill(n_tokens, pos);
}

int32_t knapspec_capture(llama_context * ctx, bool enable) {
    return knapspec_context::of(ctx).capture(enable);
}

int32_t knapspec_captured(llama_context * ctx, float * out, int32_t n_tokens) {
    return knapspec_context::of(ctx).captured(out, n_tokens);
}

int32_t knapspec_set_plan(llama_context * ctx, const int32_t * modes, int32_t n, const knapspec_window * windows) {
    return knapspec_context::of(ctx).set_plan(modes, n, windows);
}

const char * knapspec_window_refusal(llama_context * ctx, int32_t i) {
    const auto & refusals = knapspec_context::of(ctx).window_refusals();
    return i >= 0 && i < (int32_t) refusals.size() ? refusals[i].c_str() : nullptr;
}

void knapspec_set_repair(llama_context * ctx, int32_t interval) {
    knapspec_context::of(ctx).set_repair(interval);
}

int64_t knapspec_get_repair(llama_context * ctx, float * out) {
    return knapspec_context::of(ctx).get_repair(out);
}

const char * knapspec_head_refusal(llama_context * ctx) {
    return knapspec_context::of(ctx).head_refusal().c_str();
}

const char * knapspec_head_weight(llama_context * ctx) {
    knapspec_context & self = knapspec_context::of(ctx);
    return self.head_refusal().empty() ? self.short_head()->weight()->name : nullptr;
}

int32_t knapspec_head_reserve(llama_context * ctx, int32_t n_rows, const char * path) {
    return knapspec_context::of(ctx).reserve_head(n_rows, path);
}

int32_t knapspec_head_set(llama_context * ctx, const int32_t * places, const llama_token * tokens, int32_t n) {
    return knapspec_context::of(ctx).set_head(places, tokens, n);
}

int32_t knapspec_use_head(llama_context * ctx, int32_t n_rows) {
    return knapspec_context::of(ctx).use_head(n_rows);
}

int32_t knapspec_head_logits(llama_context * ctx, int32_t row, float * out, int32_t n_rows) {
    return knapspec_context::of(ctx).head_logits(row, out, n_rows);
}

void knapspec_keep_graphs(llama_context * ctx, int32_t n) {
    knapspec_context::of(ctx).keep_graphs(n);
}

void knapspec_get_graph_stats(llama_context * ctx, knapspec_graph_stats * out) {
    *out = knapspec_context::of(ctx).graph_stats();
}

int32_t knapspec_eval(
        llama_context           * ctx,
        const llama_token       * tokens,
        int32_t                   n_tokens,
        llama_pos                 pos,
        int32_t                   n_outputs,
        const knapspec_sampling * sampling,
        llama_token             * tokens_out,
        float                   * probs_out,
        float                   * margins_out) {
    return knapspec_context::of(ctx).eval(tokens, n_tokens, pos, n_outputs, *sampling, tokens_out, probs_out, margins_out);
}

int32_t knapspec_beside(
        llama_context           * ctx,
        const llama_token       * tokens,
        int32_t                   n_blocks,
        const llama_pos         * starts,
        const int32_t           * lengths,
        const llama_token       * expected,
        const knapspec_sampling * sampling,
        llama_token             * tokens_out,
        float                   * probs_out,
        float                   * margins_out) {
    return knapspec_context::of(ctx).beside(
            tokens, n_blocks, starts, lengths, expected, *sampling, tokens_out, probs_out, margins_out);
}

void knapspec_interrupt(llama_context * ctx) {
    knapspec_context::of(ctx).interrupt(true);
}

void knapspec_interrupt_clear(llama_context * ctx) {
    knapspec_context::of(ctx).interrupt(false);
}

int32_t knapspec_sigint_guard(llama_context * ctx, bool enable) {
    knapspec_context & self = knapspec_context::of(ctx);
    if (!enable) {
        if (sigint_target.load() == &self) {
            sigint_release();
        }
        return KNAPSPEC_OK;
    }
    knapspec_context * nobody = nullptr;
    if (!sigint_target.compare_exchange_strong(nobody, &self)) {
        return nobody == &self ? KNAPSPEC_OK : KNAPSPEC_BAD_ARGUMENT;
    }
#if defined(_WIN32)
    sigint_previous = signal(SIGINT, on_sigint);
#else
    struct sigaction action = {};
    action.sa_sigaction = on_sigint;
    action.sa_flags     = SA_SIGINFO;
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, &sigint_previous);
#endif
    return KNAPSPEC_OK;
}

void knapspec_log_install(int32_t level) {
    {
        std::lock_guard<std::mutex> lock(log_state.mutex);
        log_state.level = level;
    }
    llama_log_set(on_log, nullptr);
}

int32_t knapspec_last_error(char * buf, int32_t size) {
    std::lock_guard<std::mutex> lock(log_state.mutex);
    if (buf && size > 0) {
        const size_t n = std::min<size_t>(log_state.lines.size(), size - 1);
        memcpy(buf, log_state.lines.data(), n);
        buf[n] = '\0';
    }
    return (int32_t) log_state.lines.size();
}

void knapspec_clear_error(void) {
    std::lock_guard<std::mutex> lock(log_state.mutex);
    log_state.lines.clear();
}

} // extern "C"
