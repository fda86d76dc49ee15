// How blocks of weights lie in memory, for one register full of rows: each reader hands out the weights of a block as
// unsigned bytes, dword k of all rows in register k, with the scales of the rows. What the readers of one type hand out is
// equal whatever the layout.
#pragma once

#include "knapspec-simd.h"

#ifdef KNAPSPEC_SIMD

namespace knapspec {

// Prefetch the tile behind this one in slices as long as what is read meanwhile: rows are too many streams for the hardware.
struct next_tile {
    const uint8_t * p;

    template <int bytes> KNAPSPEC_INLINE void fetch() {
        KNAPSPEC_UNROLL for (int i = 0; i < (bytes + 63)/64; i++) {
            prefetch_far(p + 64*i);
        }
        p += bytes;
    }
};

KNAPSPEC_INLINE vint low_nibbles (vint v) { return bit_and(v, set_bytes(15)); }
KNAPSPEC_INLINE vint high_nibbles(vint v) { return bit_and(shift_right<4>(v), set_bytes(15)); }

// ---- blocks of 32 weights: w = d*(u - zero) (+ m)

// u is w + 128 where bytes can be multiplied without saturation, else w itself
constexpr int zero_q8_0 = wide_dot ? 128 : 0;

KNAPSPEC_INLINE void bias_q8_0(vint * v) {
    if (wide_dot) {
        KNAPSPEC_UNROLL for (int q = 0; q < 8; q++) {
            v[q] = bit_xor(v[q], set_bytes(0x80));
        }
    }
}

KNAPSPEC_INLINE void split_nibbles(vint * v) { // bytes of v[0..3] to v[0..7]
    KNAPSPEC_UNROLL for (int q = 0; q < 4; q++) {
        v[q + 4] = high_nibbles(v[q]);
        v[q]     = low_nibbles(v[q]);
    }
}

// `start` + the sums over a block of the rows with one column
template <class W> KNAPSPEC_INLINE vint dot_32(int start, const vint * v, const uint8_t * x, vfloat) {
    return dot_group<8, W::largest>(set_i(start), v, x);
}

template <int block_bytes> struct plain_block {
    using extra = vfloat;

    static constexpr int bytes = block_bytes;

    rows      at;
    next_tile next;

    KNAPSPEC_INLINE plain_block(const uint8_t * tile, size_t row_bytes) : at(tile, row_bytes), next{tile + n_lanes*row_bytes} {}

    KNAPSPEC_INLINE void begin() {
        at.pin();
        next.fetch<n_lanes*block_bytes>();
    }
};

struct plain_q8_0 : plain_block<34> {
    static constexpr int  zero = zero_q8_0, largest = 128;
    static constexpr bool has_min = false, is_signed = false;
    using plain_block::plain_block;

    KNAPSPEC_INLINE void read(vint * v, vfloat & d, vfloat &) {
        begin();
        at.bytes_16( 2, v);
        at.bytes_16(18, v + 4);
        bias_q8_0(v);
        d = at.half(0);
        at.advance(34);
    }
};

struct plain_q4_0 : plain_block<18> {
    static constexpr int  zero = 8, largest = 15;
    static constexpr bool has_min = false, is_signed = false;
    using plain_block::plain_block;

    KNAPSPEC_INLINE void read(vint * v, vfloat & d, vfloat &) {
        begin();
        at.bytes_16(2, v);
        split_nibbles(v);
        d = at.half(0);
        at.advance(18);
    }
};

struct plain_q4_1 : plain_block<20> {
    static constexpr int  zero = 0, largest = 15;
    static constexpr bool has_min = true, is_signed = false;
    using plain_block::plain_block;

