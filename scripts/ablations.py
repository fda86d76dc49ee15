"""What single parts of the published method are worth here, beside what its paper says of them.

    python scripts/ablations.py model.gguf
    python scripts/ablations.py model.gguf --contexts 256,2048 --budget 600
    python scripts/ablations.py model.gguf --only objectives correlation

* layers: the best plan over single sublayers against the best over whole layers.
* objectives: drafts chosen by TPT with measured costs, by the paper's TPT, by tokens per layer, and
  by acceptance, from the same judged plans.
* threshold: the search over hidden states with other cosines τ below which states are dropped.
* window: the same search on shorter and longer reference windows.
* interval: the published method end to end, with other numbers of rounds between two searches.
* sampling: the same forced draft greedily and at temperature 0.7 (--preset paper).
* correlation: TPT and acceptance of forced plans against their measured speed, at each context and
  pooled (check_search.py correlate, whose tables are printed).
* kinds: what the best plan leaves out, by context (check_search.py attention-share).

Plans are made, judged and timed on answers to different prompts; every timing alternates with
plain decoding. Prints tables, then each statement of the paper with what was found, a verdict and
the rule by which it was given, and as the last line one line of JSON. A verdict is about this model
on this machine and takes at least five visits; a timing is never a pass or a fail. Run it with the
project's Python, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import _measuring as measuring  # noqa: E402
import check_search  # noqa: E402
from _measuring import percent  # noqa: E402
from _rounds import (  # noqa: E402
    FITTED_OFFSET,
    LENGTHS,
    TIMED_OFFSETS,
    Place,
    Show,
    Timed,
    never,
    pearson,
    quartiles,
    spearman,
)

from knapspec_edge.config import DEFAULTS  # noqa: E402
from knapspec_edge.decode.policy import FixedPolicy, Policy  # noqa: E402
from knapspec_edge.decode.session import Session  # noqa: E402
from knapspec_edge.errors import ContextError, Interrupted, PlanError, UsageError  # noqa: E402
from knapspec_edge.latency.fidelity import Fidelity  # noqa: E402
from knapspec_edge.policies.knapspec_paper import PaperPolicy, best_pair  # noqa: E402
from knapspec_edge.records import GREEDY, Draft, Kind, Plan, Sampling, Stats  # noqa: E402
from knapspec_edge.sampling import PRESETS  # noqa: E402
from knapspec_edge.search import hidden_state  # noqa: E402
from knapspec_edge.search.acceptance import Judgement  # noqa: E402
from knapspec_edge.search.knapsack import sweep  # noqa: E402
from knapspec_edge.search.throughput import expected_tokens_geometric  # noqa: E402
from knapspec_edge.terminal import Terminal  # noqa: E402

CONTEXTS = (256, 2048, 6144)
SAVINGS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)  # shares of a step, of the plans that are judged
THRESHOLDS = (-1.0, 0.3, 0.5, 0.7, 0.9)
WINDOWS = (4, 8, 16, 32, 55)
INTERVALS = (16, 64, 256)
DP_WINDOW = 16  # tokens, where the window is not what is changed
LONG_ANSWER_TOKENS = 320  # of `interval`: some searches even at 64 rounds
SAMPLED_ANSWER_TOKENS = 96
PAPER_THRESHOLD, PAPER_INTERVAL = DEFAULTS.dp_min_cosine, DEFAULTS.dp_paper_interval_rounds
CORRELATED_PLANS = 24
FIDELITY_SHARE, JUDGED_SHARE = 0.3, 0.5  # of a part's time

# How far measured ratios may be apart and count as equal.
SLACK = 0.02
# Visits (or pairs of them) below which a measured ratio decides about nothing.
LEAST_VISITS = 5


# ---------------------------------------------------------------------------------------------
# Plans


def grouped_plans(
    place: Place, fidelity: Fidelity, groups: Sequence[Sequence[int]], savings: Sequence[float]
) -> list[Plan]:
    """Plans of the exact knapsack over groups of sublayers that are left out together, one near
    each saving, none twice."""
    weights, _ = place.costs.integer_weights(
        place.context_tokens, largest_error=place.config.plan_rounding_error
    )
    known = {item.index: item for item in fidelity.agreements(place.sublayers)}
    units = np.zeros((len(groups), 2), dtype=np.int64)
    losses = np.zeros((len(groups), 2), dtype=np.float64)
    losses[:, 1] = np.inf
    for row, group in enumerate(groups):
        items = [known[i] for i in group if i in known]
        weight = sum(1 if place.costs.blind else int(weights[i]) for i in group)
        floor = place.config.plan_floor_agreement
        if weight and len(items) == len(group) and all(x.agreement >= floor for x in items):
            units[row, 1], losses[row, 1] = weight, sum(x.loss for x in items)
    found = sweep(units, losses, front=True, load=False)
    n = len(place.sublayers)
    ladder = [
        Plan.skipping(n, [i for g in np.flatnonzero(options) for i in groups[int(g)]])
        for options in found.options
        if options.any()
    ]
    near = (check_search.nearest_saving(place, ladder, saving) for saving in savings)
    return list(dict.fromkeys(plan for plan in near if plan is not None))


def single_groups(place: Place) -> list[list[int]]:
    return [[s.index] for s in place.sublayers]


def layer_groups(place: Place) -> list[list[int]]:
    """The sublayers of each layer."""
    found: dict[int, list[int]] = {}
    for s in place.sublayers:
        found.setdefault(s.layer, []).append(s.index)
    return list(found.values())


# ---------------------------------------------------------------------------------------------
# What was found


@dataclass(frozen=True)
class Row:
    """One variant of one part at one context."""

    part: str
    context_tokens: int
    variant: str
    saving: float = math.nan  # share of a step
    alpha: float = math.nan
    draft_tokens: int = 0
    predicted_ratio: float = math.nan
    ratios: tuple[float, ...] = ()  # of each visit, against plain decoding around it
    search_ms: float = math.nan
    search_tokens: float = math.nan  # full passes over one token that evaluate as much
    plan_share: float = math.nan  # of the decode time
    skipped: tuple[int, ...] = ()

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios) if self.ratios else math.nan


@dataclass
class Found:
    rows: list[Row] = field(default_factory=list)
    forced: list[check_search.Forced] = field(default_factory=list)
    shares: list[check_search.Share] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def of(self, part: str, variant: str) -> dict[int, Row]:
        """By context."""
        return {r.context_tokens: r for r in self.rows if r.part == part and r.variant == variant}


@dataclass(frozen=True)
class Asked:
    place: Place
    seconds: float
    show: Show
    rng: random.Random
    found: Found

    def left(self, started: float, share: float = 1.0) -> float:
        return max(0.0, share * self.seconds - (self.place.clock() - started))


def timed_row(part: str, place: Place, variant: str, judgement: Judgement, t: Timed) -> Row:
    draft = t.draft
    predicted_ms = place.predicted_ms(judgement, draft.max_tokens, draft.min_probability)
    return Row(
        part,
        place.context_tokens,
        variant,
        place.saving(draft.plan),
        judgement.agreement,
        draft.max_tokens,
        place.step_ms / predicted_ms,
        tuple(t.ratios),
        skipped=draft.plan.skipped,
    )


# ---------------------------------------------------------------------------------------------
# The parts


def layers(asked: Asked) -> None:
    place, started = asked.place, asked.place.clock()
    fidelity = place.fidelity(asked.left(started, FIDELITY_SHARE))
    families = {"sublayers": single_groups(place), "whole layers": layer_groups(place)}
    best: list[tuple[str, Judgement, Draft]] = []
    for name, groups in families.items():
        plans = grouped_plans(place, fidelity, groups, SAVINGS)
        if not plans:
            asked.found.notes.append(f"{place.context_tokens:,} tokens: no plan of {name}")
            continue
        judged = place.judge(plans, asked.left(started, JUDGED_SHARE) / 2, asked.show)
        judgement = max(judged, key=lambda j: place.best_draft(j)[1])
        best.append((name, judgement, place.best_draft(judgement)[0]))
    timed = place.time([draft for _, _, draft in best], asked.left(started), asked.show)
    for (name, judgement, _), t in zip(best, timed, strict=True):
        asked.found.rows.append(timed_row("layers", place, name, judgement, t))


TPT, PAPER_TPT, PER_LAYER, ACCEPTANCE = "TPT", "paper's TPT", "tokens per layer", "acceptance"


def per_layer(plan: Plan, alpha: float, gamma: int) -> float:
    """Tokens per evaluated sublayer: TPT where each costs the same and nothing else costs."""
    n = len(plan.modes)
    tokens = expected_tokens_geometric(alpha, gamma)
    return tokens / (gamma * (n - len(plan.skipped)) + n)


def by_objective(place: Place, judgements: Sequence[Judgement]) -> dict[str, tuple[Judgement, int]]:
    """(plan, γ) that each objective prefers. Acceptance says nothing about γ: TPT chooses it."""
    lengths = [gamma for gamma in LENGTHS if gamma < place.costs.max_width]
    pairs = [(j, gamma) for j in judgements for gamma in lengths]

    def speed(j: Judgement, gamma: int) -> float:
        return 1.0 / place.predicted_ms(j, gamma, place.config.draft_min_probability)

    surest = max(judgements, key=lambda j: (j.agreement, place.saving(j.plan)))
    return {
        TPT: max(pairs, key=lambda p: speed(*p)),
        PAPER_TPT: max(pairs, key=lambda p: place.paper(p[0].plan, p[0].agreement, p[1])),
        PER_LAYER: max(pairs, key=lambda p: per_layer(p[0].plan, p[0].agreement, p[1])),
        ACCEPTANCE: (surest, max(lengths, key=lambda gamma: speed(surest, gamma))),
    }


def objectives(asked: Asked) -> None:
    place, started = asked.place, asked.place.clock()
    fidelity = place.fidelity(asked.left(started, FIDELITY_SHARE))
    plans = grouped_plans(place, fidelity, single_groups(place), SAVINGS)
    if not plans:
        raise PlanError(f"no sublayer can be left out at {place.context_tokens} tokens")
    judged = place.judge(plans, asked.left(started, JUDGED_SHARE), asked.show)
    chosen = by_objective(place, judged)
    threshold = place.config.draft_min_probability
    drafts = {name: Draft(j.plan, gamma, threshold) for name, (j, gamma) in chosen.items()}
    # those that agree are timed as one
    different = list(dict.fromkeys(drafts.values()))
    timed = place.time(different, asked.left(started), asked.show)
    by_draft = dict(zip(different, timed, strict=True))
    for name, (judgement, _) in chosen.items():
        row = timed_row("objectives", place, name, judgement, by_draft[drafts[name]])
        asked.found.rows.append(row)


def _searched(asked: Asked, part: str, variants: Mapping[str, hidden_state.Settings]) -> None:
    """The search over hidden states with each of the settings on the same text; its plan, chosen as
    published, is judged on other text. Not timed in rounds: the speed is that predicted from what
    was judged."""
    place, started = asked.place, asked.place.clock()
    n_tokens = max(s.window_tokens for s in variants.values()) + 1
    prompt = place.prompt(FITTED_OFFSET)
    with place.session.generate(prompt, is_end=never, max_tokens=n_tokens) as answer:
        tokens = [*prompt, *(event.token for event in answer)]
    weights = hidden_state.weights_at(
        place.costs, place.context_tokens, len(place.sublayers), place.config
    )
    chosen: list[tuple[str, hidden_state.SearchCost, Draft]] = []
    for name, settings in variants.items():
        reference = hidden_state.latest_reference(tokens, len(tokens) - 1, settings.window_tokens)
        asked.show(f"{part} {name}", len(chosen) / len(variants))
        found = hidden_state.search(place.backend, reference, weights, settings)
        draft = best_pair(place.costs, place.context_tokens, found.survivors, place.config)
        if draft is None:
            asked.found.rows.append(
                Row(
                    part, place.context_tokens, name, search_ms=found.cost.ms,
                    search_tokens=found.cost.forward_tokens,
                )
            )  # fmt: skip
        else:
            chosen.append((name, found.cost, draft))
    if not chosen:
        return
    plans = [draft.plan for _, _, draft in chosen]
    judged = place.judge(plans, asked.left(started), asked.show)
    for (name, cost, _), judgement in zip(chosen, judged, strict=True):
        best, ratio = place.best_draft(judgement)
        asked.found.rows.append(
            Row(
                part,
                place.context_tokens,
                name,
                place.saving(best.plan),
                judgement.agreement,
                best.max_tokens,
                ratio,
                search_ms=cost.ms,
                search_tokens=cost.forward_tokens,
                skipped=best.plan.skipped,
            )
        )


def threshold_name(cosine: float) -> str:
    return "none" if cosine <= -1.0 else f"τ = {cosine:g}"


def threshold(asked: Asked) -> None:
    paper = replace(hidden_state.Settings.paper(asked.place.config), window_tokens=DP_WINDOW)
    _searched(
        asked,
        "threshold",
        {threshold_name(cosine): replace(paper, min_cosine=cosine) for cosine in THRESHOLDS},
    )


def window_name(n_tokens: int) -> str:
    return f"{n_tokens} tokens"


def window(asked: Asked) -> None:
    paper = hidden_state.Settings.paper(asked.place.config)
    _searched(asked, "window", {window_name(r): replace(paper, window_tokens=r) for r in WINDOWS})


def answer_of(
    session: Session, prompt: Sequence[int], policy: Policy, sampling: Sampling, n_tokens: int
) -> Stats:
    with session.generate(
        prompt, sampling=sampling, policy=policy, is_end=never, max_tokens=n_tokens
    ) as answer:
        for _ in answer:
            pass
    return answer.stats


def ms_per_token(stats: Stats) -> float:
    return stats.predicted_ms / max(1, stats.completion_tokens - 1)


def _whole_answers(
    asked: Asked,
    part: str,
    n_tokens: int,
    variants: Mapping[str, tuple[Callable[[], Policy], Sampling]],
) -> dict[str, Row]:
    """Whole answers of each variant, each beside a plain answer with the same sampling, on one
    prompt after the other: as many as there is time for, one at least."""
    place, started = asked.place, asked.place.clock()
    ratios: dict[str, list[float]] = {name: [] for name in variants}
    shares: dict[str, list[float]] = {name: [] for name in variants}
    accepted: dict[str, list[float]] = {name: [] for name in variants}
    number = 0
    while True:
        prompt = place.prompt(TIMED_OFFSETS[number % len(TIMED_OFFSETS)])
        for name in list(variants)[:: 1 if number % 2 == 0 else -1]:
            create, sampling = variants[name]
            asked.show(f"{part}: {name}", min(1.0, 1.0 - asked.left(started) / asked.seconds))
            plain = answer_of(place.session, prompt, FixedPolicy(None), sampling, n_tokens)
            stats = answer_of(place.session, prompt, create(), sampling, n_tokens)
            ratios[name].append(ms_per_token(plain) / ms_per_token(stats))
            shares[name].append(stats.plan_ms / stats.predicted_ms)
            if stats.acceptance is not None:
                accepted[name].append(stats.acceptance)
        number += 1
        spent = place.clock() - started
        if spent * (number + 1) / number > asked.seconds or number == 4 * len(TIMED_OFFSETS):
            break
    return {
        name: Row(
            part,
            place.context_tokens,
            name,
            alpha=statistics.fmean(accepted[name]) if accepted[name] else math.nan,
            ratios=tuple(ratios[name]),
            plan_share=statistics.median(shares[name]),
        )
        for name in variants
    }


def interval_name(rounds: int) -> str:
    return f"every {rounds} rounds"


def interval(asked: Asked) -> None:
    place = asked.place

    def paper(rounds: int) -> Callable[[], Policy]:
        config = replace(place.config, dp_paper_interval_rounds=rounds)
        return lambda: PaperPolicy(place.backend, place.costs, config)

    variants = {interval_name(rounds): (paper(rounds), GREEDY) for rounds in INTERVALS}
    found = _whole_answers(asked, "interval", LONG_ANSWER_TOKENS, variants)
    asked.found.rows += found.values()


GREEDILY, SAMPLED = "greedy", "temperature 0.7"


def sampling(asked: Asked) -> None:
    place, started = asked.place, asked.place.clock()
    fidelity = place.fidelity(asked.left(started, FIDELITY_SHARE))
    plans = grouped_plans(place, fidelity, single_groups(place), SAVINGS)
    if not plans:
        raise PlanError(f"no sublayer can be left out at {place.context_tokens} tokens")
    judged = place.judge(plans, asked.left(started, JUDGED_SHARE), asked.show)
    judgement = max(judged, key=lambda j: place.best_draft(j)[1])
    draft, predicted = place.best_draft(judgement)

    def forced() -> Policy:
        return FixedPolicy(draft)

    left = replace(asked, seconds=max(1e-3, asked.left(started)))
    found = _whole_answers(
        left,
        "sampling",
        SAMPLED_ANSWER_TOKENS,
        {
            GREEDILY: (forced, GREEDY),
            SAMPLED: (forced, replace(PRESETS["paper"], seed=asked.rng.randrange(2**31))),
        },
    )
    asked.found.rows += [
        replace(
            row,
            saving=place.saving(draft.plan),
            draft_tokens=draft.max_tokens,
            predicted_ratio=predicted if name == GREEDILY else math.nan,
            skipped=draft.plan.skipped,
        )
        for name, row in found.items()
    ]


def correlation(asked: Asked) -> None:
    asked.found.forced += check_search.correlate_at(
        asked.place, CORRELATED_PLANS, asked.seconds, asked.rng, asked.show
    )


def kinds(asked: Asked) -> None:
    asked.found.shares.append(check_search.share_at(asked.place, 12, asked.seconds, asked.show))


# name -> (what is done at each context, its share of the time)
PARTS: dict[str, tuple[Callable[[Asked], None], float]] = {
    "layers": (layers, 1.0),
    "objectives": (objectives, 1.0),
    "threshold": (threshold, 0.8),
    "window": (window, 0.8),
    "interval": (interval, 1.5),
    "sampling": (sampling, 1.0),
    "correlation": (correlation, 1.5),
    "kinds": (kinds, 0.6),
}


# ---------------------------------------------------------------------------------------------
# Verdicts

CONFIRMED, NOT_CONFIRMED, NOT_TESTABLE = "confirmed", "not confirmed", "not testable"


@dataclass(frozen=True)
class Verdict:
    statement: str  # of the paper
    found: str
    verdict: str
    rule: str


def paired(a: Mapping[int, Row], b: Mapping[int, Row]) -> list[float]:
    """Differences a - b of the ratios of the same visit at the same context."""
    return [
        x - y
        for context, row in a.items()
        if context in b
        for x, y in zip(row.ratios, b[context].ratios, strict=False)
    ]


def _too_few(n: int) -> str:
    return f"{n} visits; it takes {LEAST_VISITS}" if n else "–"


def _spread(values: Sequence[float]) -> str:
    low, median, high = quartiles(values)
    return f"{median:+.3f} ({low:+.3f} to {high:+.3f})"


def decoupling(found: Found) -> list[Verdict]:
    differences = paired(found.of("layers", "sublayers"), found.of("layers", "whole layers"))
    faster = "Skipping attention and MLP separately is faster than skipping whole layers"
    much = "It adds 0.1 to 0.2 to the speed-up on average"
    rule = "lower quartile of the paired differences of speed-ups above 0"
    rule_much = "their median at least 0.1"
    if len(differences) < LEAST_VISITS:
        said = _too_few(len(differences))
        return [
            Verdict(faster, said, NOT_TESTABLE, rule),
            Verdict(much, said, NOT_TESTABLE, rule_much),
        ]
    low, median, _ = quartiles(differences)
    said = f"difference {_spread(differences)} in {len(differences)} pairs"
    return [
        Verdict(faster, said, CONFIRMED if low > 0.0 else NOT_CONFIRMED, rule),
        Verdict(much, said, CONFIRMED if median >= 0.1 else NOT_CONFIRMED, rule_much),
    ]


def best_objective(found: Found) -> Verdict:
    statement = "TPT is the better objective than acceptance or tokens per layer"
    rule = f"at no context is another's median speed-up above that of TPT by more than {SLACK}"
    own = found.of("objectives", TPT)
    visits = min((len(r.ratios) for r in own.values()), default=0)
    if visits < LEAST_VISITS:
        return Verdict(statement, _too_few(visits), NOT_TESTABLE, rule)
    losses = []
    words = []
    for name in (PAPER_TPT, PER_LAYER, ACCEPTANCE):
        other = found.of("objectives", name)
        differences = [own[c].ratio - other[c].ratio for c in own if c in other]
        if differences:
            words.append(f"{name} {min(differences):+.3f} to {max(differences):+.3f}")
            if name != PAPER_TPT:
                losses += differences
    if not losses:
        return Verdict(statement, "–", NOT_TESTABLE, rule)
    verdict = CONFIRMED if min(losses) >= -SLACK else NOT_CONFIRMED
    return Verdict(statement, "TPT minus " + ", ".join(words), verdict, rule)


def pruning(found: Found) -> Verdict:
    statement = f"τ = {PAPER_THRESHOLD:g} saves search time without loss"
    rule = (
        f"at all contexts 5 % less time than without, and a predicted speed at most {SLACK} lower"
    )
    own = found.of("threshold", threshold_name(PAPER_THRESHOLD))
    without = found.of("threshold", threshold_name(-1.0))
    pairs = [(own[c], without[c]) for c in own if c in without]
    pairs = [p for p in pairs if not any(math.isnan(r.predicted_ratio) for r in p)]
    if not pairs:
        return Verdict(statement, "–", NOT_TESTABLE, rule)
    times = [a.search_tokens / b.search_tokens for a, b in pairs]
    losses = [b.predicted_ratio - a.predicted_ratio for a, b in pairs]
    good = max(times) <= 0.95 and max(losses) <= SLACK
    said = f"work × {min(times):.2f} to {max(times):.2f}"
    said += f", loss {min(losses):+.3f} to {max(losses):+.3f}"
    return Verdict(statement, said, CONFIRMED if good else NOT_CONFIRMED, rule)


def reference(found: Found) -> Verdict:
    longest = window_name(max(WINDOWS))
    statement = "A window of some rounds is enough to search on"
    rule = f"at all contexts the plan found on 32 tokens is predicted within {SLACK} of {longest}"
    own, other = found.of("window", window_name(32)), found.of("window", longest)
    differences = [other[c].predicted_ratio - own[c].predicted_ratio for c in own if c in other]
    differences = [d for d in differences if not math.isnan(d)]
    if not differences:
        return Verdict(statement, "–", NOT_TESTABLE, rule)
    verdict = CONFIRMED if max(differences) <= SLACK else NOT_CONFIRMED
    said = f"{longest} minus 32: {min(differences):+.3f} to {max(differences):+.3f}"
    return Verdict(statement, said, verdict, rule)


def overhead(found: Found) -> Verdict:
    statement = f"A search every {PAPER_INTERVAL} rounds is a small share of the time"
    rule = "at most 5 % of the decode time at all contexts"
    rows = found.of("interval", interval_name(PAPER_INTERVAL)).values()
    shares = [r.plan_share for r in rows if not math.isnan(r.plan_share)]
    if not shares:
        return Verdict(statement, "–", NOT_TESTABLE, rule)
    verdict = CONFIRMED if max(shares) <= 0.05 else NOT_CONFIRMED
    return Verdict(statement, f"{percent(min(shares))} to {percent(max(shares))}", verdict, rule)


def seldom(found: Found) -> Verdict:
    statement = "Searching seldom is faster (an independent run: 256 rounds against 64)"
    rule = "lower quartile of the paired differences of speed-ups above 0"
    a, b = (found.of("interval", interval_name(rounds)) for rounds in (256, 64))
    differences = paired(a, b)
    if len(differences) < LEAST_VISITS:
        return Verdict(statement, _too_few(len(differences)), NOT_TESTABLE, rule)
    verdict = CONFIRMED if quartiles(differences)[0] > 0.0 else NOT_CONFIRMED
    return Verdict(statement, f"difference {_spread(differences)}", verdict, rule)


def under_sampling(found: Found) -> Verdict:
    statement = "Gains stay at temperature 0.7"
    rule = "where greedy decoding gains at all: it does at 0.7 too, and at most 0.1 less"
    greedy, warm = found.of("sampling", GREEDILY), found.of("sampling", SAMPLED)
    pairs = [(greedy[c].ratio, warm[c].ratio) for c in greedy if c in warm]
    said = ", ".join(f"{a:.2f}× and {b:.2f}×" for a, b in pairs) or "–"
    visits = min((len(r.ratios) for r in [*greedy.values(), *warm.values()]), default=0)
    if visits < LEAST_VISITS:
        return Verdict(statement, _too_few(visits), NOT_TESTABLE, rule)
    gains = [(a, b) for a, b in pairs if a > 1.0]
    if not gains:
        return Verdict(statement, f"greedy and warm {said}: no gain to keep", NOT_TESTABLE, rule)
    good = all(b > 1.0 and a - b <= 0.1 for a, b in gains)
    verdict = CONFIRMED if good else NOT_CONFIRMED
    return Verdict(statement, f"greedy and warm {said}", verdict, rule)


def correlation_gap(
    forced: Sequence[check_search.Forced], draws: int = 2000
) -> tuple[float, float, float, float, float]:
    """Pearson of the paper's TPT and of acceptance with the measured speed, pooled, and their
    difference with its 95 % interval by resampling plans: (TPT, acceptance, difference, low, high).
    Not numbers where something does not vary."""
    speed = np.array([f.measured for f in forced])  # f64 [plans]
    tpt = np.array([f.paper for f in forced])
    accepted = np.array([f.acceptance for f in forced])

    def gap(rows: NDArray[np.intp]) -> tuple[float, float]:
        return pearson(tpt[rows], speed[rows]), pearson(accepted[rows], speed[rows])  # type: ignore[arg-type]

    a, b = gap(np.arange(len(forced)))
    rng = np.random.default_rng(0)
    found = [gap(rng.integers(0, len(forced), len(forced))) for _ in range(draws)]
    differences = [x - y for x, y in found if not math.isnan(x - y)]
    if not differences:
        return a, b, math.nan, math.nan, math.nan
    low, high = np.quantile(differences, (0.025, 0.975))
    return a, b, a - b, float(low), float(high)


def predictors(found: Found) -> list[Verdict]:
    better = "TPT tells throughput better than acceptance does (Pearson 0.837 against 0.538)"
    rule_better = "pooled over contexts, 95 % interval of the difference above 0"
    well = "TPT and throughput correlate (Pearson 0.837)"
    rule_well = "at least 0.8 pooled"
    forced = [f for f in found.forced if not math.isnan(f.acceptance)]
    a, b, gap, low, high = correlation_gap(forced) if len(forced) > 3 else (math.nan,) * 5
    if math.isnan(gap):
        return [
            Verdict(better, "–", NOT_TESTABLE, rule_better),
            Verdict(well, "–", NOT_TESTABLE, rule_well),
        ]
    said = f"{a:.3f} against {b:.3f}, difference {low:+.3f} to {high:+.3f}, {len(forced)} plans"
    return [
        Verdict(better, said, CONFIRMED if low > 0.0 else NOT_CONFIRMED, rule_better),
        Verdict(well, f"{a:.3f}", CONFIRMED if a >= 0.8 else NOT_CONFIRMED, rule_well),
    ]


def growing(found: Found) -> list[Verdict]:
    attention = "More attention sublayers are left out as the context grows"
    rule = "rank correlation of their share with the context above 0.5, three contexts or more"
    mlp = "The MLPs left out stay about as many"
    rule_mlp = "their share changes by at most 0.1"
    if len(found.shares) < 3 or Kind.ATTENTION.value not in found.shares[0].best:
        return [
            Verdict(attention, "–", NOT_TESTABLE, rule),
            Verdict(mlp, "–", NOT_TESTABLE, rule_mlp),
        ]
    contexts = [float(s.context_tokens) for s in found.shares]
    shares = [s.best[Kind.ATTENTION.value] for s in found.shares]
    rank = spearman(contexts, shares)
    grows = not math.isnan(rank) and rank > 0.5
    others = [s.best.get(Kind.MLP.value, 0.0) for s in found.shares]
    change = max(others) - min(others)
    return [
        Verdict(
            attention,
            " → ".join(percent(x) for x in shares),
            CONFIRMED if grows else NOT_CONFIRMED,
            rule,
        ),
        Verdict(
            mlp,
            " → ".join(percent(x) for x in others),
            CONFIRMED if change <= 0.1 else NOT_CONFIRMED,
            rule_mlp,
        ),
    ]


def faster(found: Found) -> Verdict:
    statement = "The published method is faster than plain decoding (1.06 and more)"
    rule = "lower quartile of its speed-up above 1 at all contexts, searches included"
    rows = found.of("interval", interval_name(PAPER_INTERVAL)).values()
    visits = min((len(r.ratios) for r in rows), default=0)
    if visits < LEAST_VISITS:
        return Verdict(statement, _too_few(visits), NOT_TESTABLE, rule)
    said = ", ".join(f"{r.context_tokens:,}: {r.ratio:.2f}×" for r in rows)
    good = all(quartiles(r.ratios)[0] > 1.0 for r in rows)
    return Verdict(statement, said, CONFIRMED if good else NOT_CONFIRMED, rule)


def verdicts(found: Found) -> list[Verdict]:
    return [
        faster(found),
        *decoupling(found),
        best_objective(found),
        *predictors(found),
        pruning(found),
        reference(found),
        overhead(found),
        seldom(found),
        under_sampling(found),
        *growing(found),
    ]


# ---------------------------------------------------------------------------------------------
# Tables


def _cell(value: float, form: str) -> str:
    return "–" if math.isnan(value) else form.format(value)


def rows_table(rows: Sequence[Row]) -> list[str]:
    heads = ["part", "context", "variant", "saves", "α", "γ", "predicted / plain"]
    heads += ["measured / plain (quartiles)", "search ms", "in full passes", "of decode time"]
    lines = []
    for r in rows:
        measured = "–"
        if r.ratios:
            low, median, high = quartiles(r.ratios)
            measured = f"{median:.2f} ({low:.2f}–{high:.2f}), {len(r.ratios)} visits"
        lines.append(
            [
                r.part,
                f"{r.context_tokens:,}",
                r.variant,
                "–" if math.isnan(r.saving) else percent(r.saving),
                _cell(r.alpha, "{:.2f}"),
                str(r.draft_tokens or "–"),
                _cell(r.predicted_ratio, "{:.2f}"),
                measured,
                _cell(r.search_ms, "{:,.0f}"),
                _cell(r.search_tokens, "{:,.0f}"),
                "–" if math.isnan(r.plan_share) else percent(r.plan_share),
            ]
        )
    return measuring.table(heads, lines)


def verdict_table(found: Sequence[Verdict]) -> list[str]:
    heads = ["the paper says", "found here", "verdict", "by this rule"]
    return measuring.table(heads, [[v.statement, v.found, v.verdict, v.rule] for v in found])


# ---------------------------------------------------------------------------------------------
# The program


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],  # type: ignore[union-attr]
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("models", nargs=1, metavar="MODEL", help="path, or name of the manifest")
    add("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART",
        help=f"of {', '.join(PARTS)}")  # fmt: skip
    add("--contexts", default=",".join(map(str, CONTEXTS)), metavar="N,N,...", help="in tokens")
    add(
        "--budget",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="in all; no variant gets less than one visit, so a short one is exceeded",
    )
    add("--profile-budget", type=float, default=30.0, metavar="SECONDS",
        help="of the latency profile, where none is stored")  # fmt: skip
    add("--fresh", action="store_true", help="measure the latency profile anew")
    add("--seed", type=int, default=0, help="of random plans and of sampling")
    measuring.add_settings(parser)
    return parser


def part_table(name: str, found: Found) -> list[str]:
    """What a part has shown, in its own form."""
    if name == "correlation":
        shown = found.forced
        return check_search.correlation_table(check_search.correlations(shown)) if shown else []
    if name == "kinds":
        return check_search.share_table(found.shares) if found.shares else []
    own = [r for r in found.rows if r.part == name]
    return rows_table(own) if own else []


def measure(options: argparse.Namespace, terminal: Terminal, found: Found) -> dict[str, Any]:
    """Run the parts, each of which is printed when it is done. What they show goes to `found`."""
    contexts = check_search.parse_contexts(options.contexts)
    rng = random.Random(options.seed)
    # room for the longest answer behind the longest prompt
    longest = contexts[-1] + LONG_ANSWER_TOKENS
    names = [name for name in PARTS if name in options.only]
    total = sum(PARTS[name][1] for name in names)
    with check_search.prepared(options, options.models[0], longest, terminal) as opened:
        session = Session(opened.backend)
        for name in names:
            body, share = PARTS[name]
            seconds = options.budget * share / total
            for context, part in check_search.budgets(opened.costs, contexts, seconds).items():
                place = opened.place(session, context)
                show = opened.show(f"{name} at {context:,} tokens")
                try:
                    body(Asked(place, part, show, rng, found))
                except (PlanError, ContextError) as error:
                    found.notes.append(f"{name} at {context:,} tokens: {error}")
            terminal.clear_progress()
            terminal.text("\n".join(["", *part_table(name, found)]) + "\n")
        return opened.data


def _conclude(terminal: Terminal, found: Found, data: Mapping[str, Any]) -> None:
    judged = verdicts(found)
    lines = ["", *verdict_table(judged), "", *(f"* {note}" for note in found.notes)]
    terminal.text("\n".join(lines) + "\n")
    record = {
        "command": "ablations",
        **data,
        "rows": [asdict(r) for r in found.rows],
        "forced": [asdict(f) for f in found.forced],
        "shares": [asdict(s) for s in found.shares],
        "verdicts": [asdict(v) for v in judged],
        "notes": found.notes,
    }
    terminal.text(f"\n{measuring.json_line(record)}\n")


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)

    def body(terminal: Terminal) -> None:
        measuring.check_settings(options)
        for name in ("budget", "profile_budget"):
            if not 0.0 < getattr(options, name) < math.inf:
                raise UsageError(f"--{name.replace('_', '-')} must be a number of seconds above 0")
        check_search.parse_contexts(options.contexts)  # before the model is loaded
        found = Found()
        data: dict[str, Any] = {}
        try:
            data = measure(options, terminal, found)
        except (KeyboardInterrupt, Interrupted):
            found.notes.append("interrupted: this is what was measured until then")
            _conclude(terminal, found, data)
            raise
        _conclude(terminal, found, data)

    return measuring.run_guarded(body)


if __name__ == "__main__":
    sys.exit(main())
