// Attention for few query rows against a twin in F64 and row by row, without Python: for instruction sets that only an
// emulator has here, and for sanitizers (scripts/check_kernels.py). Prints the largest error; exit code 1 if something is
// wrong. With the argument "upstream" no result may be ours.
#include "kernel_check.h"

#include <algorithm>
#include <cmath>

struct Case {
    ggml_type type;
    int width, heads, heads_kv, tokens, cells, used;
    float max_bias, softcap;
    bool sinks;
};

struct Inputs {
    std::vector<float> q, k, v, sinks;
};

static std::vector<uint8_t> stored(ggml_type type, const std::vector<float> & x, int width) {
    std::vector<uint8_t> bytes(ggml_row_size(type, width)*(x.size()/width));
    ggml_quantize_chunk(type, x.data(), bytes.data(), 0, x.size()/width, width, nullptr);
    return bytes;
}

// Rows first..first + n - 1 of the case, over the first `cells` cells. Everything lies in memory of its own and exact size,
// so that a sanitizer sees what goes beyond.
static std::vector<float> attention(const Case & c, const Inputs & in, int first, int n, int cells, int threads) {
    ggml_context * ctx = ggml_init({ (size_t) 1 << 20, nullptr, true });
    std::vector<std::vector<uint8_t>> memory;
    const auto fill = [&](ggml_tensor * t, const void * data) {
        memory.emplace_back((const uint8_t *) data, (const uint8_t *) data + ggml_nbytes(t));
        t->data = memory.back().data();
        return t;
    };
    const auto keys = [&](const std::vector<float> & x) {
        ggml_tensor * t = ggml_new_tensor_3d(ctx, c.type, c.width, c.heads_kv, cells);
        return ggml_permute(ctx, fill(t, stored(c.type, x, c.width).data()), 0, 2, 1, 3);
    };
    std::vector<ggml_fp16_t> mask;
    for (int j = 0; j < n; j++) {
        for (int t = 0; t < cells; t++) {
            const bool seen = t <= c.used - c.tokens + first + j;
            mask.push_back(ggml_fp32_to_fp16(seen ? c.max_bias ? -0.01f*(t%50) : 0.0f : -INFINITY));
        }
    }
    ggml_tensor * q = fill(ggml_new_tensor_3d(ctx, GGML_TYPE_F32, c.width, c.heads, n), in.q.data() + (size_t) first*c.heads*c.width);
    ggml_tensor * out = ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), keys(in.k), keys(in.v),
                                            fill(ggml_new_tensor_2d(ctx, GGML_TYPE_F16, cells, n), mask.data()),
                                            1.5f/std::sqrt((float) c.width), c.max_bias, c.softcap);
    if (c.sinks) {
        ggml_flash_attn_ext_add_sinks(out, fill(ggml_new_tensor_1d(ctx, GGML_TYPE_F32, c.heads), in.sinks.data()));
    }
    std::vector<float> result(ggml_nelements(out));
    out->data = result.data();
    compute(ctx, out, threads);
    return result;
}

