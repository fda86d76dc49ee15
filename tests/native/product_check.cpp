// Products of weights with few columns against a scalar twin and column by column, without Python: for instruction sets that
// only an emulator has here, and for sanitizers (scripts/check_kernels.py). With the argument "upstream" no product may be
// ours. Exit code 1 if something is wrong.
#include "kernel_check.h"

#include <cmath>
#include <string>

static int between(int low, int high) { return std::uniform_int_distribution<int>(low, high)(generator); }

template <class T> static T at(const uint8_t * p) {
    T value;
    memcpy(&value, p, sizeof(T));
    return value;
}

static float half_at(const uint8_t * p) { return ggml_fp16_to_fp32(at<ggml_fp16_t>(p)); }

// ---- types

struct Type {
    ggml_type        type;
    int              block, bytes;  // weights and bytes of a block
    std::vector<int> halves;        // where its scales of 16 bits stand; all other bytes may be anything
};

static const Type types[] = {
    { GGML_TYPE_Q8_0,   32,  34, { 0 }    }, { GGML_TYPE_Q4_0, 32,  18, { 0 }    }, { GGML_TYPE_Q4_1, 32,  20, { 0, 2 } },
    { GGML_TYPE_Q5_0,   32,  22, { 0 }    }, { GGML_TYPE_Q5_1, 32,  24, { 0, 2 } }, { GGML_TYPE_IQ4_NL, 32, 18, { 0 }  },
    { GGML_TYPE_Q4_K,  256, 144, { 0, 2 } }, { GGML_TYPE_Q5_K, 256, 176, { 0, 2 } }, { GGML_TYPE_Q6_K, 256, 210, { 208 } },
    { GGML_TYPE_F16,     1,   2, { 0 }    }, { GGML_TYPE_BF16,  1,   2, { 0 }    },
};

static bool has_min(ggml_type t) {
    return t == GGML_TYPE_Q4_1 || t == GGML_TYPE_Q5_1 || t == GGML_TYPE_Q4_K || t == GGML_TYPE_Q5_K;
}

// Random bytes with random scales: every weight that a block can hold, not only those that a quantiser makes.
static std::vector<uint8_t> random_rows(const Type & t, int rows, int k) {
    std::vector<uint8_t> bytes((size_t) rows*(k/t.block)*t.bytes);
    for (uint8_t & b : bytes) {
        b = (uint8_t) between(0, 255);
    }
    const std::vector<float> scales = normal(bytes.size()/t.bytes*t.halves.size());
    size_t used = 0;
    for (size_t i = 0; i < bytes.size(); i += t.bytes) {
        for (const int offset : t.halves) {
            const float       s = scales[used++];
            const ggml_fp16_t h = ggml_fp32_to_fp16(s);
            const ggml_bf16_t b = ggml_fp32_to_bf16(s);
            memcpy(&bytes[i + offset], t.type == GGML_TYPE_BF16 ? (const void *) &b : &h, 2);
        }
    }
    return bytes;
}

// ---- the twin: one row, one column, one block after the other

// weights of a block before scale, zero and minimum
static void unpack(ggml_type t, const uint8_t * b, int * u) {
    static const int steps[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };
    for (int l = 0; l < 32; l++) {
        const auto nibble = [&](const uint8_t * q) { return l < 16 ? q[l] & 15 : q[l - 16] >> 4; };
        const auto fifth  = [&](const uint8_t * h) { return (h[l/8] >> (l % 8) & 1) << 4; };
        switch (t) {
            case GGML_TYPE_Q8_0:   u[l] = (int8_t) b[2 + l]; break;
            case GGML_TYPE_Q4_0:   u[l] = nibble(b + 2) - 8; break;
            case GGML_TYPE_Q4_1:   u[l] = nibble(b + 4); break;
            case GGML_TYPE_Q5_0:   u[l] = (nibble(b + 6) | fifth(b + 2)) - 16; break;
            case GGML_TYPE_Q5_1:   u[l] = nibble(b + 8) | fifth(b + 4); break;
            case GGML_TYPE_IQ4_NL: u[l] = steps[nibble(b + 2)]; break;
            default:               break;
        }
    }
}

