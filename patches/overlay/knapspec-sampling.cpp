#include "knapspec-sampling.h"
#include "knapspec-grammar.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

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

// The row is looked through in parts whose maxima are known: one lane of SPAN consecutive logits each.
constexpr int SPAN_ROWS = 32;
constexpr int SPAN      = SPAN_ROWS*LANES;

// Of the most probable tokens, how many are looked at before anything else.
constexpr size_t N_LIKELY = 64;

constexpr float LOWEST = -std::numeric_limits<float>::infinity();

using candidate  = knapspec_sampler::candidate;
using candidates = knapspec_sampler::candidates;

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

// out[i] <= one_minus_uniform(key, token + i), to 24 bits: enough to rule most tokens out
KNAPSPEC_CLONES
void noise_block(uint64_t key, int32_t token, float * out, int n) {
    for (int i = 0; i < n; ++i) {
        const uint64_t z = mix(key + GOLDEN*(uint64_t) (token + i + 1));
        out[i] = (float) (int32_t) (z >> 40) * 0x1.0p-24f;
    }
}

// the same for these tokens
KNAPSPEC_CLONES
void noise_block(uint64_t key, const llama_token * tokens, float * out, int n) {
    for (int i = 0; i < n; ++i) {
        const uint64_t z = mix(key + GOLDEN*(uint64_t) (tokens[i] + 1));
        out[i] = (float) (int32_t) (z >> 40) * 0x1.0p-24f;
    }
}

// hit[k]: whether any of the tokens k*LANES .. may arrive before `time`, given the bounds of noise_block; n is a multiple of
// LANES. Returns how many parts are hit.
KNAPSPEC_CLONES
int any_before(const float * noise, const float * weights, int n, float time, int32_t * hit) {
    int total = 0;
    for (int part = 0; part < n/LANES; ++part) {
        int32_t any = 0;
        for (int j = 0; j < LANES; ++j) {
            any |= noise[part*LANES + j] < time*weights[part*LANES + j] ? 1 : 0;
        }
        hit[part] = any;
        total += any;
    }
    return total;
}

struct best_two {
    float first;
    float second;
};

// NaN never wins a comparison and is passed over
KNAPSPEC_CLONES
best_two find_best(const float * logits, int32_t n_vocab) {
    float first [LANES];
    float second[LANES];
    for (int j = 0; j < LANES; ++j) {
        first[j] = second[j] = LOWEST;
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
    best_two best = { LOWEST, LOWEST };
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

// sum of weights[i]*(x[i] - best)/T
KNAPSPEC_CLONES
float dot_block(const float * x, const float * weights, int n, float best, float inverse_temperature) {
    float sum[LANES] = { 0.0f };
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int j = 0; j < LANES; ++j) {
            const float y = weights[i + j] > 0.0f ? (x[i + j] - best)*inverse_temperature : 0.0f;
            sum[j] += weights[i + j]*y;
        }
    }
    float total = 0.0f;
    for (; i < n; ++i) {
        total += weights[i] > 0.0f ? weights[i]*((x[i] - best)*inverse_temperature) : 0.0f;
    }
    for (int j = 0; j < LANES; ++j) {
        total += sum[j];
    }
    return total;
}

// out[span*LANES + lane]: NaN is passed over
KNAPSPEC_CLONES
void find_maxima(const float * x, int32_t n, float * out) {
    for (int32_t begin = 0; begin < n; begin += SPAN, out += LANES) {
        float best[LANES];
        for (int j = 0; j < LANES; ++j) {
            best[j] = LOWEST;
        }
        const int32_t left = n - begin;
        const int     rows = left/LANES < SPAN_ROWS ? left/LANES : SPAN_ROWS;
        for (int r = 0; r < rows; ++r) {
            for (int j = 0; j < LANES; ++j) {
                const float v = x[begin + r*LANES + j];
                best[j] = v > best[j] ? v : best[j];
            }
        }
        for (int32_t i = rows*LANES; i < left && i < SPAN; ++i) {
            const float v = x[begin + i];
            best[i % LANES] = v > best[i % LANES] ? v : best[i % LANES];
        }
        for (int j = 0; j < LANES; ++j) {
            out[j] = best[j];
        }
    }
}

