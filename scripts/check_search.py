"""What the search is worth: predictions, plans and planted models against the real decoding loop.

    python scripts/check_search.py correlate model.gguf --contexts 256,1024,4096,8192 --plans 30
    python scripts/check_search.py generators model.gguf --contexts 256,4096
    python scripts/check_search.py attention-share model.gguf --csv share.csv --plot share.png
    python scripts/check_search.py planted planted.gguf deep.gguf

* correlate: predicted tokens per time (TPT) of forced plans against their measured tokens per
  second, the same for the acceptance rate alone and for the paper's TPT.
* generators: plans of about equal cost from the knapsack, from the paper's dynamic program over
  hidden states, and at random, side by side.
* attention-share: the share of attention sublayers that the best plan leaves out, by context.
* planted: the plan that is found in a model of scripts/plant_model.py against the planted one.

Plans are judged on answers to other prompts than those that are timed. Each timing alternates with
plain decoding and counts in plain steps timed around it; plans take turns. Prints Markdown and, as
the last line, one line of JSON. A timing here is never a pass or a fail. Run it with the project's
Python, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import _measuring as measuring  # noqa: E402
import plant_model  # noqa: E402
from _measuring import percent, random_plans  # noqa: E402
from _rounds import (  # noqa: E402
    FITTED_OFFSET,
    JUDGED_TOKENS,
    LENGTHS,
    Place,
    Prompts,
    Show,
    bound,
    never,
    pearson,
    prompts_of,
    quartiles,
    spearman,
)

from knapspec_edge import gguf_check, models, native  # noqa: E402
from knapspec_edge.config import CTX_TOKENS_MAX, DEFAULTS, Config  # noqa: E402
from knapspec_edge.decode.session import Session  # noqa: E402
from knapspec_edge.errors import ContextError, PlanError, UsageError  # noqa: E402
from knapspec_edge.latency import kept  # noqa: E402
from knapspec_edge.latency.costs import Costs  # noqa: E402
from knapspec_edge.latency.fidelity import Fidelity  # noqa: E402
from knapspec_edge.latency.profiler import measure_latency  # noqa: E402
from knapspec_edge.latency.store import Store  # noqa: E402
from knapspec_edge.records import Draft, Kind, Plan  # noqa: E402
from knapspec_edge.search import hidden_state, planner  # noqa: E402
from knapspec_edge.search.candidates import candidate_plans, cuts, draft_lengths  # noqa: E402
from knapspec_edge.terminal import Terminal  # noqa: E402
from knapspec_edge.text.calibration import calibration_tokens  # noqa: E402
from knapspec_edge.text.templates import choose_template  # noqa: E402

CONTEXTS = (256, 1024, 4096, 8192)
LEAST_CONTEXT_TOKENS = 64
MARGIN_TOKENS = 128  # of a context, behind the prompt
THRESHOLDS = (0.0, DEFAULTS.draft_min_probability)
# Shares of the budget of a context after which fidelity and judging make do with what they have.
FIDELITY_SHARE, JUDGED_SHARE = 0.2, 0.45
SAVINGS = (0.1, 0.2, 0.3, 0.4)  # shares of a step at which generators are compared
EQUAL_SAVING = 0.25  # share of a step at which attention shares are compared between contexts


# ---------------------------------------------------------------------------------------------
# Generators of plans


def knapsack_ladder(place: Place, fidelity: Fidelity) -> list[Plan]:
    """The plans of the exact knapsack, by growing saving."""
    found = cuts(place.costs, fidelity, place.context_tokens, place.sublayers, place.config)
    return [cut.plan for cut in found]


def nearest_saving(place: Place, plans: Sequence[Plan], saving: float) -> Plan | None:
    """The plan whose saving is nearest; None without any."""
    return min(plans, key=lambda p: abs(place.saving(p) - saving), default=None)


def knapsack_plans(
    place: Place, fidelity: Fidelity, savings: Sequence[float], rng: random.Random
) -> list[Plan]:
    del rng
    ladder = knapsack_ladder(place, fidelity)
    return [p for s in savings if (p := nearest_saving(place, ladder, s)) is not None]


def random_equal_plans(
    place: Place, fidelity: Fidelity, savings: Sequence[float], rng: random.Random
) -> list[Plan]:
    """Random sets that save about as much. First and last layer stay, as in the paper."""
    del fidelity
    last = max(s.layer for s in place.sublayers)
    free = [s.index for s in place.sublayers if 0 < s.layer < last]
    n = len(place.sublayers)
    found = []
    for saving in savings:
        order = rng.sample(free, len(free))
        ladder = [Plan.skipping(n, order[: k + 1]) for k in range(len(order))]
        plan = nearest_saving(place, ladder, saving)
        if plan is not None:
            found.append(plan)
    return found


def _hidden_state_plans(
    place: Place, savings: Sequence[float], settings: hidden_state.Settings
) -> list[Plan]:
    """The paper's dynamic program, on the last tokens of an answer that is neither judged nor
    timed. Raises PlanError or ContextError where it is impossible."""
    # one more token: the pick after the last one in the cache
    n_tokens = max(JUDGED_TOKENS, settings.window_tokens) + 1
    prompt = place.prompt(FITTED_OFFSET)
    with place.session.generate(prompt, is_end=never, max_tokens=n_tokens) as answer:
        tokens = [*prompt, *(event.token for event in answer)]
    reference = hidden_state.latest_reference(tokens, len(tokens) - 1, settings.window_tokens)
    costs_ms = [place.costs.saving_ms(s.index, place.context_tokens) for s in place.sublayers]
    weights = hidden_state.paper_weights(costs_ms, place.config.dp_paper_weight_cap)
    found = hidden_state.search(place.backend, reference, weights, settings)
    ladder = [survivor.plan for survivor in found.survivors if survivor.plan.skipped]
    return [p for s in savings if (p := nearest_saving(place, ladder, s)) is not None]


def bounded_search_plans(
    place: Place, fidelity: Fidelity, savings: Sequence[float], rng: random.Random
) -> list[Plan]:
    """The paper's dynamic program, bounded for a small machine."""
    del fidelity, rng
    return _hidden_state_plans(place, savings, hidden_state.Settings.bounded(place.config))


