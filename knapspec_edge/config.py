"""Every tunable of the package, with its unit and the reason for its default."""

from __future__ import annotations

from dataclasses import dataclass, replace

# What llama.cpp can be asked for. Beyond it, numbers wrap around or its worker threads crash.
CTX_TOKENS_MAX = 2**31 - 1  # positions are signed 32-bit numbers
THREADS_MAX = 512  # GGML_MAX_N_THREADS
GPU_LAYERS_MAX = 2**31 - 1
# What proposes the plans that are judged, the default first: the knapsack and the search over
# hidden states, or the latter alone, as published.
GENERATORS = ("knapspec", "knapspec-paper")
# What a text has to be the same to, the default first: see Engine.open.
EXACTNESS = ("default", "strict")
# Whether and how to speculate, the default first; or a plan file.
SPECS = ("auto", "on", "lookup", "off")
# Kinds of prompts that `bench` makes.
BENCH_TASKS = ("summarize", "code", "qa", "chat", "reason")
# What a chat does where its context is full, the default first: say so, or drop the oldest turns.
OVERFLOWS = ("stop", "drop")


@dataclass(frozen=True)
class Config:
    """Defaults. Policy never stands as a literal in a loop; it stands here."""

    # context
    ctx_tokens: int = 4096  # modest by default: 128k-token models must start on an 8 GB laptop
    max_verify_tokens: int = 32  # widest verification pass; rows of logits are reserved for it
    prefill_slice_tokens: int = 512  # an interrupt on a GPU is noticed between slices
    # A chat that may forget its oldest turns does so where less than the first share of the context
    # is left for an answer, until the second is. What stays has to be computed again, so that it is
    # better done seldom; llama.cpp's context shift drops half of it, too.
    overflow_min_room_share: float = 0.125
    overflow_room_share: float = 0.5
    # Allocated graphs kept alive per context: one for drafts, one per usual width of verification.
    # Each takes 2 MB and two rows of logits per token; building one again costs about 1 ms.
    kept_graphs: int = 6

    # Where a draft skips a sublayer it adds the mean of what that added to the latest tokens. One
    # verification in so many is looked at for these means; 0: skipped sublayers add nothing.
    repair_interval: int = 1

    # Cells of the cache beyond the context, for passes beside the text that judge plans.
    beside_tokens: int = 128

    # drafting
    draft_max_tokens: int = 8  # γ tried by the planner: 1..this
    draft_min_probability: float = 0.7  # the paper's stop threshold
    # A draft may multiply a part of the head's rows only: of the vocabulary's tokens, so many.
    head_shares: tuple[float, ...] = (0.125, 0.25, 0.5)
    head_rows_step: int = 256  # such a head has a multiple of so many rows
    # of the smallest head, for tokens of the text that are not in it anyway
    head_text_share: float = 0.25
    head_min_share: float = 0.05  # of a step: a cheaper head is not shortened
    short_head: bool = True  # whether plans with one are considered

    # exactness: where passes over several tokens are compared with passes over one
    exact_verify_tokens: int = 16  # widest such pass; --exact strict verifies no more at once
    # behind so many tokens, the second just before the padded cache grows; and at the context's end
    exact_context_tokens: tuple[int, ...] = (24, 250)
    exact_long_widths: tuple[int, ...] = (2, 3, 4, 8, 16)  # there, where passes take long

    # first measurement
    measure_budget_seconds: float = 15.0
    measure_context_tokens: int = 256
    # a decision at a context that was asked for gets the budget once more for so many tokens of it
    measure_budget_context_tokens: int = 512
    measure_window_tokens: int = 48  # tokens on which single-sublayer agreement is judged
    measure_limit_tokens: int = 4096  # longest context of a first measurement; later ones go on
    measure_verify_max: int = 9  # verification cost is measured at 1..this tokens
    measure_overrun: float = 1.5  # times the budget, after which each phase makes do with less
    measure_max_spread: float = 0.5  # quartile distance / median of a step; above, not believed
    measure_retry_seconds: float = 3600.0  # a result that is not believed is measured again after
    measure_min_context_tokens: int = 32  # a slow model's prompt is shortened down to this
    measure_block_tokens: int = 16  # width of a probing pass; a draft sees no more of its own keys
    measure_min_probes: int = 8  # single-skip probes that even the slowest model gets

    # latency profile
    profile_min_context_tokens: int = 128
    profile_classes_per_kind: int = 6  # sublayers of more than so many sorts are merged
    profile_visit_drift: float = 0.15  # change of a plain step in a visit; above, it is not counted
    profile_max_thrown_away: int = 20  # visits; from then on they count all the same
    profile_max_spread: float = (
        0.15  # quartile distance / median of a plain step; above, it is said
    )
    profile_overrun: float = 1.5  # times the budget, after which even the indispensable is dropped

    profile_ctx_tokens: int = 32768  # longest context that `profile` takes by itself
    profile_memory_share: float = 0.25  # of a device's, for a context that nobody asked for
    profile_budget_seconds: tuple[float, float] = (30.0, 180.0)  # for small and for large models
    profile_long_context_tokens: int = 2048  # at which item fidelity is counted a second time

    # settings of a context
    expected_context_tokens: int = 1024  # where nothing is known about prompt and answer
    settings_margin: float = 0.03  # gain that a change of the default setting asks for

    # drift of the machine against its profile
    drift_kept_rounds: int = 64
    # long enough for drift_min_rounds of the plain steps that auto takes between drafting rounds
    drift_memory_rounds: int = 512
    drift_min_rounds: int = 16
    drift_bound: float = 0.3  # relative; beyond it, it is reported and measured again

    # summaries
    # A longer document is split: attention over longer prompts costs more than splitting does, and
    # small models lose track in them.
    summarize_ctx_tokens: int = 8192
    summarize_part_words: int = 100  # of a part's summary, at least
    # by other processes
    summarize_idle_seconds: float = 900.0  # then a model is closed that nobody asks
    dask_connect_seconds: float = 5.0  # for whatever a scheduler that is there answers at once
    dask_poll_seconds: float = 0.5  # between two looks at which workers there are
    dask_wait_seconds: float = 60.0  # without any worker; longer than it takes to start one again
    dask_losses: int = 3  # of workers over one document, as often as Dask itself retries

    # first planner
    plan_floor_agreement: float = 0.75  # an item whose single skip agrees less is never skipped
    plan_rounding_error: float = 0.04  # of the cheapest sublayer's cost in whole units
    plan_shortlist: int = 6  # candidates whose joint agreement is measured
    plan_judge_tokens: int = 33  # a window to judge plans on is at least so long, room permitting
    plan_judge_block_tokens: int = 8  # about the length of a draft, see measure_block_tokens
    plan_finalists: int = 2  # candidates timed in real rounds
    plan_fresh_tokens: int = 64  # tokens after the window on which finalists are judged afresh
    plan_margin: float = 0.05  # predicted gain that auto asks for; covers noise of a short window

    # Windows of attention in drafts: it reads the first tokens and so many of the most recent ones.
    # (): none, the items are skipped or kept. Offered only where the context is longer than a
    # window by this factor, or there is nothing to save.
    window_tokens: tuple[int, ...] = (256, 1024)
    window_sink_tokens: int = 4  # without any, most of what a window keeps is lost
    window_least_context: float = 2.0
    # of one sublayer where it was not measured: all of them together were seen to keep 0.90
    window_expected_agreement: float = 0.995

    # planner while decoding
    bucket_first_tokens: int = 512  # contexts up to here share their plans; then up to twice, ...
    plan_share: float = 0.01  # of decode time, spent on judging plans beside the text
    plan_share_kept_seconds: float = 2.0  # of that share, saved for later at most
    plan_hysteresis: float = 0.03  # gain that a change from the plan in use to another asks for
    plan_interval_rounds: int = 64  # between two looks at the plans
    plan_min_window_tokens: int = 16  # fewer new tokens are not judged on
    plan_kept_places: int = 384  # judged places kept per plan and bucket; older ones are forgotten
    plan_trust_places: int = 40  # judged at a bucket before speculation may begin there
    # standard errors of the band that acceptance should stay in; looked at after every round, so
    # that chance has many tries
    plan_confidence: float = 3.0
    plan_fading_tokens: int = 128  # after which what a plan was judged on counts for half
    calibration_memory_tokens: float = 512.0  # drafted tokens that acceptance is estimated from

    # lookup in prompt and answer
    lookup_places: int = 16  # of those where the latest two tokens stood, looked at anew per token
    # Tokens proposed: with the plain step and a draft's passes no more widths than graphs are kept.
    lookup_lengths: tuple[int, ...] = (1, 2, 3, 5, 7)
    lookup_margin_tokens: float = 0.05  # gain per round that a proposal has to promise
    lookup_session_matches: float = 256.0  # of each sort, that older ones fade by
    lookup_answer_matches: float = 48.0  # the same within one answer
    lookup_session_weight: float = 16.0  # matches that what is known beforehand counts for
    lookup_answer_weight: float = 4.0  # and in an answer, what was seen in those before it
    lookup_measure_seconds: float = 5.0  # of the verification curve, where lookups are all there is
    lookup_pace_rounds: float = 32.0  # rounds that the price of time is taken from
    lookup_loss_steps: float = 3.0  # plain steps an answer may lose before lookups end in it

    # search over hidden states
    dp_min_cosine: float = 0.5  # the paper's τ
    dp_budget_share: float = 0.5  # of the total weight, skipped at most (the paper's K/2)
    dp_window_tokens: int = 8  # about the length of a draft
    dp_max_branches: int = 8  # alive at once; window x branches is a pass of 64 tokens
    dp_paper_window_tokens: int = 55  # 5 rounds of 10 drafted tokens and one more
    dp_paper_weight_cap: int = 5  # of the published code
    dp_paper_rounds: int = 5  # rounds whose tokens are the reference window
    dp_paper_interval_rounds: int = 64  # between two searches
    dp_paper_max_draft: int = 10  # γ = 1..this
    dp_measure_window_tokens: int = 32  # of a search during a measurement, where there is time
    dp_rounding_error: float = 0.25  # of the cheapest sublayer's cost: fewer units, fewer branches
    dp_measure_share: float = 0.15  # of a measurement's time

    # policies that are compared with, as published where nothing else is said
    layerskip_exit_share: float = 0.25  # of the layers that a draft runs: 8 of 32
    layerskip_max_draft: int = 6
    kangaroo_exit_layers: int = 2
    kangaroo_max_draft: int = 6
    kangaroo_min_probability: float = 0.6
    del_decay: float = 0.95  # of a shadow token's weight, with each later one
    del_max_draft: int = 17
    del_shadow_tokens: int = 8  # new ones that are waited for: here they cost a pass of their own
    asd_skip_share: float = 0.5  # of the attention sublayers between the first and the last layer
    asd_window_tokens: int = 32  # of the context, that similarities are measured on
    draft_verify_max_draft: int = 8
    draft_verify_evaluations: int = 1000
    draft_verify_seconds: float = 120.0  # of the search here; published: hours
    draft_verify_new_tokens: int = 32  # of an answer that a mask is timed on
    draft_verify_prompt_tokens: int = 64  # of each of the two prompts, of the calibration text
    # the controller of its stop threshold, which ASD has as well
    controller_start: float = 0.8
    controller_target: float = 0.9  # share of drafted tokens to be accepted
    controller_memory: float = 0.5  # of the mean of that share, per round
    controller_step: float = 0.01
    controller_weight: float = 0.1  # of a changed threshold
    swift_skip_share: float = 0.45  # of the sublayers between the first and the last layer
    swift_max_draft: int = 25
    swift_min_probability: float = 0.8
    swift_window_tokens: int = 50  # of the answer, that masks are scored on
    swift_bayes_interval: int = 25  # every so many candidates one is no random one
    swift_good_score: float = 0.93  # the search ends above it,
    swift_patience: int = 300  # after so many candidates without a better one,
    swift_candidates: int = 1000  # and after so many in all
    bayes_kappa: float = 2.5  # standard deviations of the upper confidence bound
    clasp_skip_share: float = 0.25  # of the layers
    clasp_max_draft: int = 10
    clasp_interval_rounds: int = 64
    lookup_max_ngram: int = 4  # tokens of the end of the text that are looked for, and at least
    lookup_min_ngram: int = 2
    lookup_max_draft: int = 8
    llama_cpp_lookup_ngram: int = 2  # llama-cpp-python's own defaults
    llama_cpp_lookup_draft: int = 10
    draft_model_max_draft: int = 8
    draft_model_min_probability: float = 0.75  # llama.cpp's; a token below is not proposed
    random_saving_share: float = 0.2  # of a step, where there is no plan to be as cheap as
    random_max_draft: int = 8

    # documents: some hundred books; beyond it, it is a disk image or a dump by mistake
    document_bytes_max: int = 256 * 2**20  # of a file, and of the text that an archive unpacks to

    # online guard (auto only)
    guard_plain_rounds: int = 3  # plain steps that measure the speed speculation has to beat
    guard_interval_rounds: int = 64  # drafting rounds between two such measurements
    guard_kept_steps: int = 9  # plain steps (and rounds) that medians are taken of
    guard_slack: float = 0.02  # slower than plain by no more than this is not called a loss
    guard_loss_steps: float = 6.0  # plain steps an answer may lose before speculation is given up
    guard_stall: float = 2.0  # a round that takes longer than this times the usual was stalled


DEFAULTS = Config()


def without_windows(config: Config) -> Config:
    """The same, but for drafts whose sublayers are skipped or kept, and nothing else."""
    return replace(config, window_tokens=())
