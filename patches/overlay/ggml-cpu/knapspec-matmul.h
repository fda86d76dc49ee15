// Products of a weight matrix, above all with few columns: every weight is read once for all columns, and a row's result does not
// depend on how many columns there are, bit for bit.
#pragma once

#include "ggml-cpu-impl.h"
#include "ggml.h"

namespace knapspec {

// columns that every covered weight is computed with here: as many tokens as are verified at once
constexpr int max_columns = 16;

// Whether products of this weight with 1 to max_columns columns of F32 are computed here: its type, its layout (plain rows,
// or packed by one of ggml's buffer types) and its shape.
bool covers_weight(const ggml_tensor * weight);

// Whether the products of this weight are faster on plain rows than upstream's on rows that it has packed itself.
bool prefers_plain_rows(const ggml_tensor * weight);

size_t mul_mat_work_size(const ggml_tensor * op);

// False if this product is upstream's. Called by all threads of a node.
bool mul_mat(const ggml_compute_params * params, ggml_tensor * op);

} // namespace knapspec
