// What the library knows of our CPU kernels (overlay/ggml-cpu), reached through the registry because the CPU backend may be a module.
#include "knapspec-kernels.h"

#include "knapspec.h"

#include "ggml-backend.h"
#include "ggml-impl.h"

#include <algorithm>

namespace {

void * cpu_function(const char * name) {
    for (size_t i = 0; i < ggml_backend_reg_count(); i++) {
        if (void * function = ggml_backend_reg_get_proc_address(ggml_backend_reg_get(i), name)) {
            return function;
        }
    }
    return nullptr;
}

bool is_weight(const ggml_tensor * t) {
    return t->op == GGML_OP_NONE && t->buffer && ggml_backend_buffer_get_usage(t->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

} // namespace

std::vector<std::string> knapspec_uncovered_weights(const ggml_cgraph * graph) {
    std::vector<std::string> names;
    const auto covers = (bool (*)(const ggml_tensor *)) cpu_function("knapspec_cpu_covers");
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * node = graph->nodes[i];
        if ((node->op != GGML_OP_MUL_MAT && node->op != GGML_OP_MUL_MAT_ID) || !is_weight(node->src[0])) {
            continue;
        }
        if (node->op == GGML_OP_MUL_MAT_ID || !covers || !covers(node->src[0])) {
            names.push_back(node->src[0]->name);
        }
    }
    std::sort(names.begin(), names.end());
    names.erase(std::unique(names.begin(), names.end()), names.end());
    return names;
}

extern "C" {

void knapspec_set_kernels(bool enable) {
    if (auto set = (void (*)(bool)) cpu_function("knapspec_cpu_set_enabled")) {
        set(enable);
    }
}

bool knapspec_get_kernels(void) {
    auto get = (bool (*)(void)) cpu_function("knapspec_cpu_get_enabled");
    return get && get();
}

} // extern "C"
