#include "knapspec-head.h"

#include "llama-impl.h"
#include "llama-mmap.h"
#include "llama-model.h"

#include "ggml-backend.h"
#include "gguf.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>

namespace {

bool is_cpu(const ggml_tensor * t) {
    const ggml_backend_dev_t device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(t->buffer));
    return ggml_backend_buffer_is_host(t->buffer) || !device || ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

// Whether its bytes are those of the file: rows that the CPU backend has packed, or that are spread over devices, are not.
bool is_readable(const ggml_tensor * t) {
    if (!t->buffer) {
        return false;
    }
    return ggml_backend_buffer_is_host(t->buffer) || (!is_cpu(t) && !strstr(ggml_backend_buffer_name(t->buffer), "Split"));
}

} // namespace

knapspec_head::knapspec_head(const llama_model & model, const ggml_tensor * weight) : model(model), full(weight) {
    const ggml_tensor * embedding = model.tok_embd;
    if (is_readable(full)) {
        readable = full;
    } else if (embedding && is_readable(embedding) && strcmp(embedding->name, full->name) == 0 && embedding->type == full->type) {
        readable = embedding; // tied: the same tensor of the file, loaded twice
    }
}

knapspec_head::~knapspec_head() = default;

// Find the weight in the model's file, or in one of those that it is split into.
bool knapspec_head::open(const char * path) {
    std::string name = path ? path : "";
    for (int i = 0, count = 1; i < count; ++i) {
        if (i > 0) {
            char prefix[4096], part[4096];
            if (llama_split_prefix(prefix, sizeof(prefix), path, 0, count) <= 0 || llama_split_path(part, sizeof(part), prefix, i, count) <= 0) {
                return false;
            }
            name = part;
        }
        const gguf_context_ptr header(gguf_init_from_file(name.c_str(), { true, nullptr }));
        if (!header) {
            return false;
        }
        if (const int64_t key = gguf_find_key(header.get(), "split.count"); i == 0 && key >= 0 && gguf_get_kv_type(header.get(), key) == GGUF_TYPE_UINT16) {
            count = std::max<int>(1, gguf_get_val_u16(header.get(), key));
        }
        const int64_t at = gguf_find_tensor(header.get(), full->name);
        if (at < 0) {
            continue;
        }
        if (gguf_get_tensor_type(header.get(), at) != full->type || gguf_get_tensor_size(header.get(), at) != ggml_nbytes(full)) {
            return false;
        }
        file_offset = gguf_get_data_offset(header.get()) + gguf_get_tensor_offset(header.get(), at);
        try {
            file = std::make_unique<llama_file>(name.c_str(), "rb");
        } catch (const std::exception &) {
            return false;
        }
        return file->size() >= file_offset + ggml_nbytes(full);
    }
    return false;
}

