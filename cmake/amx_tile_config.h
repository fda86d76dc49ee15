// Included before amx/mmq.cpp of ggml where GCC compiles it (cmake/libraries.cmake).
//
// GCC 12 describes the operand of ldtilecfg as one pointer, 8 of its 64 bytes, and then drops as dead
// the stores that fill the rest. Every tile is left with no rows, and the first product on AMX ends the
// process with an illegal instruction. Here the instruction reads what it reads.
#if defined(__AMX_TILE__)
#include <immintrin.h>
#undef _tile_loadconfig
#define _tile_loadconfig(config) \
    __asm__ volatile("ldtilecfg\t%X0" : : "m"(*(const char(*)[64])(config)))
#endif