    KNAPSPEC_INLINE void read(vint * v, vfloat & d, vfloat & m) {
        begin();
        at.bytes_16(4, v);
        split_nibbles(v);
        d = at.half(0);
        m = at.half(2);
        at.advance(20);
    }
};

// bit 4k + i of each lane of `bits` is the fifth bit of byte i of v[k]
KNAPSPEC_INLINE void add_fifth_bits(vint * v, vint bits) {
    alignas(16) static const uint8_t bytes[4][16] = {
        { 0, 0, 0, 0, 4, 4, 4, 4,  8,  8,  8,  8, 12, 12, 12, 12 },
        { 1, 1, 1, 1, 5, 5, 5, 5,  9,  9,  9,  9, 13, 13, 13, 13 },
        { 2, 2, 2, 2, 6, 6, 6, 6, 10, 10, 10, 10, 14, 14, 14, 14 },
        { 3, 3, 3, 3, 7, 7, 7, 7, 11, 11, 11, 11, 15, 15, 15, 15 },
    };
    KNAPSPEC_UNROLL for (int k = 0; k < 4; k++) {
        const vint b = shuffle_bytes(bits, repeat_16(bytes[k]));
        v[2*k]     = add_16_where(v[2*k],     b, set_i(0x08040201));
        v[2*k + 1] = add_16_where(v[2*k + 1], b, set_i((int) 0x80402010));
    }
}

struct plain_q5_0 : plain_block<22> {
    static constexpr int  zero = 16, largest = 31;
    static constexpr bool has_min = false, is_signed = false;
    using plain_block::plain_block;

    KNAPSPEC_INLINE void read(vint * v, vfloat & d, vfloat &) {
        begin();
        vint bits[4];
        at.bytes_16(2, bits); // only the first four bytes are these
        at.bytes_16(6, v);
        split_nibbles(v);
        add_fifth_bits(v, bits[0]);
        d = at.half(0);
        at.advance(22);
    }
};

struct plain_q5_1 : plain_block<24> {
    static constexpr int  zero = 0, largest = 31;
    static constexpr bool has_min = true, is_signed = false;
    using plain_block::plain_block;

    KNAPSPEC_INLINE void read(vint * v, vfloat & d, vfloat & m) {
        begin();
        vint bits[4];
        at.bytes_16(4, bits);
        at.bytes_16(8, v);
        split_nibbles(v);
        add_fifth_bits(v, bits[0]);
        d = at.half(0);
        m = at.half(2);
        at.advance(24);
    }
};

// nibbles, which stand for 16 uneven steps, to weights
KNAPSPEC_INLINE void steps_iq4_nl(vint * v) {
    alignas(16) static const int8_t steps[16] = {
        -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
    };
    KNAPSPEC_UNROLL for (int q = 0; q < 8; q++) {
        v[q] = shuffle_bytes(repeat_16(steps), v[q]);
    }
    bias_q8_0(v);
}

struct plain_iq4_nl : plain_block<18> {
    static constexpr int  zero = zero_q8_0, largest = 128;
    static constexpr bool has_min = false, is_signed = false;
    using plain_block::plain_block;

    KNAPSPEC_INLINE void read(vint * v, vfloat & d, vfloat &) {
        begin();
        at.bytes_16(2, v);
        split_nibbles(v);
        steps_iq4_nl(v);
        d = at.half(0);
        at.advance(18);
    }
};

// ---- super-blocks of 256 weights: w = d*scale[group]*(u - zero) - dmin*min[group]

KNAPSPEC_INLINE vint byte_of(vint v, int i) { // byte i of each lane; i is a constant after unrolling
    switch (i) {
        case 0:  return bit_and(v, set_i(255));
        case 1:  return bit_and(shift_right< 8>(v), set_i(255));
        case 2:  return bit_and(shift_right<16>(v), set_i(255));
        default: return shift_right<24>(v);
    }
}

// bytes 0 and 1, or 2 and 3, of each lane as two 16-bit values
KNAPSPEC_INLINE vint low_pair (vint v) { return bit_or(bit_and(v, set_i(255)), bit_and(shift_left<8>(v), set_i(0x00ff0000))); }
KNAPSPEC_INLINE vint high_pair(vint v) { return low_pair(shift_right<16>(v)); }

// scales and minima of Q4_K and Q5_K from the first 16 bytes of a super-block
struct k_header {
    vfloat d, dmin;
    vint   scales[2]; // byte g%4 of [g/4]: scale of group g
    vint   mins[4];   // 16-bit minima of groups 2i, 2i+1

