// Pick a token from a row of logits: argmax, or Gumbel-max with noise that depends on (seed, position, token id) only.
#include "knapspec.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace {

// The loops below are written for compilers to vectorise without leave to reorder floating-point operations: independent
// lanes, no control flow. libllama is compiled for the oldest supported CPU, so they are compiled for newer ones as well.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#    define KNAPSPEC_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#    define KNAPSPEC_CLONES
#endif

constexpr int LANES = 16;
constexpr int BLOCK = 1024; // keeps single-precision partial sums short; a multiple of LANES

// out[i] = exp((x[i] - top)/T) where x[i] >= floor, else 0; for x[i] <= top. Relative error below 2e-7, 0 below exp(-87).
// In the form of Cephes' expf.
KNAPSPEC_CLONES
void exp_block(const float * x, float * out, int n, float top, float floor, float inverse_temperature) {
    const float magic = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer
    for (int i = 0; i < n; ++i) {
        const float y = (x[i] - top)*inverse_temperature;
        const float c = y > -87.0f ? y : -87.0f;
        const float k = (c*1.44269504f + magic) - magic;
        const float r = (c - k*0.693359375f) + k*2.12194440e-4f;
        float p = 1.9875691500e-4f;
        p = p*r + 1.3981999507e-3f;
        p = p*r + 8.3334519073e-3f;
        p = p*r + 4.1665795894e-2f;
        p = p*r + 1.6666665459e-1f;
        p = p*r + 5.0000001201e-1f;
        p = p*r*r + r + 1.0f;
        const int32_t bits = ((int32_t) k + 127) << 23;
        float scale;
        memcpy(&scale, &bits, sizeof(scale));
        const float e = p*scale;
        const float inside = x[i] >= floor ? e : 0.0f;
        out[i] = y >= -87.0f ? inside : 0.0f;
    }
}

// finaliser of SplitMix64 (Steele, Lea, Flood 2014)
inline uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

constexpr uint64_t GOLDEN = 0x9e3779b97f4a7c15ull;

// 1 - u for u uniform in (0, 1): strictly between 0 and 1
inline double one_minus_uniform(uint64_t key, int32_t token) {
    return ((double) (mix(key + GOLDEN*(uint64_t) (token + 1)) >> 11) + 0.5) * 0x1.0p-53;
}

struct best_two {
    float first;
    float second;
};

// NaN never wins a comparison and is passed over
KNAPSPEC_CLONES
best_two find_best(const float * logits, int32_t n_vocab) {
    const float lowest = -std::numeric_limits<float>::infinity();
    float first [LANES];
    float second[LANES];
    for (int j = 0; j < LANES; ++j) {
        first[j] = second[j] = lowest;
    }
    int32_t i = 0;
    for (; i + LANES <= n_vocab; i += LANES) {
        for (int j = 0; j < LANES; ++j) {
            const float x   = logits[i + j];
            const float low = x > first[j] ? first[j] : x;
            first [j] = x > first[j] ? x : first[j];
            second[j] = low > second[j] ? low : second[j];
        }
    }
    best_two best = { lowest, lowest };
    const auto add = [&best](float x) {
        if (x > best.first) {
            best.second = best.first;
            best.first  = x;
        } else if (x > best.second) {
            best.second = x;
        }
    };
    for (int j = 0; j < LANES; ++j) {
        add(first[j]);
        add(second[j]);
    }
    for (; i < n_vocab; ++i) {
        add(logits[i]);
    }
    return best;
}

KNAPSPEC_CLONES
float sum_block(const float * x, int n) {
    float sum[LANES] = { 0.0f };
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int j = 0; j < LANES; ++j) {
            sum[j] += x[i + j];
        }
    }
    float total = 0.0f;
    for (; i < n; ++i) {
        total += x[i];
    }
    for (int j = 0; j < LANES; ++j) {
        total += sum[j];
    }
    return total;
}

} // namespace

extern "C" int32_t knapspec_pick(
        const float             * logits,
        int32_t                   n_vocab,
        const knapspec_sampling * sampling,
        int64_t                   position,
        llama_token             * token_out,
        float                   * prob_out,
        float                   * margin_out) {
    const best_two best = find_best(logits, n_vocab);
    if (!std::isfinite(best.first)) {
        return KNAPSPEC_BAD_LOGITS;
    }
    int32_t top = 0;
    while (logits[top] != best.first) {
        top++;
    }

    const float lowest = -std::numeric_limits<float>::infinity();
    float  weights[BLOCK];
    double total = 0.0;

    if (!(sampling->temperature > 0.0f)) {
        for (int32_t begin = 0; begin < n_vocab; begin += BLOCK) {
            const int n = n_vocab - begin < BLOCK ? n_vocab - begin : BLOCK;
            exp_block(logits + begin, weights, n, best.first, lowest, 1.0f);
            total += sum_block(weights, n);
        }
        *token_out  = top;
        *prob_out   = (float) (1.0 / total);
        *margin_out = best.first - best.second;
        return KNAPSPEC_OK;
    }

    // finite also for the smallest temperatures, and never a floor above the best: their weight of 1 must come out
    const float inverse_temperature = 1.0f / std::fmax(sampling->temperature, std::numeric_limits<float>::min());
    const float floor = sampling->min_p > 0.0f ? best.first + logf(std::fmin(sampling->min_p, 1.0f)) : lowest;

    // Gumbel-max as an exponential race: argmax of x/T + gumbel = argmin of -log(u) / exp(x/T). Since -log(u) >= 1 - u, a
    // token whose 1 - u is not below the time it has to beat needs no logarithm.
    const uint64_t key = mix(mix(sampling->seed + GOLDEN) ^ (GOLDEN*(uint64_t) (position + 1)));
    const auto weight = [&](int32_t i) { return std::exp(((double) logits[i] - best.first)*inverse_temperature); };

    int32_t winner = top;
    double  first  = -std::log1p(-one_minus_uniform(key, top)); // weight of the top token is 1
    double  second = std::numeric_limits<double>::infinity();
    for (int32_t begin = 0; begin < n_vocab; begin += BLOCK) {
        const int n = n_vocab - begin < BLOCK ? n_vocab - begin : BLOCK;
        exp_block(logits + begin, weights, n, best.first, floor, inverse_temperature);
        total += sum_block(weights, n);
        for (int j = 0; j < n; ++j) {
            const int32_t i = begin + j;
            // the single-precision weight only rules out, with room for its error
            const double limit = second*weights[j]*1.000001;
            if (!(limit > 0.0) || i == top) {
                continue;
            }
            const double v = one_minus_uniform(key, i);
            if (v >= limit) {
                continue;
            }
            const double time = -std::log1p(-v) / weight(i);
            if (time < first) {
                second = first;
                first  = time;
                winner = i;
            } else if (time < second) {
                second = time;
            }
        }
    }

    *token_out  = winner;
    *prob_out   = (float) (weight(winner) / total);
    *margin_out = std::isfinite(second) ? (float) std::log(second / first) : std::numeric_limits<float>::infinity();
    return KNAPSPEC_OK;
}