def paper_search_plans(
    place: Place, fidelity: Fidelity, savings: Sequence[float], rng: random.Random
) -> list[Plan]:
    """The paper's dynamic program as published."""
    del fidelity, rng
    return _hidden_state_plans(place, savings, hidden_state.Settings.paper(place.config))


Generator = Callable[[Place, Fidelity, Sequence[float], random.Random], list[Plan]]

# By the names that tables and records use.
GENERATORS: dict[str, Generator] = {
    "knapsack": knapsack_plans,
    "hidden-state": bounded_search_plans,
    "hidden-state-paper": paper_search_plans,
    "random": random_equal_plans,
}


def forced_plans(
    place: Place, fidelity: Fidelity, count: int, rng: random.Random
) -> list[tuple[str, Plan]]:
    """(family, plan): about a third each from the knapsack, at random among sublayers that do
    little harm, and at random among all."""
    n = len(place.sublayers)
    ladder = knapsack_ladder(place, fidelity)
    found: list[tuple[str, Plan]] = []
    seen: set[tuple[int, ...]] = set()

    def add(family: str, plan: Plan, most: int) -> None:
        if plan.skipped and plan.skipped not in seen and len(found) < most:
            seen.add(plan.skipped)
            found.append((family, plan))

    third = count // 3
    deepest = max((place.saving(p) for p in ladder), default=0.0)
    for k in range(third):
        plan = nearest_saving(place, ladder, deepest * (k + 1) / third)
        if plan is not None:
            add("knapsack", plan, third)
    harmless = [
        item.index
        for item in fidelity.agreements(place.sublayers)
        if item.agreement >= place.config.plan_floor_agreement
    ]
    for _ in range(50 * third):
        if not harmless or len(found) >= 2 * third:
            break
        size = rng.randint(1, max(1, len(harmless) // 2))
        # any mix of kinds, not only the even one
        lean = rng.random()
        order = sorted(
            harmless,
            key=lambda i: (
                rng.random() ** (lean if place.sublayers[i].kind is Kind.MLP else 1.0 - lean)
            ),
        )
        add("harmless", Plan.skipping(n, order[:size]), 2 * third)
    for skipped in random_plans(rng, n, 2 * count, seen):
        add("random", Plan.skipping(n, list(skipped)), count)
    return found


# ---------------------------------------------------------------------------------------------
# correlate


@dataclass(frozen=True)
class Forced:
    """One forced plan at one context. Speeds in tokens per second unless they are ratios."""

    context_tokens: int
    family: str
    skipped: tuple[int, ...]
    draft_tokens: int
    min_probability: float
    alpha: float  # judged
    acceptance: float  # of the timed rounds
    predicted: float
    geometric: float
    paper: float  # in tokens per second of sublayers alone
    measured: float
    predicted_ratio: float
    measured_ratio: float
    ratio_quartiles: tuple[float, float, float]  # of the visits
    visits: int
    rounds: int
    drafted: int
    plain_quartiles: tuple[float, float, float]  # tokens per second


def correlate_at(
    place: Place, count: int, seconds: float, rng: random.Random, show: Show
) -> list[Forced]:
    started = place.clock()

    def left(share: float) -> float:
        """Seconds until this share of the budget is spent."""
        return max(0.0, share * seconds - (place.clock() - started))

    fidelity = place.fidelity(left(FIDELITY_SHARE))
    plans = forced_plans(place, fidelity, count, rng)
    judgements = place.judge([plan for _, plan in plans], left(JUDGED_SHARE), show)
    lengths = [gamma for gamma in LENGTHS if gamma < place.costs.max_width]
    drafts = [
        Draft(plan, lengths[k % len(lengths)], THRESHOLDS[k % len(THRESHOLDS)])
        for k, (_, plan) in zip(rng.sample(range(len(plans)), len(plans)), plans, strict=True)
    ]
    timed = place.time(drafts, left(1.0), show)
    plain = [1000.0 / ms for t in timed for ms in t.plain_ms]
    plain_speed = statistics.median(plain)
    found = []
    for (family, plan), judgement, t in zip(plans, judgements, timed, strict=True):
        gamma, alpha = t.draft.max_tokens, judgement.agreement
        predicted_ms = place.predicted_ms(judgement, gamma, t.draft.min_probability)
        found.append(
            Forced(
                place.context_tokens,
                family,
                plan.skipped,
                gamma,
                t.draft.min_probability,
                alpha,
                t.acceptance,
                1000.0 / predicted_ms,
                1000.0 * place.geometric(plan, alpha, gamma),
                1000.0 * place.paper(plan, alpha, gamma),
                plain_speed * t.ratio,
                place.step_ms / predicted_ms,
                t.ratio,
                quartiles(t.ratios),
                len(t.visits),
                t.rounds,
                sum(v.drafted for v in t.visits),
                quartiles(plain),
            )
        )
    return found


PREDICTORS = ("predicted", "geometric", "paper", "alpha", "acceptance")


@dataclass(frozen=True)
class Correlation:
    """Of all forced plans at one context, or at all of them where it is None."""

    context_tokens: int | None
    plans: int
    rounds: int  # median
    pearson: dict[str, float]
    spearman: dict[str, float]
    error: float  # median of |predicted / measured - 1| of tokens per second
    ratio_error: float  # the same in plain steps, which a machine that changes its speed leaves out
    bias: float  # median of the latter with its sign
    # median quartile distance of a plan's visits over their median; not a number of single ones
    spread: float


def correlations(forced: Sequence[Forced]) -> list[Correlation]:
    """One for each context, and one for all where there are several."""
    contexts: list[int | None] = [*sorted({f.context_tokens for f in forced})]
    if len(contexts) > 1:
        contexts.append(None)
    found = []
    for context in contexts:
        here = [f for f in forced if context in (None, f.context_tokens)]
        known = [f for f in here if math.isfinite(f.predicted)]
        measured = [f.measured for f in known]
        by = {name: [float(getattr(f, name)) for f in known] for name in PREDICTORS}
        errors = [f.predicted / f.measured - 1.0 for f in known]
        ratio_errors = [f.predicted_ratio / f.measured_ratio - 1.0 for f in known]
        found.append(
            Correlation(
                context,
                len(known),
                round(statistics.median(f.rounds for f in here)),
                {name: pearson(x, measured) for name, x in by.items()},
                {name: spearman(x, measured) for name, x in by.items()},
                statistics.median(map(abs, errors)),
                statistics.median(map(abs, ratio_errors)),
                statistics.median(ratio_errors),
                _spread(here),
            )
        )
    return found


def _spread(forced: Sequence[Forced]) -> float:
    found = [(f.ratio_quartiles[2] - f.ratio_quartiles[0]) / f.ratio_quartiles[1]
             for f in forced if f.visits > 1]  # fmt: skip
    return statistics.median(found) if found else math.nan


def correlation_table(found: Sequence[Correlation]) -> list[str]:
    heads = ["context", "plans", "rounds"]
    heads += ["TPT: Pearson / rank", "geometric TPT", "paper's TPT", "judged α"]
    heads += ["acceptance of the rounds", "error of tokens/s", "in plain steps (bias)", "spread"]
    rows = []
    for c in found:
        pairs = [f"{c.pearson[n]:.3f} / {c.spearman[n]:.3f}" for n in PREDICTORS]
        rows.append(
            [
                "all" if c.context_tokens is None else f"{c.context_tokens:,}",
                str(c.plans),
                str(c.rounds),
                *pairs,
                percent(c.error),
                f"{percent(c.ratio_error)} ({100 * c.bias:+.1f} %)",
                "–" if math.isnan(c.spread) else percent(c.spread),
            ]
        )
    return measuring.table(heads, rows)


def plain_table(forced: Sequence[Forced]) -> list[str]:
    rows = []
    for context in sorted({f.context_tokens for f in forced}):
        here = [f for f in forced if f.context_tokens == context]
        low, median, high = here[0].plain_quartiles
        families = ", ".join(
            f"{sum(f.family == name for f in here)} {name}"
            for name in dict.fromkeys(f.family for f in here)
        )
        fastest = max(here, key=lambda f: f.measured_ratio)
        rows.append(
            [
                f"{context:,}",
                f"{median:.1f} ({low:.1f}–{high:.1f})",
                families,
                f"{min(f.measured_ratio for f in here):.2f}–{fastest.measured_ratio:.2f}",
                f"{fastest.family}, α {fastest.alpha:.2f}, γ {fastest.draft_tokens}",
            ]
        )
    heads = ["context", "plain tokens/s (quartiles)", "forced plans", "speed / plain", "fastest"]
    return measuring.table(heads, rows)


# ---------------------------------------------------------------------------------------------
# generators


@dataclass(frozen=True)
class Generated:
    """One plan of one generator."""

    context_tokens: int
    generator: str
    asked_saving: float
    saving: float  # share of a step
    shares: dict[str, float]  # left out, by kind
    skipped: tuple[int, ...]
    alpha: float
    draft_tokens: int
    predicted_ratio: float
    measured_ratio: float
    ratio_quartiles: tuple[float, float, float]
    measured: float  # tokens per second
    rounds: int


def generators_at(
    place: Place,
    names: Sequence[str],
    repeats: int,
    seconds: float,
    rng: random.Random,
    show: Show,
    notes: list[str],
) -> list[Generated]:
    """`repeats`: random plans for each saving. `notes` takes why a generator has no part."""
    started = place.clock()

    def left(share: float) -> float:
        return max(0.0, share * seconds - (place.clock() - started))

    fidelity = place.fidelity(left(FIDELITY_SHARE))
    rows: list[tuple[str, float, Plan]] = []
    for name in names:
        for _ in range(repeats if name == "random" else 1):
            try:
                plans = GENERATORS[name](place, fidelity, SAVINGS, rng)
            except (PlanError, ContextError) as error:
                notes.append(f"{name} at {place.context_tokens:,} tokens: {error}")
                break
            seen: set[Plan] = set()
            for saving, plan in zip(SAVINGS, plans, strict=False):
                # a generator that does not reach so far answers with its deepest again
                if plan not in seen:
                    seen.add(plan)
                    rows.append((name, saving, plan))
    judgements = place.judge([plan for _, _, plan in rows], left(JUDGED_SHARE), show)
    best = [place.best_draft(j) for j in judgements]
    timed = place.time([draft for draft, _ in best], left(1.0), show)
    plain = statistics.median(1000.0 / ms for t in timed for ms in t.plain_ms)
    return [
        Generated(
            place.context_tokens,
            name,
            asked,
            place.saving(plan),
            {kind.value: share for kind, share in place.shares(plan).items()},
            plan.skipped,
            judgement.agreement,
            draft.max_tokens,
            ratio,
            t.ratio,
            quartiles(t.ratios),
            plain * t.ratio,
            t.rounds,
        )
        for (name, asked, plan), judgement, (draft, ratio), t in zip(
            rows, judgements, best, timed, strict=True
        )
    ]


def generator_table(found: Sequence[Generated]) -> list[str]:
    """One row for each generator and saving; medians where a generator gave several plans."""
    rows = []
    groups: dict[tuple[int, float, str], list[Generated]] = {}
    for g in found:
        groups.setdefault((g.context_tokens, g.asked_saving, g.generator), []).append(g)
    for (context, _, name), own in sorted(groups.items(), key=lambda item: item[0][:2]):

        def middle(of: Callable[[Generated], float], own: list[Generated] = own) -> float:
            return statistics.median(of(g) for g in own)

        def left_out(kind: str, own: list[Generated] = own) -> float:
            return statistics.median(g.shares.get(kind, 0.0) for g in own)

        low, high = middle(lambda g: g.ratio_quartiles[0]), middle(lambda g: g.ratio_quartiles[2])
        kinds = {kind for g in own for kind in g.shares}
        rows.append(
            [
                f"{context:,}",
                name + (f" ({len(own)})" if len(own) > 1 else ""),
                percent(middle(lambda g: g.saving)),
                ", ".join(f"{kind} {100 * left_out(kind):.0f} %" for kind in sorted(kinds)),
                f"{middle(lambda g: g.alpha):.2f}",
                f"{middle(lambda g: g.draft_tokens):.0f}",
                f"{middle(lambda g: g.predicted_ratio):.2f}",
                f"{middle(lambda g: g.measured_ratio):.2f} ({low:.2f}–{high:.2f})",
                f"{middle(lambda g: g.measured):.1f}",
            ]
        )
    heads = ["context", "generator", "saves", "left out", "α", "γ", "predicted / plain"]
    heads += ["measured / plain (quartiles)", "tokens/s"]
    return measuring.table(heads, rows)


# ---------------------------------------------------------------------------------------------
# attention-share


@dataclass(frozen=True)
class Share:
    """What the best plan leaves out at one context, with plans forced on."""

    context_tokens: int
    best: dict[str, float]  # share of the sublayers of each kind
    equal: dict[str, float]  # the same of the knapsack's plan that saves EQUAL_SAVING of a step
    step_share: dict[str, float]  # share of a step that each kind takes
    saving: float
    alpha: float
    draft_tokens: int
    predicted_ratio: float
    skipped: tuple[int, ...]


def share_at(place: Place, shortlist: int, seconds: float, show: Show) -> Share:
    """Raises PlanError where not a single sublayer can be left out."""
    started = place.clock()
    fidelity = place.fidelity(0.5 * seconds)
    config = replace(place.config, plan_shortlist=shortlist)
    plans = candidate_plans(place.costs, fidelity, place.context_tokens, place.sublayers, config)
    if not plans:
        raise PlanError(f"no sublayer can be left out at {place.context_tokens} tokens")
    left = max(0.0, seconds - (place.clock() - started))
    judgements = place.judge(plans, left, show)
    (draft, ratio), judgement = max(
        ((place.best_draft(j), j) for j in judgements), key=lambda pair: pair[0][1]
    )
    equal = nearest_saving(place, knapsack_ladder(place, fidelity), EQUAL_SAVING)
    assert equal is not None  # there are candidates, so there is a ladder

    def named(found: Mapping[Kind, float]) -> dict[str, float]:
        return {kind.value: share for kind, share in found.items()}

    kinds = dict.fromkeys(s.kind.value for s in place.sublayers)
    return Share(
        place.context_tokens,
        named(place.shares(draft.plan)),
        named(place.shares(equal)),
        {kind: place.costs.share([kind], place.context_tokens) for kind in kinds},
        place.saving(draft.plan),
        judgement.agreement,
        draft.max_tokens,
        ratio,
        draft.plan.skipped,
    )


def share_table(found: Sequence[Share]) -> list[str]:
    kinds = list(found[0].best)
    heads = ["context", *(f"{kind} left out" for kind in kinds)]
    heads += [f"{kind}, {EQUAL_SAVING:.0%} of a step saved" for kind in kinds]
    heads += [f"{kind} in a step" for kind in kinds]
    heads += ["saves", "α", "γ", "predicted / plain"]
    rows = [
        [
            f"{s.context_tokens:,}",
            *(percent(s.best[kind]) for kind in kinds),
            *(percent(s.equal[kind]) for kind in kinds),
            *(percent(s.step_share[kind]) for kind in kinds),
            percent(s.saving),
            f"{s.alpha:.2f}",
            str(s.draft_tokens),
            f"{s.predicted_ratio:.2f}",
        ]
        for s in found
    ]
    return measuring.table(heads, rows)


def trend(found: Sequence[Share], kind: str) -> str:
    """Whether the share of a kind rises with the context, in words."""
    if len(found) < 2 or kind not in found[0].best:
        return ""
    contexts = [float(s.context_tokens) for s in found]
    parts = []
    for name, values in (
        ("best plan", [s.best[kind] for s in found]),
        ("equal saving", [s.equal[kind] for s in found]),
    ):
        rank = spearman(contexts, values)
        word = "stays" if math.isnan(rank) else "rises" if rank > 0 else "falls"
        parts.append(f"{name}: {word} (rank correlation {rank:.2f})")
    return f"Share of {kind} left out as the context grows, {'; '.join(parts)}."


def write_csv(found: Sequence[Share], path: Path) -> None:
    kinds = list(found[0].best)
    with open(path, "w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(
            ["context_tokens"]
            + [f"{name}_{kind}" for name in ("best", "equal", "step") for kind in kinds]
            + ["saving", "alpha", "draft_tokens", "predicted_ratio"]
        )
        for s in found:
            writer.writerow(
                [s.context_tokens]
                + [
                    f"{part[kind]:.4f}"
                    for part in (s.best, s.equal, s.step_share)
                    for kind in kinds
                ]
                + [f"{s.saving:.4f}", f"{s.alpha:.4f}", s.draft_tokens, f"{s.predicted_ratio:.4f}"]
            )


def write_plot(found: Sequence[Share], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.0, 4.2), layout="constrained")
    contexts = [s.context_tokens for s in found]
    colours = {"attention": "#0072B2", "mlp": "#D55E00"}
    for kind in found[0].best:
        colour = colours.get(kind, "#009E73")
        axes.plot(contexts, [100 * s.best[kind] for s in found], "o-", color=colour, label=kind)
        equal = [100 * s.equal[kind] for s in found]
        label = f"{kind}, {EQUAL_SAVING:.0%} of a step saved"
        axes.plot(contexts, equal, "s--", color=colour, label=label)
        part = [100 * s.step_share[kind] for s in found]
        axes.plot(contexts, part, ":", color=colour, label=f"{kind} in a step")
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{c:,}" for c in contexts])
    axes.set_ylim(0, 100)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("% of the sublayers left out / of a step")
    axes.set_title(title)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def check_plot(path: Path) -> None:
    """Raises UsageError where a plot could not be written."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {path}: the name has to end in .png, .svg or .pdf")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("plots need matplotlib: pip install 'knapspec-edge[plot]'") from None


# ---------------------------------------------------------------------------------------------
# planted


@dataclass(frozen=True)
class PlantedResult:
    """Found against planted plan of one model. Speeds relative to plain decoding."""

    model: str
    context_tokens: int
    state: str
    planted: tuple[int, ...]
    found: tuple[int, ...]
    precision: float  # of what was found, planted
    recall: float  # of what was planted, found
    alpha: float  # of the found plan, judged on other text
    draft_cost: float  # c, a draft step in plain steps
    verify_slope: float  # s, of each further token up to γ + 1
    draft_tokens: int
    predicted_ratio: float  # by the planner
    measured_ratio: float
    ratio_quartiles: tuple[float, float, float]
    bound: float  # S(α, c, s) of the found plan
    right_alpha: float  # of the planted plan
    right_ratio: float  # measured
    right_bound: float  # S(1, c, s) of the planted plan
    rounds: int


def compared(found: Sequence[int], planted: Sequence[int]) -> tuple[float, float]:
    """(precision, recall). Precision is 1 where nothing was found, recall where nothing was
    planted."""
    both = len(set(found) & set(planted))
    return both / len(found) if found else 1.0, both / len(planted) if planted else 1.0


def planted_at(
    place: Place, record: plant_model.Record, decision: planner.Decision, seconds: float, show: Show
) -> PlantedResult:
    """`decision` is the planner's for this model. Raises PlanError without any draft."""
    started = place.clock()
    if decision.draft is None:
        raise PlanError(f"{record.model}: {decision.reason}")
    right = Plan.skipping(len(place.sublayers), list(record.indices))
    judgements = place.judge([decision.draft.plan, right], 0.4 * seconds, show)
    best = Draft(right, place.best_draft(judgements[1])[0].max_tokens, 0.0)
    left = max(0.0, seconds - (place.clock() - started))
    timed = place.time([decision.draft, best], left, show)
    step_ms = place.step_ms
    curve = {
        gamma: place.verify_ms(gamma + 1) / step_ms
        for gamma in draft_lengths(place.costs, place.config)
    }
    gamma = decision.draft.max_tokens
    draft_cost = place.draft_ms(decision.draft.plan) / step_ms
    precision, recall = compared(decision.draft.plan.skipped, record.indices)
    return PlantedResult(
        record.model,
        place.context_tokens,
        decision.state,
        record.indices,
        decision.draft.plan.skipped,
        precision,
        recall,
        judgements[0].agreement,
        draft_cost,
        (place.verify_ms(gamma + 1) / step_ms - 1.0) / gamma,
        gamma,
        decision.predicted_ratio or math.nan,
        timed[0].ratio,
        quartiles(timed[0].ratios),
        bound(judgements[0].agreement, draft_cost, curve)[0],
        judgements[1].agreement,
        timed[1].ratio,
        bound(1.0, place.draft_ms(right) / step_ms, curve)[0],
        timed[0].rounds,
    )


def planted_table(found: Sequence[PlantedResult]) -> list[str]:
    heads = ["model", "planted", "found", "precision", "recall", "α", "c", "s", "γ", "auto says"]
    heads += ["predicted / plain", "measured / plain (quartiles)", "bound S(α, c, s)"]
    heads += ["planted plan: α", "measured / plain", "bound S(1, c, s)"]
    rows = []
    for r in found:
        low, _, high = r.ratio_quartiles
        rows.append(
            [
                r.model,
                str(len(r.planted)),
                str(len(r.found)),
                f"{r.precision:.2f}",
                f"{r.recall:.2f}",
                f"{r.alpha:.2f}",
                f"{r.draft_cost:.2f}",
                f"{r.verify_slope:.2f}",
                str(r.draft_tokens),
                r.state,
                f"{r.predicted_ratio:.2f}",
                f"{r.measured_ratio:.2f} ({low:.2f}–{high:.2f})",
                f"{r.bound:.2f}",
                f"{r.right_alpha:.2f}",
                f"{r.right_ratio:.2f}",
                f"{r.right_bound:.2f}",
            ]
        )
    return measuring.table(heads, rows)


# ---------------------------------------------------------------------------------------------
# The program


def parse_contexts(text: str) -> list[int]:
    """Context lengths of "256,1024", ascending. Raises UsageError."""
    try:
        contexts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(f"--contexts {ascii(text)}: numbers of tokens, as in 256,1024") from None
    if contexts[0] < LEAST_CONTEXT_TOKENS or contexts[-1] > CTX_TOKENS_MAX - MARGIN_TOKENS:
        raise UsageError(f"--contexts {text}: from {LEAST_CONTEXT_TOKENS} tokens on")
    return contexts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, words: str, budget: float, *, several: bool = False) -> Any:
        sub = commands.add_parser(
            name, help=words, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        models_of = "paths, or names of the manifest that have been fetched"
        sub.add_argument("models", nargs="+" if several else 1, metavar="MODEL", help=models_of)
        sub.add_argument("--budget", type=float, default=budget, metavar="SECONDS", help="in all")
        sub.add_argument(
            "--profile-budget",
            type=float,
            default=30.0,
            metavar="SECONDS",
            help="of the latency profile, where none is stored",
        )
        sub.add_argument("--fresh", action="store_true", help="measure the latency profile anew")
        sub.add_argument("--seed", type=int, default=0, help="of random plans")
        measuring.add_settings(sub)
        return sub

    def contexts(sub: Any) -> None:
        default = ",".join(map(str, CONTEXTS))
        sub.add_argument("--contexts", default=default, metavar="N,N,...", help="in tokens")

    one = command("correlate", "predicted against measured speed of forced plans", 240.0)
    contexts(one)
    one.add_argument("--plans", type=int, default=30, help="forced plans at each context")
    two = command("generators", "plans of equal cost side by side", 240.0)
    contexts(two)
    two.add_argument("--random", type=int, default=3, help="random plans for each saving")
    two.add_argument(
        "--only",
        nargs="+",
        choices=list(GENERATORS),
        default=["knapsack", "hidden-state", "random"],
        metavar="NAME",
        help=f"of {', '.join(GENERATORS)}",
    )
    three = command("attention-share", "what the best plan leaves out, by context", 180.0)
    contexts(three)
    three.add_argument("--shortlist", type=int, default=12, help="plans judged at each context")
    three.add_argument("--csv", type=Path, metavar="FILE")
    three.add_argument("--plot", type=Path, metavar="FILE", help=".png, .svg or .pdf")
    four = command("planted", "found against planted plan", 60.0, several=True)
    four.add_argument("--at", type=int, default=512, metavar="N", help="context timed, in tokens")
    return parser


def _check_options(options: argparse.Namespace) -> None:
    measuring.check_settings(options)
    for name in ("budget", "profile_budget"):
        if not 0.0 < getattr(options, name) < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} must be a number of seconds above 0")
    for name, least in (("plans", 3), ("random", 1), ("shortlist", 1), ("at", 64)):
        if getattr(options, name, least) < least:
            raise UsageError(f"--{name} must be at least {least}")
    for name in ("csv", "plot"):
        path = getattr(options, name, None)
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"--{name} {path}: there is no folder {path.parent}")
    if getattr(options, "plot", None) is not None:
        check_plot(options.plot)