    KNAPSPEC_INLINE void read(const vint * h) {
        const vint six = set_bytes(0x3f), top = set_bytes(0x30);
        d    = half_to_float(h[0]);
        dmin = half_to_float(shift_right<16>(h[0]));
        scales[0] = bit_and(h[1], six);
        scales[1] = bit_or(low_nibbles(h[3]), bit_and(shift_right<2>(h[1]), top));
        const vint m0 = bit_and(h[2], six);
        const vint m1 = bit_or(high_nibbles(h[3]), bit_and(shift_right<2>(h[2]), top));
        mins[0] = low_pair(m0);
        mins[1] = high_pair(m0);
        mins[2] = low_pair(m1);
        mins[3] = high_pair(m1);
    }
};

struct plain_q4_k : plain_block<144> {
    static constexpr int  n_chunks = 4, group = 32, largest = 15;
    static constexpr bool has_min = true;
    using plain_block::plain_block;

    k_header header;

    KNAPSPEC_INLINE void begin_super(vfloat & d, vfloat & dmin, vint * mins) {
        vint h[4];
        at.pin();
        at.bytes_16(0, h);
        header.read(h);
        d    = header.d;
        dmin = header.dmin;
        KNAPSPEC_UNROLL for (int i = 0; i < 4; i++) {
            mins[i] = header.mins[i];
        }
        at.advance(16);
    }

    template <class F> KNAPSPEC_INLINE void chunk(int k, F && use) {
        at.pin();
        next.fetch<n_lanes*36>();
        vint v[8], u[8];
        at.bytes_16( 0, v);
        at.bytes_16(16, v + 4);
        at.advance(32);
        vint s = k < 2 ? header.scales[0] : header.scales[1];
        if (k & 1) {
            s = shift_right<16>(s);
        }
        KNAPSPEC_UNROLL for (int q = 0; q < 8; q++) {
            u[q] = low_nibbles(v[q]);
        }
        use(2*k, u, to_float(byte_of(s, 0)));
        KNAPSPEC_UNROLL for (int q = 0; q < 8; q++) {
            u[q] = high_nibbles(v[q]);
        }
        use(2*k + 1, u, to_float(byte_of(s, 1)));
    }

    KNAPSPEC_INLINE void end_super() {}
};

struct plain_q5_k : plain_block<176> {
    static constexpr int  n_chunks = 4, group = 32, largest = 31;
    static constexpr bool has_min = true;
    using plain_block::plain_block;

    k_header header;
    vint     bits[8]; // from bit 0 of each byte on: the fifth bits of the groups that are still to come

    KNAPSPEC_INLINE void begin_super(vfloat & d, vfloat & dmin, vint * mins) {
        vint h[4];
        at.pin();
        at.bytes_16(0, h);
        header.read(h);
        d    = header.d;
        dmin = header.dmin;
        KNAPSPEC_UNROLL for (int i = 0; i < 4; i++) {
            mins[i] = header.mins[i];
        }
        at.bytes_16(16, bits);
        at.bytes_16(32, bits + 4);
        at.advance(48);
    }

    template <class F> KNAPSPEC_INLINE void chunk(int k, F && use) {
        at.pin();
        next.fetch<n_lanes*44>();
        vint v[8], u[8];
        at.bytes_16( 0, v);
        at.bytes_16(16, v + 4);
        at.advance(32);
        const vint fifth = set_bytes(16);
        vint s = k < 2 ? header.scales[0] : header.scales[1];
        if (k & 1) {
            s = shift_right<16>(s);
        }
        KNAPSPEC_UNROLL for (int q = 0; q < 8; q++) {
            u[q] = bit_or(low_nibbles(v[q]), bit_and(shift_left<4>(bits[q]), fifth));
        }
        use(2*k, u, to_float(byte_of(s, 0)));
        KNAPSPEC_UNROLL for (int q = 0; q < 8; q++) {
            u[q] = bit_or(high_nibbles(v[q]), bit_and(shift_left<3>(bits[q]), fifth));
            bits[q] = shift_right<2>(bits[q]);
        }
        use(2*k + 1, u, to_float(byte_of(s, 1)));
    }