// out[i] = x[i], impossible where it is above `most` or no number
KNAPSPEC_CLONES
void drop_above(const float * x, float * out, int n, float most) {
    for (int i = 0; i < n; ++i) {
        out[i] = x[i] <= most ? x[i] : LOWEST;
    }
}

bool more_probable(const candidate & a, const candidate & b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

bool more_typical(const candidate & a, const candidate & b) {
    return a.key < b.key || (a.key == b.key && more_probable(a, b));
}

// Cuts the list to its shortest beginning, in this order, whose weights reach `target` (or exceed it), at least one. Halves
// that are not needed are never sorted.
template <typename order>
void keep_weight(candidates & list, double target, bool exceed, order before) {
    const auto reaches = [&](double sum) { return exceed ? sum > target : sum >= target; };
    size_t low = 0, high = list.size();
    double sum = 0.0;
    while (high - low > 256) {
        const size_t middle = low + (high - low)/2;
        std::nth_element(list.begin() + low, list.begin() + middle, list.begin() + high, before);
        double half = 0.0;
        for (size_t i = low; i < middle; ++i) {
            half += list[i].weight;
        }
        if (reaches(sum + half)) {
            high = middle;
        } else {
            sum += half;
            low  = middle;
        }
    }
    std::sort(list.begin() + low, list.begin() + high, before);
    while (low < high) {
        sum += list[low++].weight;
        if (reaches(sum)) {
            break;
        }
    }
    list.resize(std::max<size_t>(low, std::min<size_t>(1, list.size())));
}

double total_weight(const candidates & list) {
    double total = 0.0;
    for (const candidate & c : list) {
        total += c.weight;
    }
    return total;
}

float best_logit(const candidates & list) {
    float best = LOWEST;
    for (const candidate & c : list) {
        best = std::max(best, c.logit);
    }
    return best;
}

// Gumbel-max as an exponential race: argmax of x/T + gumbel = argmin of -log(u) / exp(x/T). Here its logarithm, on a scale
// on which x = best arrives at rate 1. Sums of such times stay meaningful: once somebody has arrived, how long the others
// still take is what it was at the start.
double log_time(uint64_t noise, llama_token id, double logit, double best, double inverse_temperature) {
    return std::log(-std::log1p(-one_minus_uniform(noise, id))) - (logit - best)*inverse_temperature;
}

// log(exp(a) + exp(b))
double log_add(double a, double b) {
    const double high = std::max(a, b), low = std::min(a, b);
    return high + std::log1p(std::exp(low - high));
}

bool penalises(const knapspec_sampling & s) {
    return s.penalty_last_n != 0 && (s.repeat_penalty != 1.0f || s.presence_penalty != 0.0f || s.frequency_penalty != 0.0f);
}

uint64_t noise_of(uint64_t seed, int64_t position) {
    return mix(mix(seed + GOLDEN) ^ (GOLDEN*(uint64_t) (position + 1)));
}

} // namespace

knapspec_sampling knapspec_sampler::greedy() {
    knapspec_sampling settings = {};
    settings.top_p = settings.typical_p = settings.repeat_penalty = 1.0f;
    return settings;
}

bool knapspec_sampler::needs_text(const knapspec_sampling & s) {
    return s.grammar || penalises(s);
}

bool knapspec_sampler::filters(const knapspec_sampling & s) const {
    if (!(s.temperature > 0.0f)) {
        return s.typical_p < 1.0f; // no other filter drops the most probable token
    }
    return s.typical_p < 1.0f || s.top_p < 1.0f || (s.top_k > 0 && s.top_k < n_row);
}

//
// logits
//

void knapspec_sampler::begin(const knapspec_row & logits) {
    given = logits;
    row   = logits.logits;
    n_row = logits.n;
}

