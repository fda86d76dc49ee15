// Stand-in for llama.cpp's common/log.h: messages up to the verbosity threshold go to standard error.
#pragma once

#include "ggml.h"

#include <cstdio>

#define LOG_LEVEL_DEBUG  5
#define LOG_LEVEL_TRACE  4
#define LOG_LEVEL_INFO   3
#define LOG_LEVEL_WARN   2
#define LOG_LEVEL_ERROR  1
#define LOG_LEVEL_OUTPUT 0

struct common_log;

inline void         common_log_set_verbosity_thold(int) {}
inline common_log * common_log_main() { return nullptr; }
inline void         common_log_flush(common_log *) {}

inline int common_log_get_verbosity(enum ggml_log_level level) {
    switch (level) {
        case GGML_LOG_LEVEL_ERROR: return LOG_LEVEL_ERROR;
        case GGML_LOG_LEVEL_WARN:  return LOG_LEVEL_WARN;
        case GGML_LOG_LEVEL_INFO:  return LOG_LEVEL_INFO;
        default:                   return LOG_LEVEL_DEBUG;
    }
}

#define LOG(...)     std::fprintf(stderr, __VA_ARGS__)
#define LOG_ERR(...) std::fprintf(stderr, __VA_ARGS__)
#define LOG_WRN(...) std::fprintf(stderr, __VA_ARGS__)
#define LOG_INF(...) do { } while (0)
#define LOG_DBG(...) do { } while (0)