    KNAPSPEC_INLINE void end_super() {}
};

// 16-bit pairs (a, b) of signed bytes, one of each per row
KNAPSPEC_INLINE vint pairs_i16(vint a, vint b) { return bit_or(bit_and(a, set_i(0xffff)), shift_left<16>(b)); }

struct plain_q6_k : plain_block<210> {
    static constexpr int  n_chunks = 4, group = 16, zero = 32, largest = 63;
    static constexpr bool has_min = false;
    using plain_block::plain_block;

    vint scales[4]; // signed byte g%4 of [g/4]

    // signed byte i of each lane
    static KNAPSPEC_INLINE vint scale_of(vint v, int i) {
        switch (i) {
            case 0:  return shift_right_signed<24>(shift_left<24>(v));
            case 1:  return shift_right_signed<24>(shift_left<16>(v));
            case 2:  return shift_right_signed<24>(shift_left< 8>(v));
            default: return shift_right_signed<24>(v);
        }
    }

    KNAPSPEC_INLINE void begin_super(vfloat & d, vfloat &, vint * pairs) {
        at.pin();
        at.bytes_16(192, scales);
        d = at.half(208);
        KNAPSPEC_UNROLL for (int i = 0; i < 8; i++) {
            const vint s = scales[i/2];
            pairs[i] = pairs_i16(scale_of(s, 2*(i%2)), scale_of(s, 2*(i%2) + 1));
        }
    }

    // 16 bytes of each quarter of a half super-block
    template <class F> KNAPSPEC_INLINE void chunk(int k, F && use) {
        const int half = k/2, part = k%2;
        at.pin();
        next.fetch<(n_lanes*210 + 3)/4>();
        vint a[4], b[4], h[4], u[4];
        at.bytes_16(64*half + 16*part,       a);
        at.bytes_16(64*half + 16*part + 32,  b);
        at.bytes_16(128 + 32*half + 16*part, h);
        const vint two = set_bytes(0x30);
        const int g = 8*half + part;
        const vint s0 = half ? scales[2] : scales[0], s1 = half ? scales[3] : scales[1];
        KNAPSPEC_UNROLL for (int q = 0; q < 4; q++) {
            u[q] = bit_or(low_nibbles(a[q]), bit_and(shift_left<4>(h[q]), two));
        }
        use(g, u, to_float(part ? scale_of(s0, 1) : scale_of(s0, 0)));
        KNAPSPEC_UNROLL for (int q = 0; q < 4; q++) {
            u[q] = bit_or(low_nibbles(b[q]), bit_and(shift_left<2>(h[q]), two));
        }
        use(g + 2, u, to_float(part ? scale_of(s0, 3) : scale_of(s0, 2)));
        KNAPSPEC_UNROLL for (int q = 0; q < 4; q++) {
            u[q] = bit_or(high_nibbles(a[q]), bit_and(h[q], two));
        }
        use(g + 4, u, to_float(part ? scale_of(s1, 1) : scale_of(s1, 0)));
        KNAPSPEC_UNROLL for (int q = 0; q < 4; q++) {
            u[q] = bit_or(high_nibbles(b[q]), bit_and(shift_right<2>(h[q]), two));
        }
        use(g + 6, u, to_float(part ? scale_of(s1, 3) : scale_of(s1, 2)));
    }

