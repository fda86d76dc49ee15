// What the checks of kernels without Python share.
#pragma once

#include "ggml.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

inline std::mt19937 generator(1);

inline std::vector<float> normal(size_t n) {
    std::normal_distribution<float> distribution;
    std::vector<float> x(n);
    for (float & value : x) {
        value = distribution(generator);
    }
    return x;
}

// Computes `out` and frees its context. The work buffer has its exact size, so that a sanitizer sees what goes beyond.
inline void compute(ggml_context * ctx, ggml_tensor * out, int threads) {
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    ggml_cplan plan = ggml_graph_plan(graph, threads, nullptr);
    std::vector<uint8_t> work(plan.work_size);
    plan.work_data = work.data();
    ggml_graph_compute(graph, &plan);
    ggml_free(ctx);
}

struct Backend {
    ggml_backend_reg_t reg = ggml_backend_cpu_reg();

    template <class F> F * find(const char * name) const { return (F *) ggml_backend_reg_get_proc_address(reg, name); }

    void (*set_enabled)(bool)            = find<void(bool)>("knapspec_cpu_set_enabled");
    bool (*covers)(const ggml_tensor *)  = find<bool(const ggml_tensor *)>("knapspec_cpu_covers");

    // says whose kernels are checked: the library's, or those linked into the program in their place
    Backend() {
        setvbuf(stdout, nullptr, _IOLBF, 1 << 12); // nothing is lost where a sanitizer ends the program
        Dl_info info;
        printf("kernels of %s\n", dladdr((void *) covers, &info) ? info.dli_fname : "?");
        ggml_cpu_init();
        set_enabled(true);
    }
};

// the argument of a check: no result may come from our kernels
inline bool expects_upstream(int argc, char ** argv) { return argc > 1 && strcmp(argv[1], "upstream") == 0; }
