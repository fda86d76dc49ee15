// Picks tokens from rows of logits as struct knapspec_sampling says. Holds scratch memory only: a pick is a function of the
// row, the text before it, and the settings.
#pragma once

#include "knapspec.h"

#include <cmath>
#include <cstddef>
#include <vector>

// Logits of one place: of all tokens in order, or of some in any order. All others then count as impossible.
struct knapspec_row {
    float             * logits;
    int32_t             n_vocab;
    int32_t             n      = n_vocab; // logits
    const llama_token * ids    = nullptr; // by place in the row; nullptr: the place itself
    const int32_t     * places = nullptr; // by token: its place; outside 0 .. n-1 where it has none

    // -1 where it has none
    int32_t place_of(llama_token token) const {
        const int32_t place = token < 0 || token >= n_vocab ? -1 : places ? places[token] : token;
        return place < n ? place : -1;
    }
    // NaN where it has none
    float logit(llama_token token) const {
        const int32_t place = place_of(token);
        return place < 0 ? NAN : logits[place];
    }
};

class knapspec_sampler {
public:
    // Picks the token behind a text of `position` tokens, of which text[0..n_text) are the last. The row is changed and put
    // back. KNAPSPEC_OK, or KNAPSPEC_BAD_LOGITS, KNAPSPEC_BAD_ARGUMENT, KNAPSPEC_DEAD_END,
    // KNAPSPEC_COMPLETE.
    int32_t pick(
            const knapspec_row      & logits,
            const knapspec_sampling & sampling,
            int64_t                   position,
            const llama_token       * text,
            size_t                    n_text,
            llama_token             * token_out,
            float                   * prob_out,
            float                   * margin_out);

    // Settings that take the most probable token and change nothing.
    static knapspec_sampling greedy();

    // Whether a pick looks at the text before it.
    static bool needs_text(const knapspec_sampling & sampling);

    // The n most probable tokens, best first, and the log-probability of `token`; how many there are.
    int32_t logprobs(
            float       * logits,
            int32_t       n_logits,
            llama_token   token,
            int32_t       n,
            float       * logprob_out,
            llama_token * tokens_out,
            float       * logprobs_out);

    struct candidate {
        float       logit;
        llama_token id;
        float       weight; // exp(logit - best), at the temperature of the filters
        float       key;    // distance from the typical logit; in a second race: whether it was in the first
    };
    using candidates = std::vector<candidate>;

private:
    struct outcome {
        llama_token token;
        float       prob;
        float       margin;
        double      log_time; // when it arrived, for a second race; see log_time()
    };

    struct edit {
        int32_t place;
        float   logit;
    };

    // one row being picked from
    knapspec_row  given = {};
    const float * row    = nullptr; // its logits
    int32_t       n_row  = 0;
    uint64_t      noise  = 0; // of the position
    float         filter_inverse = 1.0f; // 1/temperature that filters see
    double        draw_inverse   = 1.0;  // 1/temperature that the draw sees

    std::vector<float>       maxima;  // of interleaved parts of the row
    std::vector<float>       sorted;  // scratch
    std::vector<edit>        edits;
    std::vector<llama_token> window;
    std::vector<int32_t>     counts;  // by token, all zero between two picks
    candidates               chosen;  // what the filters left
    candidates               kept;    // scratch
    candidates               allowed; // by the grammar, of those
    std::vector<llama_token> ids;     // scratch
    std::vector<llama_token> first;   // tokens of the first race, ascending

    llama_token id_at(int32_t place) const { return given.ids ? given.ids[place] : place; }
    void begin(const knapspec_row & logits);

    void change(float * logits, const knapspec_sampling & sampling, const llama_token * text, size_t n_text);

    float  scan();
    double weight_of_row(float best, float inverse) const;
    void gather(float low, float high, candidates & out) const;
    void most_probable(size_t n, candidates & out);
    void weigh(candidates & list, float best, float inverse) const;

    bool filters(const knapspec_sampling & sampling) const;
    enum class stage { typical, top_p, min_p };
    void filter(candidates & list, const knapspec_sampling & sampling, stage first);
    void keep_typical_of_row(float best, float p);
    void keep_typical(candidates & list, float p);
    void keep_top_p_of_row(float best, float p);
    void keep_top_p(candidates & list, float p);
    float min_p_floor(float best, float p) const;

    outcome best_of(const candidates & list);
    outcome race(const candidates & list, const outcome * before = nullptr);
    outcome race_row(float best, float floor);
    template <typename time_to_beat, typename arrival>
    double  arrivals(
            const candidates & likely, float best, float floor, const time_to_beat & time, const arrival & arrive) const;
    outcome argmax_of_row(float first, float second, llama_token top);

    void    keep_allowed(knapspec_grammar & grammar, candidates & list);
    void    gather_allowed(knapspec_grammar & grammar, candidates & out);
    bool    most_probable_allowed(knapspec_grammar & grammar, size_t n, candidates & tested, candidates & out);
    bool    first_allowed(const knapspec_sampling & s, const outcome & before, float best, float floor, outcome & out);
    float   share_of_allowed(
            const candidates & tested, const candidates & allowed, float best, float floor, double total, float logit) const;
    int32_t again(const knapspec_sampling & sampling, const outcome & before, float best, float floor, outcome & out);
};