void knapspec_sampler::change(float * logits, const knapspec_sampling & s, const llama_token * text, size_t n_text) {
    edits.clear();
    for (int32_t i = 0; i < s.n_bias; ++i) {
        const int32_t place = given.place_of(s.bias[i].token);
        if (place >= 0) {
            edits.push_back({ place, logits[place] });
            logits[place] += s.bias[i].bias;
        }
    }
    if (!penalises(s)) {
        return;
    }
    const size_t n = s.penalty_last_n < 0 ? n_text : std::min<size_t>(n_text, s.penalty_last_n);
    counts.resize(std::max<size_t>(counts.size(), given.n_vocab));
    window.clear();
    for (size_t i = n_text - n; i < n_text; ++i) {
        const llama_token token = text[i];
        if (given.place_of(token) >= 0 && counts[token]++ == 0) {
            window.push_back(token);
        }
    }
    for (const llama_token token : window) {
        const int32_t place = given.place_of(token);
        float & logit = logits[place];
        edits.push_back({ place, logit });
        // division alone would make negative logits more probable
        logit = logit <= 0.0f ? logit*s.repeat_penalty : logit/s.repeat_penalty;
        logit -= (float) counts[token]*s.frequency_penalty + s.presence_penalty;
        counts[token] = 0;
    }
}

//
// candidates
//

// Look through the row once; its best logit.
float knapspec_sampler::scan() {
    maxima.resize((size_t) (n_row + SPAN - 1)/SPAN*LANES);
    find_maxima(row, n_row, maxima.data());
    return *std::max_element(maxima.begin(), maxima.end());
}

// Of all tokens; that of `best` is 1.
double knapspec_sampler::weight_of_row(float best, float inverse) const {
    float  weights[BLOCK];
    double total = 0.0;
    for (int32_t begin = 0; begin < n_row; begin += BLOCK) {
        const int n = n_row - begin < BLOCK ? n_row - begin : BLOCK;
        exp_block(row + begin, weights, n, best, LOWEST, inverse);
        total += sum_block(weights, n);
    }
    return total;
}

// All tokens with low <= logit <= high but those that are impossible. Needs scan().
void knapspec_sampler::gather(float low, float high, candidates & out) const {
    out.clear();
    for (size_t part = 0; part < maxima.size(); ++part) {
        if (!(maxima[part] >= low) || maxima[part] == LOWEST) {
            continue;
        }
        const int32_t begin = (int32_t) (part/LANES)*SPAN + (int32_t) (part % LANES);
        const int32_t end   = std::min(begin + SPAN, n_row);
        for (int32_t i = begin; i < end; i += LANES) {
            if (row[i] >= low && row[i] <= high && row[i] > LOWEST) {
                out.push_back({ row[i], id_at(i), 0.0f, 0.0f });
            }
        }
    }
}

// The n most probable tokens, or as many as are possible, in no order. Needs scan().
void knapspec_sampler::most_probable(size_t n, candidates & out) {
    float low = LOWEST;
    if (n < maxima.size()) {
        // as many parts have a maximum of this or more
        sorted = maxima;
        std::nth_element(sorted.begin(), sorted.begin() + (n - 1), sorted.end(), std::greater<float>());
        low = sorted[n - 1];
    }
    gather(low, std::numeric_limits<float>::infinity(), out);
    if (out.size() > n) {
        std::nth_element(out.begin(), out.begin() + n, out.end(), more_probable);
        out.resize(n);
    }
}

void knapspec_sampler::weigh(candidates & list, float best, float inverse) const {
    float x[BLOCK], weights[BLOCK];
    for (size_t begin = 0; begin < list.size(); begin += BLOCK) {
        const int n = (int) std::min<size_t>(BLOCK, list.size() - begin);
        for (int i = 0; i < n; ++i) {
            x[i] = list[begin + i].logit;
        }
        exp_block(x, weights, n, best, LOWEST, inverse);
        for (int i = 0; i < n; ++i) {
            list[begin + i].weight = weights[i];
        }
    }
}

//
// filters
//

// Tokens whose information -log p is nearest to its mean, the entropy (Meister et al. 2023). As -log p = log Z - x/T, that is
// the distance of x/T from its own mean.
void knapspec_sampler::keep_typical(candidates & list, float p) {
    const float best = best_logit(list);
    weigh(list, best, filter_inverse);
    double mean = 0.0;
    for (const candidate & c : list) {
        mean += c.weight > 0.0f ? (double) c.weight*((c.logit - best)*filter_inverse) : 0.0;
    }
    const double total = total_weight(list);
    mean /= total;
    for (candidate & c : list) {
        c.key = (float) std::fabs((double) ((c.logit - best)*filter_inverse) - mean);
    }
    keep_weight(list, p*total, true, more_typical);
}

