// Flash attention, made for few query rows: what verification of a draft and one-token decoding compute.
//
// The keys are cut into chunks at fixed cells of the cache, each chunk into tiles. A tile of keys and values is read once
// for all query heads that share it and for all tokens of the batch. A row's sums run over d, over the keys of a tile, over
// the tiles of a chunk and over the chunks in one fixed order, in F32, and leave out what the row's mask hides. So a row
// has the same bits whatever stands beside it in the batch, however far the cache is padded, and for any number of threads.
#pragma once

#include "ggml-cpu-impl.h"

namespace knapspec {

// Null: attention computes this GGML_OP_FLASH_ATTN_EXT. Otherwise why upstream's code has to, in a few words.
const char * attention_declines(const ggml_tensor * op);

// Bytes of the shared work buffer; 0 for an operation that is declined.
size_t attention_work_size(int n_threads, const ggml_tensor * op);

// Called by every thread. False: declined, nothing was done.
bool attention(const ggml_compute_params * params, ggml_tensor * op);

} // namespace knapspec