def _profile(
    backend: Any,
    info: gguf_check.GgufInfo,
    longest: int,
    options: argparse.Namespace,
    tokens: Sequence[int],
    terminal: Terminal,
) -> tuple[Costs, str]:
    """The stored latency profile if it reaches so far, else a fresh one, which is not stored; and
    where it comes from."""
    model_key = {"model": gguf_check.fingerprint(info), **native.machine_key()}
    key = kept.latency_key(backend, model_key)
    width = max(LENGTHS) + 1
    if not options.fresh:
        stored = kept.load_latency(Store(warn=terminal.warning), key, backend)
        if stored is not None and stored.limit_tokens >= longest and stored.widths[-1] >= width:
            age = (time.time() - stored.measured_at) / 3600.0
            return Costs(stored), f"stored, {age:.1f} hours old"
    profile = measure_latency(
        backend,
        budget_seconds=options.profile_budget,
        tokens=tokens,
        limit_tokens=min(backend.n_ctx, longest + MARGIN_TOKENS),
        progress=lambda share: terminal.progress("measuring the profile", share),
    )
    costs = Costs(profile)
    origin = f"fresh, {profile.elapsed_seconds:.0f} s"
    if profile.limit_tokens < longest:
        origin += f", up to {profile.limit_tokens:,} tokens and guessed beyond"
    if costs.blind:
        origin += "; noise hid what sublayers cost, so nothing below holds: raise --profile-budget"
    return costs, origin