void knapspec_sampler::keep_typical_of_row(float best, float p) {
    float  weights[BLOCK];
    double total = 0.0, mean = 0.0;
    for (int32_t begin = 0; begin < n_row; begin += BLOCK) {
        const int n = n_row - begin < BLOCK ? n_row - begin : BLOCK;
        exp_block(row + begin, weights, n, best, LOWEST, filter_inverse);
        total += sum_block(weights, n);
        mean  += dot_block(row + begin, weights, n, best, filter_inverse);
    }
    mean /= total;
    const double target = p*total;
    for (double radius = 1.0;; radius *= 2.0) {
        const bool all = radius > 1000.0;
        // a little wider than what counts, so that rounding at the border does not matter
        const double low  = best + (mean - 1.001*radius)/filter_inverse;
        const double high = best + (mean + 1.001*radius)/filter_inverse;
        gather(all ? LOWEST : (float) low, all ? best : (float) high, chosen);
        weigh(chosen, best, filter_inverse);
        double inside = 0.0;
        for (candidate & c : chosen) {
            c.key = (float) std::fabs((double) ((c.logit - best)*filter_inverse) - mean);
            inside += c.key <= radius ? c.weight : 0.0f;
        }
        if (all || inside > target) {
            keep_weight(chosen, target, true, more_typical);
            return;
        }
    }
}

void knapspec_sampler::keep_top_p(candidates & list, float p) {
    weigh(list, best_logit(list), filter_inverse);
    keep_weight(list, p*total_weight(list), false, more_probable);
}

void knapspec_sampler::keep_top_p_of_row(float best, float p) {
    const double target = p*weight_of_row(best, filter_inverse);
    for (size_t n = N_LIKELY;; n = n < 4096 ? 8*n : n_row) { // a flat row is not worth many tries
        most_probable(n, chosen);
        weigh(chosen, best, filter_inverse);
        if (chosen.size() < n || n >= (size_t) n_row || total_weight(chosen) >= target) {
            keep_weight(chosen, target, false, more_probable);
            return;
        }
    }
}

// The least logit that min-p keeps, where this is the best; never above it.
float knapspec_sampler::min_p_floor(float best, float p) const {
    return p > 0.0f ? best + logf(std::fmin(p, 1.0f))/filter_inverse : LOWEST;
}

// What the filters from `first` on leave of a list.
void knapspec_sampler::filter(candidates & list, const knapspec_sampling & s, stage first) {
    if (first <= stage::typical && s.typical_p < 1.0f) {
        keep_typical(list, s.typical_p);
    }
    if (!(s.temperature > 0.0f)) {
        return; // no other filter drops the most probable token
    }
    if (first <= stage::top_p && s.top_p < 1.0f) {
        keep_top_p(list, s.top_p);
    }
    if (s.min_p > 0.0f) {
        const float floor = min_p_floor(best_logit(list), s.min_p);
        list.erase(std::remove_if(list.begin(), list.end(), [floor](const candidate & c) { return c.logit < floor; }), list.end());
    }
}

//
// picks
//

// temperature 0
knapspec_sampler::outcome knapspec_sampler::best_of(const candidates & list) {
    const candidate * best = &list[0], * second = nullptr;
    double total = 0.0;
    for (const candidate & c : list) {
        if (more_probable(c, *best)) {
            best = &c;
        }
    }
    for (const candidate & c : list) {
        total += std::exp((double) c.logit - best->logit);
        if (&c != best && (!second || more_probable(c, *second))) {
            second = &c;
        }
    }
    const float margin = second ? best->logit - second->logit : std::numeric_limits<float>::infinity();
    return { best->id, (float) (1.0/total), margin, 0.0 };
}

knapspec_sampler::outcome knapspec_sampler::argmax_of_row(float best, float second, llama_token top) {
    return { top, (float) (1.0/weight_of_row(best, 1.0f)), best - second, 0.0 };
}

