// The switch of our CPU kernels (overlay/ggml-cpu), reached through the registry because the CPU backend may be a module.
#include "knapspec.h"

#include "ggml-backend.h"

namespace {

void * cpu_function(const char * name) {
    for (size_t i = 0; i < ggml_backend_reg_count(); i++) {
        if (void * function = ggml_backend_reg_get_proc_address(ggml_backend_reg_get(i), name)) {
            return function;
        }
    }
    return nullptr;
}

} // namespace

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