static void unpack_super(ggml_type t, const uint8_t * b, int * u, int * scales, int * mins) {
    if (t == GGML_TYPE_Q6_K) {
        for (int l = 0; l < 256; l++) {
            const int half = l/128, quarter = l/32 % 4, i = l % 32;
            const int low = b[64*half + 32*(quarter % 2) + i] >> 4*(quarter/2) & 15;
            u[l] = low | (b[128 + 32*half + i] >> 2*quarter & 3) << 4;
        }
        for (int g = 0; g < 16; g++) {
            scales[g] = (int8_t) b[192 + g];
        }
        return;
    }
    const bool five = t == GGML_TYPE_Q5_K;
    const uint8_t * s = b + 4, * high = b + 16, * low = b + (five ? 48 : 16);
    for (int l = 0; l < 256; l++) {
        u[l] = low[32*(l/64) + l % 32] >> 4*(l/32 % 2) & 15;
        u[l] |= five ? (high[l % 32] >> l/32 & 1) << 4 : 0;
    }
    for (int g = 0; g < 8; g++) {
        scales[g] = g < 4 ? s[g] & 63     : (s[g + 4] & 15) | s[g - 4] >> 6 << 4;
        mins[g]   = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4   | s[g]     >> 6 << 4;
    }
}

// Result of a row and a column; `size` is the sum of the magnitudes that were added, for weights of 16 bits, where the order is
// not fixed. Floats are added as the kernels do on plain rows, so for quantised weights the bits are equal.
static float twin(ggml_type t, const uint8_t * w, int k, const float * x, const uint8_t * rounded, double & size) {
    size = 0;
    if (t == GGML_TYPE_F16 || t == GGML_TYPE_BF16) {
        double sum = 0;
        for (int i = 0; i < k; i++) {
            const float v = t == GGML_TYPE_F16 ? half_at(w + 2*i) : ggml_bf16_to_fp32(at<ggml_bf16_t>(w + 2*i));
            sum  += (double) v*x[i];
            size += std::fabs((double) v*x[i]);
        }
        return (float) sum;
    }
    float acc = 0;
    if (k % 256 || (t != GGML_TYPE_Q4_K && t != GGML_TYPE_Q5_K && t != GGML_TYPE_Q6_K)) {
        const bool min = has_min(t);
        const int bytes = (int) ggml_type_size(t);
        for (int i = 0; i < k/32; i++, w += bytes, rounded += min ? 36 : 34) {
            int u[32], sum = 0;
            unpack(t, w, u);
            for (int l = 0; l < 32; l++) {
                sum += u[l]*(int8_t) rounded[(min ? 4 : 2) + l];
            }
            const float d = half_at(w)*half_at(rounded);
            acc = std::fma(d, (float) sum, acc);
            size += std::fabs((double) d*sum);
            if (min) {
                acc = std::fma(half_at(w + 2), half_at(rounded + 2), acc);
                size += std::fabs((double) half_at(w + 2)*half_at(rounded + 2));
            }
        }
        return acc;
    }
    const bool six = t == GGML_TYPE_Q6_K;
    const int n_groups = six ? 16 : 8, per_group = 256/n_groups;
    for (int i = 0; i < k/256; i++, w += ggml_type_size(t), rounded += ggml_type_size(GGML_TYPE_Q8_K)) {
        int u[256], scales[16], mins[8], of_group[16] = {}, offset = 0;
        unpack_super(t, w, u, scales, mins);
        for (int g = 0; g < n_groups; g++) {
            int sum = 0;
            for (int l = per_group*g; l < per_group*(g + 1); l++) {
                of_group[g] += u[l]*(int8_t) rounded[4 + l];
                sum += (int8_t) rounded[4 + l];
            }
            offset += (six ? scales[g] : mins[g])*sum;
        }
        const float d = half_at(w + (six ? 208 : 0)), dx = at<float>(rounded);
        float sum = 0;
        if (six) {
            sum = -32.0f*(float) offset;
        } else {
            acc = std::fma(-(half_at(w + 2)*dx), (float) offset, acc);
            size += std::fabs((double) half_at(w + 2)*dx*offset);
        }
        for (int j = 0; j < n_groups; j++) {
            // four groups of a half super-block share bytes, then come the four beside them
            const int g = six ? j/8*8 + j % 4*2 + j/4 % 2 : j;
            sum = std::fma((float) scales[g], (float) of_group[g], sum);
        }
        acc = std::fma(d*dx, sum, acc);
        size += std::fabs((double) d*dx*sum);
    }
    return acc;
}