// Among a list. `before`: a race that somebody won who may not, on the scale of this list's best; its other participants
// (those with a key) arrive when they would have, and who was not among them starts now. Given how that race ended, both
// have their whole time still before them, so the winner is distributed as in a race of its own, and still shares its noise.
knapspec_sampler::outcome knapspec_sampler::race(const candidates & list, const outcome * before) {
    const double infinity = std::numeric_limits<double>::infinity();
    const float  best     = best_logit(list);
    const candidate * winner = nullptr;
    double first_time = infinity, second_time = infinity, total = 0.0;
    for (const candidate & c : list) {
        double time = log_time(noise, c.id, c.logit, best, draw_inverse);
        if (before && c.key == 0.0f) {
            time = log_add(before->log_time, time);
        }
        total += std::exp(((double) c.logit - best)*draw_inverse);
        if (!winner || time < first_time) {
            second_time = first_time;
            first_time  = time;
            winner      = &c;
        } else if (time < second_time) {
            second_time = time;
        }
    }
    const double weight = std::exp(((double) winner->logit - best)*draw_inverse);
    return { winner->id, (float) (weight/total), (float) (second_time - first_time), first_time };
}

// Calls arrive(token, logit) for the tokens from `floor` up to `best` that may arrive before time(), which is on the scale of `best`:
// since -log(u) >= 1 - u, a token whose 1 - u is not below the time it has to beat needs no logarithm. The likely ones, which
// are the most probable of the row, go first, so that there is a time to beat. Returns the weight of all.
template <typename time_to_beat, typename arrival>
double knapspec_sampler::arrivals(
        const candidates & likely, float best, float floor, const time_to_beat & time, const arrival & arrive) const {
    for (const candidate & c : likely) {
        if (c.logit <= best && c.logit >= floor) {
            arrive(c.id, c.logit);
        }
    }
    const candidate last = *std::max_element(likely.begin(), likely.end(), more_probable);
    const bool whole = best_logit(likely) <= best;

    float   x[BLOCK], weights[BLOCK], early[BLOCK];
    int32_t hit[BLOCK/LANES];
    double  total = 0.0;
    for (int32_t begin = 0; begin < n_row; begin += BLOCK) {
        const int n = n_row - begin < BLOCK ? n_row - begin : BLOCK;
        if (!whole) {
            drop_above(row + begin, x, n, best);
        }
        exp_block(whole ? row + begin : x, weights, n, best, floor, (float) draw_inverse);
        const float sum = sum_block(weights, n);
        if (!(sum > 0.0f)) {
            continue; // none in between
        }
        total += sum;
        if (given.ids) {
            noise_block(noise, given.ids + begin, early, n);
        } else {
            noise_block(noise, begin, early, n);
        }
        int padded = n;
        for (; padded % LANES; ++padded) {
            weights[padded] = 0.0f;
            early  [padded] = 1.0f;
        }
        // single precision only rules out, with room for its error
        const float limit = (float) std::min<double>(time()*1.00001, std::numeric_limits<float>::max());
        if (!any_before(early, weights, padded, limit, hit)) {
            continue;
        }
        for (int j = 0; j < n; ++j) {
            const float       logit = row[begin + j];
            const llama_token id    = id_at(begin + j);
            if (!hit[j/LANES]) {
                j += LANES - 1;
            } else if (early[j] < limit*weights[j] && more_probable(last, { logit, id, 0.0f, 0.0f })) {
                arrive(id, logit);
            }
        }
    }
    return total;
}

// Among the whole row down to `floor`. Needs scan().
knapspec_sampler::outcome knapspec_sampler::race_row(float best, float floor) {
    const double infinity = std::numeric_limits<double>::infinity();
    const auto weight = [&](float x) { return std::exp(((double) x - best)*draw_inverse); };
    double  first_time = infinity, second_time = infinity;
    llama_token winner = 0;
    float       winning = best; // its logit
    most_probable(N_LIKELY, kept);
    const double total = arrivals(kept, best, floor, [&] { return second_time; }, [&](llama_token id, float logit) {
        const double time = -std::log1p(-one_minus_uniform(noise, id)) / weight(logit);
        if (time < first_time) {
            second_time = first_time;
            first_time  = time;
            winner      = id;
            winning     = logit;
        } else if (time < second_time) {
            second_time = time;
        }
    });
    const float margin = std::isfinite(second_time) ? (float) std::log(second_time/first_time)
                                                    : std::numeric_limits<float>::infinity();
    return { winner, (float) (weight(winning)/total), margin, std::log(first_time) };
}

