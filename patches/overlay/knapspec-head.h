// The short head of a context: some rows of the output projection in a tensor of their own, and which token each row is.
#pragma once

#include "knapspec.h"
#include "knapspec-sampling.h"

#include "ggml.h"
#include "ggml-cpp.h"

#include <cstdint>
#include <memory>
#include <vector>

struct llama_file;
struct llama_model;

class knapspec_head {
public:
    // `weight`: what the logits are a product with
    knapspec_head(const llama_model & model, const ggml_tensor * weight);

    const ggml_tensor * weight() const { return full; }

    // Room for n rows, all unused; 0 frees what there is. `path`: the model's file, for weights that cannot be read back.
    // Returns a code of knapspec_status; errors are in the log.
    int32_t reserve(int32_t n, const char * path);

    // Rows places[i] become those of tokens[i]. All or nothing, but for KNAPSPEC_UNREADABLE: then nothing is known of any row.
    int32_t set(const int32_t * places, const llama_token * tokens, int32_t n);

    ~knapspec_head();

    int32_t capacity() const { return (int32_t) tokens.size(); }

    // how many rows, from the first on, are set
    int32_t n_set() const { return n_filled; }

    // The first n rows as a weight within a graph.
    ggml_tensor * rows(ggml_context * graph, int32_t n) const;

    knapspec_row row(float * logits, int32_t n) const {
        return { logits, (int32_t) places.size(), n, tokens.data(), places.data() };
    }

private:
    const llama_model & model;
    const ggml_tensor * full;

    std::vector<llama_token> tokens; // by place; -1: not set
    std::vector<int32_t>     places; // by token; -1: none
    int32_t                  n_filled = 0;

    const ggml_tensor *         readable = nullptr; // where rows are read from; nullptr: from a file
    std::unique_ptr<llama_file> file;
    size_t                      file_offset = 0;    // of the first row
    ggml_context_ptr        own;
    ggml_backend_buffer_ptr buffer;
    ggml_tensor *           tensor = nullptr;
    std::vector<uint8_t>    scratch;

    bool open(const char * path);
    const uint8_t * row_bytes(llama_token token);
};