// ---- ggml's side

struct Weights {
    ggml_context *         ctx;
    ggml_tensor *          tensor;
    ggml_backend_buffer_t  buffer = nullptr;
    std::vector<uint8_t>   memory; // of exact size where no buffer type lays them out, so that a sanitizer sees what goes beyond

    // `gap` bytes lie between two rows
    Weights(const Type & t, const std::vector<uint8_t> & rows, int k, int n_rows, size_t gap, ggml_backend_buffer_type_t where) :
        ctx(ggml_init({ (size_t) 1 << 20, nullptr, true })), tensor(ggml_new_tensor_2d(ctx, t.type, k, n_rows)) {
        if (where) {
            buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, where);
            return;
        }
        const size_t bytes = rows.size()/n_rows, stride = bytes + gap;
        memory.assign(stride*(n_rows - 1) + bytes, 0xff);
        for (int r = 0; r < n_rows; r++) {
            memcpy(memory.data() + r*stride, rows.data() + r*bytes, bytes);
        }
        tensor->data  = memory.data();
        tensor->nb[1] = stride;
        tensor->nb[2] = tensor->nb[3] = stride*n_rows;
    }

    ~Weights() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }

    Weights(const Weights &) = delete;
    Weights & operator=(const Weights &) = delete;
};

// [column][row] of the columns first..first + n - 1 of x [column][k], which lie `gap` floats apart, in planes of `plane` columns
static std::vector<float> product(const Weights & w, const std::vector<float> & x, int first, int n, int threads, int gap = 0, int plane = 0) {
    const int k = (int) w.tensor->ne[0], rows = (int) w.tensor->ne[1], per_plane = plane ? plane : n;
    std::vector<float> held((size_t) n*(k + gap) - gap, NAN);
    for (int c = 0; c < n; c++) {
        memcpy(held.data() + (size_t) c*(k + gap), x.data() + (size_t) (first + c)*k, k*sizeof(float));
    }
    ggml_context * ctx = ggml_init({ (size_t) 1 << 20, nullptr, true });
    ggml_tensor * in = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, k, per_plane, n/per_plane);
    in->data  = held.data();
    in->nb[1] = (k + gap)*sizeof(float);
    in->nb[2] = in->nb[3] = in->nb[1]*per_plane;
    ggml_tensor * out = ggml_mul_mat(ctx, w.tensor, in);
    std::vector<float> result((size_t) n*rows);
    out->data = result.data();
    compute(ctx, out, threads);
    return result;
}

static bool same(float a, float b) { return (std::isnan(a) && std::isnan(b)) || memcmp(&a, &b, sizeof(a)) == 0; }

static bool same(const float * a, const float * b, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (!same(a[i], b[i])) {
            return false;
        }
    }
    return true;
}

// ---- checks

static const int most = 16; // columns

static int failures = 0;

static bool report(bool good, const Type & t, const char * where, const char * what, int rows, int k) {
    if (!good) {
        failures++;
        printf("%s, %s, %d rows of %d: %s\n", ggml_type_name(t.type), where, rows, k, what);
    }
    return good;
}

static std::vector<uint8_t> rounded(const Type & t, const float * x, int k) {
    if (t.block == 1) {
        return {};
    }
    const ggml_type to = ggml_get_type_traits_cpu(t.type)->vec_dot_type;
    std::vector<uint8_t> bytes(ggml_row_size(to, k));
    ggml_get_type_traits_cpu(to)->from_float(x, bytes.data(), k);
    return bytes;
}