//
// grammar
//

void knapspec_sampler::keep_allowed(knapspec_grammar & grammar, candidates & list) {
    ids.resize(list.size());
    for (size_t i = 0; i < list.size(); ++i) {
        ids[i] = list[i].id;
    }
    std::unique_ptr<bool[]> allowed(new bool[list.size()]);
    grammar.test(ids.data(), ids.size(), allowed.get());
    size_t n = 0;
    for (size_t i = 0; i < list.size(); ++i) {
        if (allowed[i]) {
            list[n++] = list[i];
        }
    }
    list.resize(n);
}

void knapspec_sampler::gather_allowed(knapspec_grammar & grammar, candidates & out) {
    grammar.likely(given.n_vocab, ids);
    out.clear();
    for (const llama_token id : ids) {
        const int32_t place = given.place_of(id);
        if (place >= 0 && row[place] > LOWEST) {
            out.push_back({ row[place], id, 0.0f, 0.0f });
        }
    }
    keep_allowed(grammar, out);
}

// The most probable tokens that the grammar allows, at least n, best first: `out`, out of those `tested`. Returns true if these
// are all that it allows, in no order; `tested` then means nothing.
bool knapspec_sampler::most_probable_allowed(knapspec_grammar & grammar, size_t n, candidates & tested, candidates & out) {
    const size_t size = std::max(N_LIKELY, 2*n);
    most_probable(size, tested);
    const bool all = tested.size() < size;
    std::sort(tested.begin(), tested.end(), more_probable);
    out = tested;
    keep_allowed(grammar, out);
    if (all || out.size() >= n) {
        return all;
    }
    // Where few tokens are allowed, most fall by their first byte
    gather_allowed(grammar, out);
    return true;
}

// About which share of what is allowed a token of this logit has, where `total` is the weight of the whole row down to
// `floor` and up to `best`. What was not tested is taken to be allowed as often as what was.
float knapspec_sampler::share_of_allowed(
        const candidates & tested, const candidates & allowed, float best, float floor, double total, float logit) const {
    const auto weight = [&](float x) { return std::exp(((double) x - best)*draw_inverse); };
    const auto sum = [&](const candidates & list) {
        double weights = 0.0;
        for (const candidate & c : list) {
            weights += c.logit <= best && c.logit >= floor ? weight(c.logit) : 0.0;
        }
        return weights;
    };
    const double known = sum(tested), fits = sum(allowed);
    const double all   = fits + std::max(0.0, total - known)*fits/known;
    return (float) std::min(1.0, weight(logit)/all);
}

// Who of the whole row arrives first and is allowed, where that is among the first few. Times are on the scale of the best
// that is allowed; what is above it is not.
bool knapspec_sampler::first_allowed(
        const knapspec_sampling & s, const outcome & before, float best, float floor, outcome & out) {
    constexpr size_t N_FIRST = 64;
    struct arrival { double time; llama_token id; };
    const auto earlier = [](const arrival & a, const arrival & b) { return a.time < b.time; };

    const float  best_allowed = allowed[0].logit;
    const float  lower = min_p_floor(best_allowed, s.min_p);
    const double start = before.log_time + ((double) best_allowed - best)*draw_inverse;
    std::vector<arrival> arrived; // a heap, the latest on top
    double latest = std::numeric_limits<double>::infinity(); // to be beaten, not as a logarithm
    const double total = arrivals(kept, best_allowed, lower, [&] { return latest; }, [&](llama_token id, float logit) {
        double time = log_time(noise, id, logit, best_allowed, draw_inverse);
        if (logit < floor) {
            time = log_add(start, time);
        }
        if (arrived.size() == N_FIRST) {
            if (!(time < arrived.front().time)) {
                return;
            }
            std::pop_heap(arrived.begin(), arrived.end(), earlier);
            arrived.pop_back();
        }
        arrived.push_back({ time, id });
        std::push_heap(arrived.begin(), arrived.end(), earlier);
        if (arrived.size() == N_FIRST) {
            latest = std::exp(arrived.front().time);
        }
    });
    std::sort_heap(arrived.begin(), arrived.end(), earlier);
    bool fits[N_FIRST];
    ids.clear();
    for (const arrival & a : arrived) {
        ids.push_back(a.id);
    }
    s.grammar->test(ids.data(), ids.size(), fits);
    const size_t at = std::find(fits, fits + arrived.size(), true) - fits;
    if (at == arrived.size()) {
        return false;
    }
    const size_t next = std::find(fits + at + 1, fits + arrived.size(), true) - fits;
    out.token    = ids[at];
    out.prob     = share_of_allowed(kept, allowed, best_allowed, lower, total, given.logit(ids[at]));
    out.log_time = arrived[at].time;
    out.margin   = next < arrived.size() ? (float) (arrived[next].time - arrived[at].time) : std::numeric_limits<float>::infinity();
    return true;
}

