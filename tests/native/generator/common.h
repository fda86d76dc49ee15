// Stand-in for llama.cpp's common/common.h, just large enough to compile tests/test-llama-archs.cpp for its
// `-o DIR` mode (saving tiny models). The backend tests in the same file compile but are not run with it.
#pragma once

#include "llama.h"
#include "llama-cpp.h"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

inline void common_init() {}

struct common_batch {
    explicit common_batch(llama_context *) {}

    void clear() {}
    int32_t add(llama_token, llama_pos, llama_seq_id, bool) { return 0; }

    llama_batch_ext * get() { throw std::runtime_error("this build of the generator only saves models"); }
};