// Whether results [column][row] are the twin's: the same bits on plain rows of quantised weights, nearly so elsewhere.
static bool is_twin(const Type & t, const std::vector<uint8_t> & w, int rows, int k, const std::vector<float> & x,
                    const std::vector<float> & found, int columns, bool bits) {
    for (int c = 0; c < columns; c++) {
        const float * column = x.data() + (size_t) c*k;
        const std::vector<uint8_t> q = rounded(t, column, k);
        bool finite = true;
        for (int i = 0; i < k; i++) {
            finite &= std::isfinite(column[i]);
        }
        for (int r = 0; r < rows; r++) {
            double size;
            const float expected = twin(t.type, w.data() + w.size()/rows*r, k, column, q.data(), size);
            const float y = found[(size_t) c*rows + r];
            if (!finite && t.block > 1) {
                // rounding makes what is not finite the byte -128, which AVX2 cannot negate, as in upstream's products
                if (std::isfinite(expected) != std::isfinite(y)) {
                    return false;
                }
            } else if (!std::isfinite(expected) || !std::isfinite(y) || (bits && t.block > 1)) {
                if (!same(expected, y)) {
                    return false;
                }
            } else if (std::fabs((double) y - expected) > 2e-6*size) {
                return false;
            }
        }
    }
    return true;
}

static bool alike(const Weights & w, const std::vector<float> & x, const std::vector<float> & alone, bool thorough) {
    const size_t rows = w.tensor->ne[1];
    for (int n = 2; n <= most; n += thorough ? 1 : 5) {
        for (const int first : { 0, (most - n)/2, most - n }) {
            if (!same(product(w, x, first, n, 1 + n % 3).data(), alone.data() + first*rows, n*rows)) {
                return false;
            }
        }
    }
    return true;
}

static std::vector<float> one_by_one(const Weights & w, const std::vector<float> & x) {
    std::vector<float> alone;
    for (int c = 0; c < most; c++) {
        const std::vector<float> y = product(w, x, c, 1, 1 + c % 2);
        alone.insert(alone.end(), y.begin(), y.end());
    }
    return alone;
}

static void check_plain(const Backend & cpu, const Type & t) {
    for (int shape = 0; shape < 6; shape++) {
        const int rows = shape == 0 ? 16 : shape == 1 ? 17 : between(18, 70);
        const int k    = t.block*between(1, t.block == 256 ? 3 : t.block == 32 ? 9 : 300);
        const size_t gap = shape % 2 ? t.block == 1 ? 6 : t.bytes*2 : 0;
        const std::vector<uint8_t> bytes = random_rows(t, rows, k);
        const std::vector<float> x = normal((size_t) most*k);
        const Weights w(t, bytes, k, rows, gap, nullptr);
        if (!report(cpu.covers(w.tensor), t, "plain", "not ours", rows, k)) {
            return;
        }
        const std::vector<float> alone = one_by_one(w, x);
        report(is_twin(t, bytes, rows, k, x, alone, most, true), t, "plain", "differs from the twin", rows, k);
        report(alike(w, x, alone, true), t, "plain", "a row depends on its batch", rows, k);
        report(same(product(w, x, 0, most, 2, 16 + shape).data(), alone.data(), alone.size()), t, "plain", "strides matter", rows, k);
        report(same(product(w, x, 0, most, 3, 0, 4).data(), alone.data(), alone.size()), t, "plain", "planes matter", rows, k);
        if (t.block > 1) {
            const std::vector<float> prompt = normal((size_t) 37*k), y = product(w, prompt, 0, 37, 2);
            const bool ours = same(y.data(), product(w, prompt, 0, 1, 1).data(), rows); // else upstream is faster
            report(!ours || is_twin(t, bytes, rows, k, prompt, y, 37, false), t, "plain", "a prompt differs from the twin", rows, k);
        }
    }
}