// The pick among what the grammar allows, after it has rejected that of the race before.
int32_t knapspec_sampler::again(
        const knapspec_sampling & s, const outcome & before, float best, float floor, outcome & out) {
    const bool  draws    = s.temperature > 0.0f;
    const bool  filtered = filters(s);
    const bool  narrow   = filtered && s.top_k > 0 && s.top_k < n_row;
    if (!draws && !filtered) {
        scan(); // all others needed that before
    }

    if (filtered) {
        first.clear();
        for (const candidate & c : chosen) {
            first.push_back(c.id);
        }
        std::sort(first.begin(), first.end());
    }
    // Best first, until what matters is found: nothing needs to be known about the rest
    if (!filtered || narrow) {
        const size_t n   = narrow ? s.top_k : draws ? 1 : 2;
        const bool   all = most_probable_allowed(*s.grammar, n, kept, allowed);
        if (allowed.empty()) {
            return KNAPSPEC_DEAD_END;
        }
        if (!filtered && !all && !draws) {
            const double total = weight_of_row(best, 1.0f);
            const float logit = allowed[0].logit;
            out = { allowed[0].id, share_of_allowed(kept, allowed, best, LOWEST, total, logit), logit - allowed[1].logit, 0.0 };
            return KNAPSPEC_OK;
        }
        if (!filtered && !all && first_allowed(s, before, best, floor, out)) {
            return KNAPSPEC_OK;
        }
        if (!filtered && !all) {
            gather_allowed(*s.grammar, allowed);
        }
        if (filtered && allowed.size() > (size_t) s.top_k) {
            std::nth_element(allowed.begin(), allowed.begin() + s.top_k, allowed.end(), more_probable);
            allowed.resize(s.top_k);
        }
    } else {
        gather_allowed(*s.grammar, allowed);
        if (allowed.empty()) {
            return KNAPSPEC_DEAD_END;
        }
    }
    filter(allowed, s, stage::typical);
    if (!draws) {
        out = best_of(allowed);
        return KNAPSPEC_OK;
    }
    for (candidate & c : allowed) {
        const bool raced = filtered ? std::binary_search(first.begin(), first.end(), c.id) : c.logit >= floor;
        c.key = raced ? 1.0f : 0.0f;
    }
    outcome moved = before;
    moved.log_time += ((double) best_logit(allowed) - best)*draw_inverse;
    out = race(allowed, &moved);
    return KNAPSPEC_OK;
}

