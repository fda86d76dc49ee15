#include "knapspec-cpu.h"

#include "knapspec-attention.h"
#include "knapspec-matmul.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {

// KNAPSPEC_EDGE_KERNELS=0 starts with upstream's kernels
bool initially_enabled() {
    static const bool value = [] {
        const char * setting = getenv("KNAPSPEC_EDGE_KERNELS");
        return !setting || strcmp(setting, "0") != 0;
    }();
    return value;
}

std::atomic<bool> & enabled() {
    static std::atomic<bool> value{initially_enabled()};
    return value;
}

void set_enabled(bool value) {
    enabled().store(value, std::memory_order_relaxed);
}

bool get_enabled() {
    return enabled().load(std::memory_order_relaxed);
}

} // namespace

extern "C" {

bool knapspec_cpu_compute_forward(const struct ggml_compute_params * params, struct ggml_tensor * op) {
    if (params->use_ref || !get_enabled()) {
        return false;
    }
    switch (op->op) {
        case GGML_OP_MUL_MAT:
            return knapspec::mul_mat(params, op);
        case GGML_OP_FLASH_ATTN_EXT:
            return knapspec::attention(params, op);
        default:
            return false;
    }
}

size_t knapspec_cpu_work_size(int n_threads, const struct ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_MUL_MAT:
            return knapspec::mul_mat_work_size(op);
        case GGML_OP_FLASH_ATTN_EXT:
            return knapspec::attention_work_size(n_threads, op);
        default:
            return 0;
    }
}

bool knapspec_cpu_keeps_plain(const struct ggml_tensor * weight) {
    // upstream asks again for weights that it has packed, so the answer may never change
    return initially_enabled() && knapspec::prefers_plain_rows(weight);
}

void * knapspec_cpu_proc_address(const char * name) {
    if (strcmp(name, "knapspec_cpu_set_enabled") == 0) {
        return (void *) set_enabled;
    }
    if (strcmp(name, "knapspec_cpu_get_enabled") == 0) {
        return (void *) get_enabled;
    }
    if (strcmp(name, "knapspec_cpu_covers") == 0) {
        return (void *) knapspec::covers_weight;
    }
    if (strcmp(name, "knapspec_cpu_declines_attention") == 0) {
        return (void *) knapspec::attention_declines;
    }
    return nullptr;
}

} // extern "C"