static void check_extremes(const Backend & cpu, const Type & t) {
    const int rows = 33, k = 768;
    const std::vector<uint8_t> ordinary = random_rows(t, rows, k);
    for (int extreme = 0; extreme < 8; extreme++) {
        std::vector<uint8_t> bytes = ordinary;
        std::vector<float> x = normal((size_t) most*k);
        for (int c = 0; c < most; c++) {
            for (int i = 0; i < k; i++) {
                float & v = x[(size_t) c*k + i];
                v = extreme == 0 ? 0 : extreme == 1 ? v*1e30f : extreme == 2 ? v*1e-38f : extreme == 3 && i == 40 ? INFINITY
                  : extreme == 4 && i == 300 ? NAN : extreme == 5 && i == 7 ? 3e4f : v;
            }
        }
        if (extreme >= 6) { // the scale of a block, or one weight, is no number; another row is infinite
            const uint16_t infinite = t.type == GGML_TYPE_BF16 ? 0x7f80 : 0x7c00, none = infinite | 1;
            memcpy(&bytes[bytes.size()/rows*5 + t.halves[0]], extreme == 6 ? &none : &infinite, 2);
            memcpy(&bytes[bytes.size()/rows*32 + t.halves[0]], &infinite, 2);
        }
        const Weights w(t, bytes, k, rows, 0, nullptr);
        const std::vector<float> alone = one_by_one(w, x);
        const std::string what = "extreme " + std::to_string(extreme) + ": ";
        report(is_twin(t, bytes, rows, k, x, alone, most, true), t, "plain", (what + "differs from the twin").c_str(), rows, k);
        report(alike(w, x, alone, false), t, "plain", (what + "a row depends on its batch").c_str(), rows, k);
        if (t.block > 1 && extreme < 6) { // on 16-bit weights upstream rounds the activations, which may overflow
            cpu.set_enabled(false);
            const std::vector<float> theirs = product(w, x, 0, most, 2);
            cpu.set_enabled(true);
            bool good = true;
            for (size_t i = 0; i < theirs.size(); i++) {
                good &= std::isfinite(theirs[i]) == std::isfinite(alone[i]);
            }
            report(good, t, "plain", (what + "not finite where upstream's is, or the reverse").c_str(), rows, k);
        }
    }
}

// Weights as a buffer type of the CPU lays them out: ours against the twin; of upstream's it is said what they do.
static void check_packed(const Backend & cpu, const Type & t, ggml_backend_buffer_type_t where) {
    const char * name = ggml_backend_buft_name(where);
    const int rows = 96, k = 512;
    const std::vector<uint8_t> bytes = random_rows(t, rows, k);
    const std::vector<float> x = normal((size_t) most*k);
    const Weights w(t, bytes, k, rows, 0, where);
    ggml_context * ctx = ggml_init({ (size_t) 1 << 20, nullptr, true });
    const ggml_tensor * node = ggml_mul_mat(ctx, w.tensor, ggml_new_tensor_2d(ctx, GGML_TYPE_F32, k, 1));
    const bool takes = ggml_backend_dev_supports_op(ggml_backend_reg_dev_get(cpu.reg, 0), node);
    ggml_free(ctx);
    if (!takes) {
        return;
    }
    ggml_backend_tensor_set(w.tensor, bytes.data(), 0, bytes.size());
    const std::vector<float> alone = one_by_one(w, x);
    const bool even = alike(w, x, alone, true);
    if (cpu.covers(w.tensor)) {
        // in AMX tiles the groups of a super-block are added in another order
        report(is_twin(t, bytes, rows, k, x, alone, most, strcmp(name, "CPU_REPACK") == 0), t, name, "differs from the twin", rows, k);
        report(even, t, name, "a row depends on its batch", rows, k);
    } else {
        printf("%s, %s: upstream's; a row %s on its batch\n", ggml_type_name(t.type), name, even ? "does not depend" : "depends");
    }
}

int main(int argc, char ** argv) {
    const Backend cpu;
    const bool upstream = expects_upstream(argc, argv);
    const auto extra = (ggml_backend_dev_get_extra_bufts_t) cpu.find<void()>("ggml_backend_dev_get_extra_bufts");
    ggml_backend_buffer_type_t * packed = extra ? extra(ggml_backend_reg_dev_get(cpu.reg, 0)) : nullptr;
    for (const Type & t : types) {
        if (upstream) {
            const Weights w(t, random_rows(t, 64, 256), 256, 64, 0, nullptr);
            report(!cpu.covers(w.tensor), t, "plain", "ours", 64, 256);
        } else {
            check_plain(cpu, t);
            check_extremes(cpu, t);
        }
        for (int i = 0; packed && packed[i]; i++) {
            check_packed(cpu, t, packed[i]);
        }
    }
    printf("products: %s\n", failures ? "WRONG" : upstream ? "all upstream's" : "good");
    return failures ? 1 : 0;
}