int32_t knapspec_sampler::pick(
        const knapspec_row      & logits_of,
        const knapspec_sampling & s,
        int64_t                   position,
        const llama_token       * text,
        size_t                    n_text,
        llama_token             * token_out,
        float                   * prob_out,
        float                   * margin_out) {
    begin(logits_of);
    float * logits = given.logits;
    const bool draws = s.temperature > 0.0f;
    // finite also for the smallest temperatures
    const float inverse = draws ? 1.0f/std::fmax(s.temperature, std::numeric_limits<float>::min()) : 1.0f;
    draw_inverse   = inverse;
    filter_inverse = s.temperature_first ? inverse : 1.0f;
    noise          = noise_of(s.seed, position);

    const bool constrained = s.grammar && position >= s.answer_start;
    if (constrained && position - s.answer_start > (int64_t) n_text) {
        return KNAPSPEC_BAD_ARGUMENT;
    }
    change(logits, s, text, n_text);

    outcome found;
    int32_t ret  = KNAPSPEC_OK;
    float   best = LOWEST, floor = LOWEST;
    if (filters(s)) {
        best = scan();
        if (!std::isfinite(best)) {
            ret = KNAPSPEC_BAD_LOGITS;
        } else {
            if (s.top_k > 0 && s.top_k < n_row) {
                most_probable(s.top_k, chosen);
                filter(chosen, s, stage::typical);
            } else if (s.typical_p < 1.0f) {
                keep_typical_of_row(best, s.typical_p);
                filter(chosen, s, stage::top_p);
            } else {
                keep_top_p_of_row(best, s.top_p);
                filter(chosen, s, stage::min_p);
            }
            found = draws ? race(chosen) : best_of(chosen);
            // onto the scale of the row
            found.log_time -= ((double) best_logit(chosen) - best)*draw_inverse;
        }
    } else {
        best_two two = { LOWEST, LOWEST };
        if (draws) {
            best = scan();
        } else {
            two  = find_best(row, n_row);
            best = two.first;
        }
        if (!std::isfinite(best)) {
            ret = KNAPSPEC_BAD_LOGITS;
        } else if (draws) {
            floor = min_p_floor(best, s.min_p);
            found = race_row(best, floor);
        } else {
            int32_t top = 0;
            while (row[top] != best) {
                top++;
            }
            llama_token token = id_at(top);
            while (given.ids && ++top < n_row) {
                token = row[top] == best ? std::min(token, given.ids[top]) : token;
            }
            found = argmax_of_row(best, two.second, token);
        }
    }
    if (ret == KNAPSPEC_OK && constrained) {
        const size_t n_answer = (size_t) (position - s.answer_start);
        bool allowed = false;
        s.grammar->move_to(text + n_text - n_answer, n_answer);
        s.grammar->test(&found.token, 1, &allowed);
        if (!allowed) {
            const outcome before = found;
            ret = again(s, before, best, floor, found);
            if (ret == KNAPSPEC_DEAD_END && s.grammar->is_complete()) {
                ret = KNAPSPEC_COMPLETE;
            }
        }
    }
    while (!edits.empty()) { // the latest first: a token may be there twice
        logits[edits.back().place] = edits.back().logit;
        edits.pop_back();
    }
    if (ret == KNAPSPEC_OK) {
        *token_out  = found.token;
        *prob_out   = found.prob;
        *margin_out = found.margin;
    }
    return ret;
}

int32_t knapspec_sampler::logprobs(
        float       * logits,
        int32_t       n_logits,
        llama_token   token,
        int32_t       n,
        float       * logprob_out,
        llama_token * tokens_out,
        float       * logprobs_out) {
    begin({ logits, n_logits });
    const float best = scan();
    if (!std::isfinite(best) || token < 0 || token >= n_row || n < 0) {
        return KNAPSPEC_BAD_ARGUMENT;
    }
    const double log_total = std::log(weight_of_row(best, 1.0f));
    *logprob_out = (float) ((double) row[token] - best - log_total);
    if (n == 0) {
        return 0;
    }
    most_probable(n, kept);
    std::sort(kept.begin(), kept.end(), more_probable);
    for (size_t i = 0; i < kept.size(); ++i) {
        tokens_out[i]   = kept[i].id;
        logprobs_out[i] = (float) ((double) kept[i].logit - best - log_total);
    }
    return (int32_t) kept.size();
}

extern "C" int32_t knapspec_pick(
        const float             * logits,
        int32_t                   n_vocab,
        const knapspec_sampling * sampling,
        int64_t                   position,
        const llama_token       * history,
        int32_t                   n_history,
        llama_token             * token_out,
        float                   * prob_out,
        float                   * margin_out) {
    static thread_local knapspec_sampler sampler;
    static thread_local std::vector<float> copy;
    copy.assign(logits, logits + n_vocab);
    return sampler.pick(
            { copy.data(), n_vocab }, *sampling, position, history, n_history, token_out, prob_out, margin_out);
}