@dataclass
class Opened:
    """A model with a context that is long enough, and its costs."""

    backend: Any
    costs: Costs
    prompts: Prompts
    calibration: list[int]
    model_key: dict[str, Any]
    data: dict[str, Any]
    repeated: set[int]
    terminal: Terminal

    def place(self, session: Session, context_tokens: int, config: Config = DEFAULTS) -> Place:
        return Place(self.backend, session, self.prompts, self.costs, context_tokens, config=config)

    def show(self, what: str) -> Show:
        return lambda stage, share: self.terminal.progress(f"{what}: {stage}", min(1.0, share))


@contextmanager
def prepared(
    options: argparse.Namespace, name: str, longest: int, terminal: Terminal
) -> Iterator[Opened]:
    with measuring.opened_model(options, name, terminal) as (model, info):
        ctx_tokens = longest + MARGIN_TOKENS
        with measuring.open_context(options, model, ctx_tokens) as backend:
            if backend.refusal is not None:
                raise PlanError(f"{info.path.name}: {backend.refusal}")
            template = choose_template(model)
            tokens = calibration_tokens(model, template)
            repeated: set[int] = set()
            with backend.interruptible():
                costs, origin = _profile(backend, info, longest, options, tokens, terminal)
                data = {**measuring.setting(backend, info), "seed": options.seed, "profile": origin}
                terminal.text(f"{measuring.setting_line(data)} Latency profile: {origin}.\n")
                trained = model.n_ctx_train
                if trained and longest > trained:
                    terminal.text(f"The model was trained for {trained:,} tokens only.\n")
                yield Opened(
                    backend,
                    costs,
                    prompts_of(model, template, repeated),
                    tokens,
                    {"model": gguf_check.fingerprint(info), **native.machine_key()},
                    data,
                    repeated,
                    terminal,
                )
    if repeated:
        where = ", ".join(f"{n:,}" for n in sorted(repeated))
        terminal.text(f"\nThe calibration text repeats itself in the prompts of {where} tokens.\n")