    KNAPSPEC_INLINE void end_super() { at.advance(210); }
};

// ---- the layouts of ggml's AMX buffer type: tiles of 16 rows, dword k of all rows side by side

#if KNAPSPEC_SIMD == 512

// nibbles of two dwords in each byte
KNAPSPEC_INLINE void load_nibbles(const uint8_t * p, vint * v, int n) {
    KNAPSPEC_UNROLL for (int i = 0; i < n; i += 2) {
        const vint b = load_i(p + 32*i);
        v[i]     = low_nibbles(b);
        v[i + 1] = high_nibbles(b);
    }
}

template <int n> struct amx_tile {
    using extra = vfloat;

    static constexpr int bytes = n; // of one block

    const uint8_t * p;
    bool            ahead; // whether to prefetch

    KNAPSPEC_INLINE amx_tile(const uint8_t * tile, size_t, bool ahead = true) : p(tile), ahead(ahead) {}

    KNAPSPEC_INLINE void prefetch() const {
        if (!ahead) {
            return;
        }
        KNAPSPEC_UNROLL for (int i = 0; i < (n + 63)/64; i++) {
            prefetch_far(p + 4096 + 64*i);
        }
    }
};

// Signed bytes, to be multiplied with x + 128 as unsigned ones; behind the scales 128 times the sum of each row.
struct amx_q8_0 : amx_tile<608> {
    static constexpr int  zero = 0, largest = 128;
    static constexpr bool has_min = false, is_signed = true;
    using extra = vint;
    using amx_tile::amx_tile;

    KNAPSPEC_INLINE void read(vint * v, vfloat & d, vint & excess) {
        prefetch();
        KNAPSPEC_UNROLL for (int q = 0; q < 8; q++) {
            v[q] = load_i(p + 64*q);
        }
        d      = load_half(p + 512);
        excess = load_i(p + 544);
        p += 608;
    }
};

template <class W> KNAPSPEC_INLINE vint dot_32(int, const vint * v, const uint8_t * x, vint excess) {
    vint s = set_i(0);
    KNAPSPEC_UNROLL for (int q = 0; q < 8; q++) {
        s = _mm512_dpbusd_epi32(s, set_i(load_i32(x + 4*q)), v[q]);
    }
    return _mm512_sub_epi32(s, excess);
}

struct amx_q4_0 : amx_tile<288> {
    static constexpr int  zero = 8, largest = 15;
    static constexpr bool has_min = false, is_signed = false;
    using amx_tile::amx_tile;

    KNAPSPEC_INLINE void read(vint * v, vfloat & d, vfloat &) {
        prefetch();
        load_nibbles(p, v, 8);
        d = load_half(p + 256);
        p += 288;
    }
};

struct amx_q4_1 : amx_tile<320> {
    static constexpr int  zero = 0, largest = 15;
    static constexpr bool has_min = true, is_signed = false;
    using amx_tile::amx_tile;

    KNAPSPEC_INLINE void read(vint * v, vfloat & d, vfloat & m) {
        prefetch();
        load_nibbles(p, v, 8);
        d = load_half(p + 256);
        m = load_half(p + 288);
        p += 320;
    }
};

struct amx_q4_k {
    static constexpr int  bytes = 2368;
    static constexpr int  n_chunks = 8, group = 32, largest = 15;
    static constexpr bool has_min = true;

    const uint8_t * p;

    KNAPSPEC_INLINE amx_q4_k(const uint8_t * tile, size_t) : p(tile) {}

    KNAPSPEC_INLINE void begin_super(vfloat & d, vfloat & dmin, vint * mins) {
        KNAPSPEC_UNROLL for (int i = 0; i < 4; i++) {
            mins[i] = widen_pairs_u8(p + 2048 + 128 + 32*i);
        }
        d    = load_half(p + 2304);
        dmin = load_half(p + 2336);
    }

    template <class F> KNAPSPEC_INLINE void chunk(int k, F && use) {
        KNAPSPEC_UNROLL for (int i = 0; i < 5; i++) {
            prefetch_far (p + 8192 + 296*k + 64*i);
            prefetch_near(p + 1536 + 296*k + 64*i);
        }
        vint u[8];
        load_nibbles(p + 256*k, u, 8);
        use(k, u, to_float(widen_u8(p + 2048 + 16*k)));
    }