int32_t knapspec_head::reserve(int32_t n, const char * path) {
    const int64_t n_vocab = full->ne[1];
    if (n < 0 || n > n_vocab) {
        LLAMA_LOG_ERROR("%s: a head of %d rows cannot be made of one of %lld\n", __func__, n, (long long) n_vocab);
        return KNAPSPEC_BAD_ARGUMENT;
    }
    if (n > 0 && !readable && !file && !open(path)) {
        file.reset();
        LLAMA_LOG_ERROR("%s: the rows of %s can be read neither from memory nor from %s\n", __func__, full->name, path ? path : "a file");
        return KNAPSPEC_UNREADABLE;
    }
    tensor = nullptr;
    buffer.reset();
    own.reset();
    tokens.assign(n, -1);
    places.assign(n > 0 ? n_vocab : 0, -1);
    n_filled = 0;
    if (n == 0) {
        return KNAPSPEC_OK;
    }
    own.reset(ggml_init({ ggml_tensor_overhead(), nullptr, true }));
    ggml_tensor * made = ggml_new_tensor_2d(own.get(), full->type, full->ne[0], n);
    ggml_set_name(made, "knapspec_head");
    ggml_backend_buffer_type_t where = ggml_backend_buffer_get_type(full->buffer);
    if (is_cpu(full)) {
        where = ggml_backend_dev_buffer_type(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
    }
    buffer.reset(ggml_backend_buft_alloc_buffer(where, ggml_backend_buft_get_alloc_size(where, made)));
    if (!buffer || ggml_backend_tensor_alloc(buffer.get(), made, ggml_backend_buffer_get_base(buffer.get())) != GGML_STATUS_SUCCESS) {
        LLAMA_LOG_ERROR("%s: no memory for a head of %d rows\n", __func__, n);
        reserve(0, nullptr);
        return KNAPSPEC_BAD_ARGUMENT;
    }
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    tensor = made;
    return KNAPSPEC_OK;
}

const uint8_t * knapspec_head::row_bytes(llama_token token) {
    const size_t size = ggml_row_size(full->type, full->ne[0]);
    if (file) {
        scratch.resize(size);
        file->seek(file_offset + token*size, SEEK_SET);
        file->read_raw(scratch.data(), size);
        return scratch.data();
    }
    if (ggml_backend_buffer_is_host(readable->buffer)) {
        return (const uint8_t *) readable->data + token*readable->nb[1];
    }
    scratch.resize(size);
    ggml_backend_tensor_get(readable, scratch.data(), token*readable->nb[1], size);
    return scratch.data();
}

int32_t knapspec_head::set(const int32_t * at, const llama_token * given, int32_t n) {
    bool valid = tensor && n >= 0;
    for (int32_t i = 0; valid && i < n; ++i) {
        valid = at[i] >= 0 && at[i] < capacity() && given[i] >= 0 && given[i] < (llama_token) places.size();
    }
    if (!valid) {
        LLAMA_LOG_ERROR("%s: rows or tokens are outside of a head of %d rows\n", __func__, capacity());
        return KNAPSPEC_BAD_ARGUMENT;
    }
    std::vector<llama_token> before(n);
    for (int32_t i = 0; i < n; ++i) {
        before[i] = tokens[at[i]];
        if (before[i] >= 0) {
            places[before[i]] = -1;
        }
        tokens[at[i]] = -1;
    }
    int32_t done = 0;
    while (done < n && places[given[done]] < 0 && tokens[at[done]] < 0) {
        tokens[at[done]]    = given[done];
        places[given[done]] = at[done];
        done++;
    }
    if (done < n) {
        const int32_t wrong = done;
        while (done-- > 0) {
            places[given[done]] = -1;
            tokens[at[done]]    = -1;
        }
        for (int32_t i = n - 1; i >= 0; --i) { // of a place named twice, the first time tells what was there
            if (before[i] >= 0) {
                tokens[at[i]]     = before[i];
                places[before[i]] = at[i];
            }
        }
        LLAMA_LOG_ERROR("%s: token %d or row %d would be there twice\n", __func__, given[wrong], at[wrong]);
        return KNAPSPEC_BAD_ARGUMENT;
    }
    const size_t size = ggml_row_size(full->type, full->ne[0]);
    const bool   host = ggml_backend_buffer_is_host(buffer.get());
    try {
        for (int32_t i = 0; i < n; ++i) {
            const uint8_t * bytes = row_bytes(given[i]);
            if (host) {
                memcpy((uint8_t *) tensor->data + at[i]*tensor->nb[1], bytes, size);
            } else {
                ggml_backend_tensor_set(tensor, bytes, at[i]*tensor->nb[1], size);
            }
        }
    } catch (const std::exception & error) {
        // what stands in the rows is no longer known
        LLAMA_LOG_ERROR("%s: %s\n", __func__, error.what());
        return KNAPSPEC_UNREADABLE;
    }
    while (n_filled < capacity() && tokens[n_filled] >= 0) {
        n_filled++;
    }
    return KNAPSPEC_OK;
}

ggml_tensor * knapspec_head::rows(ggml_context * graph, int32_t n) const {
    // no view: kernels take only whole weights for weights
    ggml_tensor * part = ggml_new_tensor_2d(graph, tensor->type, tensor->ne[0], n);
    ggml_set_name(part, tensor->name);
    part->buffer = tensor->buffer;
    part->data   = tensor->data;
    part->extra  = tensor->extra;
    return part;
}