def budgets(costs: Costs, contexts: Sequence[int], seconds: float) -> dict[int, float]:
    """Seconds for each context: more where a step takes longer, but not in proportion."""
    weights = {c: math.sqrt(costs.step_ms(c)) for c in contexts}
    return {c: seconds * w / sum(weights.values()) for c, w in weights.items()}


def _each_context(
    opened: Opened, options: argparse.Namespace, body: Callable[[Place, float, Show], None]
) -> None:
    contexts = parse_contexts(options.contexts)
    session = Session(opened.backend)
    for context, seconds in budgets(opened.costs, contexts, options.budget).items():
        body(opened.place(session, context), seconds, opened.show(f"{context:,} tokens"))
    opened.terminal.clear_progress()


def _correlate(options: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    rng = random.Random(options.seed)
    forced: list[Forced] = []
    longest = parse_contexts(options.contexts)[-1]
    with prepared(options, options.models[0], longest, terminal) as opened:

        def body(place: Place, seconds: float, show: Show) -> None:
            forced.extend(correlate_at(place, options.plans, seconds, rng, show))

        _each_context(opened, options, body)
        found = correlations(forced)
        lines = ["", *correlation_table(found), "", *plain_table(forced)]
        terminal.text("\n".join(lines) + "\n")
    rows = [asdict(c) for c in found]
    return {**opened.data, "correlations": rows, "plans": [asdict(f) for f in forced]}


def _generators(options: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    rng = random.Random(options.seed)
    generated: list[Generated] = []
    longest = parse_contexts(options.contexts)[-1]
    names = [name for name in GENERATORS if name in options.only]
    notes: list[str] = []
    with prepared(options, options.models[0], longest, terminal) as opened:

        def body(place: Place, seconds: float, show: Show) -> None:
            generated.extend(generators_at(place, names, options.random, seconds, rng, show, notes))

        _each_context(opened, options, body)
        lines = ["", *generator_table(generated), *(f"* {note}" for note in notes)]
        terminal.text("\n".join(lines) + "\n")
    return {**opened.data, "notes": notes, "generated": [asdict(g) for g in generated]}


def _attention_share(options: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    found: list[Share] = []
    longest = parse_contexts(options.contexts)[-1]
    with prepared(options, options.models[0], longest, terminal) as opened:

        def body(place: Place, seconds: float, show: Show) -> None:
            found.append(share_at(place, options.shortlist, seconds, show))

        _each_context(opened, options, body)
        lines = ["", *share_table(found), "", trend(found, Kind.ATTENTION.value)]
        terminal.text("\n".join(lines) + "\n")
        if options.csv is not None:
            write_csv(found, options.csv)
        if options.plot is not None:
            title = f"{opened.data['model']}: what the best plan leaves out"
            write_plot(found, options.plot, title)
    return {**opened.data, "shares": [asdict(s) for s in found]}


def _planted(options: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    # before anything is measured
    records = [plant_model.read_record(models.resolve(name)) for name in options.models]
    results, settings = [], []
    for name, record in zip(options.models, records, strict=True):
        with prepared(options, name, options.at, terminal) as opened:
            if record.n_sublayers != len(opened.backend.sublayers):
                raise PlanError(f"{name} has other sublayers than its record: make it again")
            decision = planner.decide(
                opened.backend,
                opened.model_key,
                opened.calibration,
                progress=lambda share: terminal.progress("measuring what the planner needs", share),
            )
            place = opened.place(Session(opened.backend), options.at)
            seconds = options.budget / len(records)
            results.append(planted_at(place, record, decision, seconds, opened.show(record.model)))
            settings.append({**opened.data, "reason": decision.reason})
            terminal.clear_progress()
    terminal.text("\n".join(["", *planted_table(results)]) + "\n")
    return {"models": settings, "planted": [asdict(r) for r in results]}


_COMMANDS = {
    "correlate": _correlate,
    "generators": _generators,
    "attention-share": _attention_share,
    "planted": _planted,
}


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)

    def body(terminal: Terminal) -> None:
        _check_options(options)
        if getattr(options, "contexts", None) is not None:
            parse_contexts(options.contexts)  # before the model is loaded
        data = _COMMANDS[options.command](options, terminal)
        terminal.text(f"\n{measuring.json_line({'command': options.command, **data})}\n")

    return measuring.run_guarded(body)


if __name__ == "__main__":
    sys.exit(main())
