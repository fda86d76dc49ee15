// Readers of the rows that ggml's CPU_REPACK buffer type packs on ARM: of four rows (blocks of 32) or eight (super-blocks)
// `unit` bytes lie side by side, 4 for dot products and 8 for i8mm. Included by knapspec-weights.h.
#pragma once

namespace knapspec {

// dword k of 16 bytes of four rows to out[k]; a group of `group` rows
template <int group, int unit> KNAPSPEC_INLINE void packed_16(const uint8_t * p, vint * out) {
    if constexpr (unit == 4) {
        KNAPSPEC_UNROLL for (int k = 0; k < 4; k++) {
            out[k] = load_i(p + 4*group*k);
        }
    } else {
        KNAPSPEC_UNROLL for (int k = 0; k < 4; k += 2) {
            const vint a = load_i(p + 4*group*k), b = load_i(p + 4*group*k + 16);
            out[k]     = vuzp1q_s32(a, b);
            out[k + 1] = vuzp2q_s32(a, b);
        }
    }
}

template <int block_bytes> struct packed_block {
    using extra = vfloat;

    static constexpr int  bytes = n_lanes*block_bytes;
    static constexpr bool has_min = false, is_signed = false;

    const uint8_t * p;

    KNAPSPEC_INLINE packed_block(const uint8_t * tile, size_t, bool = true) : p(tile) {}
};

template <int unit> struct packed_q8_0 : packed_block<34> {
    static constexpr int zero = 0, largest = 128;
    using packed_block::packed_block;

    KNAPSPEC_INLINE void read(vint * v, vfloat & d, vfloat &) {
        packed_16<4, unit>(p +  8, v);
        packed_16<4, unit>(p + 72, v + 4);
        d = load_half(p);
        p += bytes;
    }
};

template <int unit> struct packed_q4_0 : packed_block<18> {
    static constexpr int zero = 8, largest = 15;
    using packed_block::packed_block;

    KNAPSPEC_INLINE void read(vint * v, vfloat & d, vfloat &) {
        packed_16<4, unit>(p + 8, v);
        KNAPSPEC_UNROLL for (int q = 0; q < 4; q++) {
            v[q] = bit_xor(v[q], set_bytes(0x88)); // packed as signed nibbles
        }
        split_nibbles(v);
        d = load_half(p);
        p += bytes;
    }
};

template <int unit> struct packed_iq4_nl : packed_block<18> {
    static constexpr int zero = zero_q8_0, largest = 128;
    using packed_block::packed_block;

    KNAPSPEC_INLINE void read(vint * v, vfloat & d, vfloat &) {
        packed_16<4, unit>(p + 8, v);
        split_nibbles(v);
        steps_iq4_nl(v);
        d = load_half(p);
        p += bytes;
    }
};

// A super-block of eight rows; `half` says which four of them.
template <int unit, int block_bytes> struct packed_super {
    static constexpr int bytes = n_lanes*block_bytes;

    const uint8_t * p;
    int             half;

    KNAPSPEC_INLINE packed_super(const uint8_t * group, size_t half) : p(group), half((int) half) {}

    // from `field` on, 16 bytes at `offset` of each row
    KNAPSPEC_INLINE void bytes_16(int field, int offset, vint * out) const {
        packed_16<8, unit>(p + field + 8*offset + n_lanes*unit*half, out);
    }

    KNAPSPEC_INLINE void end_super() { p += 2*bytes; }
};

template <int unit, int block_bytes> struct packed_k : packed_super<unit, block_bytes> {
    static constexpr int  n_chunks = 4, group = 32;
    static constexpr bool has_min = true;
    using packed_super<unit, block_bytes>::packed_super;

    uint32_t scales[8]; // one byte per row

    KNAPSPEC_INLINE void begin_super(vfloat & d, vfloat & dmin, vint * mins) {
        const uint8_t * p = this->p;
        d    = load_half(p + 8*this->half);
        dmin = load_half(p + 16 + 8*this->half);
        uint32_t m[8];
        KNAPSPEC_UNROLL for (int g = 0; g < 8; g++) {
            // four bytes with scales of rows 0..3, four with their minima, four with low bits of both of rows 4..7
            uint32_t w[3];
            memcpy(w, p + 32 + 12*g, 12);
            scales[g] = this->half ? (w[2] & 0x0f0f0f0f)      | (w[0] >> 2 & 0x30303030) : w[0] & 0x3f3f3f3f;
            m[g]      = this->half ? (w[2] >> 4 & 0x0f0f0f0f) | (w[1] >> 2 & 0x30303030) : w[1] & 0x3f3f3f3f;
        }
        KNAPSPEC_UNROLL for (int i = 0; i < 4; i++) {
            mins[i] = bit_or(widen_u8(m[2*i]), shift_left<16>(widen_u8(m[2*i + 1])));
        }
    }
};

template <int unit> struct packed_q4_k : packed_k<unit, 144> {
    static constexpr int largest = 15;
    using packed_k<unit, 144>::packed_k;

    template <class F> KNAPSPEC_INLINE void chunk(int k, F && use) {
        vint v[8], u[8];
        this->bytes_16(128, 32*k,      v);
        this->bytes_16(128, 32*k + 16, v + 4);
        KNAPSPEC_UNROLL for (int q = 0; q < 8; q++) {
            u[q] = low_nibbles(v[q]);
        }
        use(2*k, u, to_float(widen_u8(this->scales[2*k])));
        KNAPSPEC_UNROLL for (int q = 0; q < 8; q++) {
            u[q] = high_nibbles(v[q]);
        }
        use(2*k + 1, u, to_float(widen_u8(this->scales[2*k + 1])));
    }
};

template <int unit> struct packed_q5_k : packed_k<unit, 176> {
    static constexpr int largest = 31;
    using packed_k<unit, 176>::packed_k;

    vint bits[8]; // from bit 0 of each byte on: the fifth bits of the groups that are still to come

    KNAPSPEC_INLINE void begin_super(vfloat & d, vfloat & dmin, vint * mins) {
        packed_k<unit, 176>::begin_super(d, dmin, mins);
        this->bytes_16(128,  0, bits);
        this->bytes_16(128, 16, bits + 4);
    }

    template <class F> KNAPSPEC_INLINE void chunk(int k, F && use) {
        vint v[8], u[8];
        this->bytes_16(384, 32*k,      v);
        this->bytes_16(384, 32*k + 16, v + 4);
        const vint fifth = set_bytes(16);
        KNAPSPEC_UNROLL for (int q = 0; q < 8; q++) {
            u[q] = bit_or(low_nibbles(v[q]), bit_and(shift_left<4>(bits[q]), fifth));
        }
        use(2*k, u, to_float(widen_u8(this->scales[2*k])));
        KNAPSPEC_UNROLL for (int q = 0; q < 8; q++) {
            u[q] = bit_or(high_nibbles(v[q]), bit_and(shift_left<3>(bits[q]), fifth));
            bits[q] = shift_right<2>(bits[q]);
        }
        use(2*k + 1, u, to_float(widen_u8(this->scales[2*k + 1])));
    }
};

template <int unit> struct packed_q6_k : packed_super<unit, 210> {
    static constexpr int  n_chunks = 4, group = 16, zero = 32, largest = 63;
    static constexpr bool has_min = false;
    using packed_super<unit, 210>::packed_super;

    KNAPSPEC_INLINE vint scale(int g) const {
        uint32_t of_rows;
        memcpy(&of_rows, this->p + 16 + 8*g + n_lanes*this->half, 4);
        return widen_i8(of_rows);
    }

    KNAPSPEC_INLINE void begin_super(vfloat & d, vfloat &, vint * pairs) {
        d = load_half(this->p + 8*this->half);
        KNAPSPEC_UNROLL for (int i = 0; i < 8; i++) {
            pairs[i] = pairs_i16(scale(2*i), scale(2*i + 1));
        }
    }

    template <class F> KNAPSPEC_INLINE void chunk(int k, F && use) {
        const int part = k/2, at = 16*(k % 2), g = 8*part + k % 2;
        vint a[4], b[4], h[4], u[4];
        this->bytes_16(144,  64*part + at,      a);
        this->bytes_16(144,  64*part + at + 32, b);
        this->bytes_16(1168, 32*part + at,      h);
        const vint two = set_bytes(0x30);
        KNAPSPEC_UNROLL for (int q = 0; q < 4; q++) {
            u[q] = bit_or(low_nibbles(a[q]), bit_and(shift_left<4>(h[q]), two));
        }
        use(g, u, to_float(scale(g)));
        KNAPSPEC_UNROLL for (int q = 0; q < 4; q++) {
            u[q] = bit_or(low_nibbles(b[q]), bit_and(shift_left<2>(h[q]), two));
        }
        use(g + 2, u, to_float(scale(g + 2)));
        KNAPSPEC_UNROLL for (int q = 0; q < 4; q++) {
            u[q] = bit_or(high_nibbles(a[q]), bit_and(h[q], two));
        }
        use(g + 4, u, to_float(scale(g + 4)));
        KNAPSPEC_UNROLL for (int q = 0; q < 4; q++) {
            u[q] = bit_or(high_nibbles(b[q]), bit_and(shift_right<2>(h[q]), two));
        }
        use(g + 6, u, to_float(scale(g + 6)));
    }
};

} // namespace knapspec
