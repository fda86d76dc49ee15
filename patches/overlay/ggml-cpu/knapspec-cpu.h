// Kernels of ours inside ggml's CPU backend. Where the build has variants of the backend, each compiles a copy of its own
// with its own flags, so instruction sets are chosen at compile time.
#pragma once

#include "ggml.h"
#include "ggml-cpu-impl.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// Called by every thread for every node. False: nothing was done, upstream's code takes the node. All threads of a node
// have to come to the same answer, so it may only depend on the tensors and on the switch.
bool knapspec_cpu_compute_forward(const struct ggml_compute_params * params, struct ggml_tensor * op);

// Bytes of the shared work buffer that a node needs here; 0 for nodes that upstream computes. The switch has no say, as a
// graph planned with it off may be computed with it on.
size_t knapspec_cpu_work_size(int n_threads, const struct ggml_tensor * op);

// Whether a weight is to stay as it is in the file although upstream would pack it, because our kernels are faster on that.
// The switch has no say but for its initial state: a weight's layout is decided once.
bool knapspec_cpu_keeps_plain(const struct ggml_tensor * weight);

// What ggml_backend_reg_get_proc_address finds, also in a variant that was loaded at run time:
//   void knapspec_cpu_set_enabled(bool)    not while a graph is being computed
//   bool knapspec_cpu_get_enabled(void)
//   bool knapspec_cpu_covers(const struct ggml_tensor * weight)    see covers_weight in knapspec-matmul.h
void * knapspec_cpu_proc_address(const char * name);

#ifdef __cplusplus
}
#endif