    KNAPSPEC_INLINE void end_super() { p += 2368; }
};

struct amx_q5_k {
    static constexpr int  bytes = 2880;
    static constexpr int  n_chunks = 8, group = 32, largest = 31;
    static constexpr bool has_min = true;

    const uint8_t * p;

    KNAPSPEC_INLINE amx_q5_k(const uint8_t * tile, size_t) : p(tile) {}

    KNAPSPEC_INLINE void begin_super(vfloat & d, vfloat & dmin, vint * mins) {
        KNAPSPEC_UNROLL for (int i = 0; i < 4; i++) {
            mins[i] = widen_pairs_u8(p + 2560 + 128 + 32*i);
        }
        d    = load_half(p + 2816);
        dmin = load_half(p + 2848);
    }

    template <class F> KNAPSPEC_INLINE void chunk(int k, F && use) {
        KNAPSPEC_UNROLL for (int i = 0; i < 6; i++) {
            prefetch_far (p + 8192 + 360*k + 64*i);
            prefetch_near(p + 1536 + 360*k + 64*i);
        }
        const vint h = load_i(p + 2048 + 64*k), fifth = set_bytes(16);
        vint u[8];
        load_nibbles(p + 256*k, u, 8);
        u[0] = bit_or(u[0], bit_and(shift_left <4>(h), fifth)); // bit q of each byte is that of dword q
        u[1] = bit_or(u[1], bit_and(shift_left <3>(h), fifth));
        u[2] = bit_or(u[2], bit_and(shift_left <2>(h), fifth));
        u[3] = bit_or(u[3], bit_and(shift_left <1>(h), fifth));
        u[4] = bit_or(u[4], bit_and(h,                 fifth));
        u[5] = bit_or(u[5], bit_and(shift_right<1>(h), fifth));
        u[6] = bit_or(u[6], bit_and(shift_right<2>(h), fifth));
        u[7] = bit_or(u[7], bit_and(shift_right<3>(h), fifth));
        use(k, u, to_float(widen_u8(p + 2560 + 16*k)));
    }

    KNAPSPEC_INLINE void end_super() { p += bytes; }
};

struct amx_q6_k {
    static constexpr int  bytes = 3360;
    static constexpr int  n_chunks = 16, group = 16, zero = 32, largest = 63;
    static constexpr bool has_min = false;

    const uint8_t * p;

    KNAPSPEC_INLINE amx_q6_k(const uint8_t * tile, size_t) : p(tile) {}

    KNAPSPEC_INLINE void begin_super(vfloat & d, vfloat &, vint * pairs) {
        KNAPSPEC_UNROLL for (int i = 0; i < 8; i++) {
            pairs[i] = pairs_i16(widen_i8(p + 3072 + 32*i), widen_i8(p + 3072 + 32*i + 16));
        }
        d = load_half(p + 3328);
    }

    template <class F> KNAPSPEC_INLINE void chunk(int k, F && use) {
        KNAPSPEC_UNROLL for (int i = 0; i < 4; i++) {
            prefetch_far (p + 8192 + 210*k + 64*i);
            prefetch_near(p + 1536 + 210*k + 64*i);
        }
        const vint two = set_bytes(0x30), h = load_i(p + 2048 + 64*k);
        vint u[4];
        load_nibbles(p + 128*k, u, 4);
        u[0] = bit_or(u[0], bit_and(shift_left <4>(h), two));
        u[1] = bit_or(u[1], bit_and(shift_left <2>(h), two));
        u[2] = bit_or(u[2], bit_and(h,                 two));
        u[3] = bit_or(u[3], bit_and(shift_right<2>(h), two));
        use(k, u, to_float(widen_i8(p + 3072 + 16*k)));
    }

    KNAPSPEC_INLINE void end_super() { p += 3360; }
};

#endif // 512

} // namespace knapspec

#if KNAPSPEC_SIMD == 128
#include "knapspec-weights-neon.h"
#endif

#endif // KNAPSPEC_SIMD