static double largest_error(const Case & c, const Inputs & in, const std::vector<float> & found) {
    std::vector<float> k(in.k.size()), v(in.v.size());
    ggml_get_type_traits(c.type)->to_float(stored(c.type, in.k, c.width).data(), k.data(), k.size());
    ggml_get_type_traits(c.type)->to_float(stored(c.type, in.v, c.width).data(), v.data(), v.size());
    double error = 0;
    for (int j = 0; j < c.tokens; j++) {
        for (int h = 0; h < c.heads; h++) {
            const int n = c.used - c.tokens + j + 1, hk = h/(c.heads/c.heads_kv), base = 1 << (int) std::log2(c.heads);
            const double slope = !c.max_bias ? 1 : h < base ? std::pow(2, -c.max_bias/base*(h + 1))
                                                            : std::pow(2, -c.max_bias/2/base*(2*(h - base) + 1));
            std::vector<double> s(n), o(c.width, 0.0);
            double top = c.sinks ? in.sinks[h] : -INFINITY, sum = 0;
            for (int t = 0; t < n; t++) {
                for (int d = 0; d < c.width; d++) {
                    s[t] += (double) in.q[((size_t) j*c.heads + h)*c.width + d]*k[((size_t) t*c.heads_kv + hk)*c.width + d];
                }
                s[t] *= 1.5/std::sqrt((double) c.width);
                if (c.softcap) {
                    s[t] = c.softcap*std::tanh(s[t]/c.softcap);
                }
                if (c.max_bias) {
                    s[t] += slope*ggml_fp16_to_fp32(ggml_fp32_to_fp16(-0.01f*(t%50)));
                }
                top = std::max(top, s[t]);
            }
            for (int t = 0; t < n; t++) {
                const double p = std::exp(s[t] - top);
                sum += p;
                for (int d = 0; d < c.width; d++) {
                    o[d] += p*v[((size_t) t*c.heads_kv + hk)*c.width + d];
                }
            }
            sum += c.sinks ? std::exp(in.sinks[h] - top) : 0;
            for (int d = 0; d < c.width; d++) {
                error = std::max(error, std::fabs(o[d]/sum - found[((size_t) j*c.heads + h)*c.width + d]));
            }
        }
    }
    return error;
}

int main(int argc, char ** argv) {
    const Case cases[] = {
        { GGML_TYPE_F16,   64,  9, 3,  1,  512,  300, 0, 0,  false }, { GGML_TYPE_F16,   64,  9, 3,  8,  512,  300, 0, 0,  false },
        { GGML_TYPE_F16,   80,  4, 4,  5,  300,  300, 8, 0,  false }, { GGML_TYPE_F16,   96,  6, 2, 16,  257,  200, 0, 5,  true  },
        { GGML_TYPE_F16,  128,  8, 2,  3, 1024,  900, 0, 0,  true  }, { GGML_TYPE_F16,  256,  4, 1,  4,  256,  130, 0, 50, false },
        { GGML_TYPE_Q8_0,  64,  9, 3,  1,  512,  300, 0, 0,  false }, { GGML_TYPE_Q8_0, 128,  8, 2,  7,  700,  700, 0, 0,  false },
        { GGML_TYPE_Q8_0,  96, 12, 3, 16,  256,   90, 8, 5,  true  }, { GGML_TYPE_F16,   64,  6, 2, 70,  300,  290, 0, 0,  true  },
    };
    const Backend cpu;
    const bool from_upstream = expects_upstream(argc, argv);
    bool good = true;
    for (const Case & c : cases) {
        const Inputs in = { normal((size_t) c.tokens*c.heads*c.width), normal((size_t) c.cells*c.heads_kv*c.width),
                            normal((size_t) c.cells*c.heads_kv*c.width), normal(c.heads) };
        cpu.set_enabled(false);
        const std::vector<float> upstream = attention(c, in, 0, c.tokens, c.cells, 2);
        cpu.set_enabled(true);
        const std::vector<float> whole = attention(c, in, 0, c.tokens, c.cells, 2);
        const bool ours = memcmp(whole.data(), upstream.data(), whole.size()*sizeof(float)) != 0;
        bool same = true;
        for (int j = 0; j < c.tokens; j++) {
            const std::vector<float> alone = attention(c, in, j, 1, std::min(c.cells, (c.used + 63)/64*64), 1 + j%3);
            same &= memcmp(alone.data(), whole.data() + (size_t) j*c.heads*c.width, alone.size()*sizeof(float)) == 0;
        }
        const double error = largest_error(c, in, whole);
        good &= from_upstream ? !ours : ours && same && error < 2e-5;
        if (from_upstream) {
            continue;
        }
        printf("%s width %3d tokens %2d: error %.1e (upstream's %.1e), %s, rows alone %s\n", ggml_type_name(c.type), c.width,
               c.tokens, error, largest_error(c, in, upstream), ours ? "ours" : "NOT OURS", same ? "equal" : "DIFFER");
    }
    printf("attention: %s\n", !good ? "WRONG" : from_upstream ? "all upstream's" : "good");
    return good ? 0 : 1;
}
