"""How well the latency model predicts: predicted against measured time of passes it has not seen.

    python scripts/check_latency.py model.gguf
    python scripts/check_latency.py model.gguf --ctx 32768 --budget 180 --plans 20 --json out.json
    python scripts/check_latency.py model.gguf --check-fill 512 2048

Measures a latency profile, then times draft steps under random plans and verification passes of
random widths, at contexts between those of the profile. Two errors are reported for each. The *raw*
one compares milliseconds. The *corrected* one compares how many plain steps a pass takes, by plain
steps timed around it, so that it says nothing about a machine that changed its speed since the
profile. A timing here is never a pass or a fail.

--check-fill shows instead that cells which are only marked as filled cost what computed ones cost.
Run it with the project's Python, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import _measuring as measuring  # noqa: E402
from _measuring import percent, random_plans  # noqa: E402

from knapspec_edge.backend import Backend  # noqa: E402
from knapspec_edge.config import DEFAULTS  # noqa: E402
from knapspec_edge.decode.rollback import rewind  # noqa: E402
from knapspec_edge.errors import PlanError, UsageError  # noqa: E402
from knapspec_edge.latency.costs import Costs  # noqa: E402
from knapspec_edge.latency.profile import LatencyProfile, Sample  # noqa: E402
from knapspec_edge.latency.profiler import measure_latency  # noqa: E402
from knapspec_edge.latency.regression import Line  # noqa: E402
from knapspec_edge.latency.timing import Clock, Timing  # noqa: E402
from knapspec_edge.records import GREEDY, Plan  # noqa: E402
from knapspec_edge.terminal import Terminal  # noqa: E402

Progress = Callable[[float], None]

LEAST_CONTEXT_TOKENS = 128
NARROW_WIDTHS = range(2, 17)
WIDE_WIDTHS = (24, 32)
# A context that is measured here keeps this relative distance from those of the profile.
CONTEXT_DISTANCE = 0.03
REFERENCE_EVERY = 4  # passes of interest between two references
FAST_MS = 40.0  # below, the fastest of three passes counts, above, of two
FILL_WIDTHS = (1, 8)
FILL_ROUNDS = 15


class Predictor(Protocol):
    """What is judged here; latency.costs.Costs is one."""

    def step_ms(self, context_tokens: float) -> float: ...
    def draft_ms(self, plan: Plan, context_tokens: float) -> float: ...
    def verify_ms(self, context_tokens: float, width: int) -> float: ...


# ---------------------------------------------------------------------------------------------
# What is measured


@dataclass(frozen=True)
class Pass:
    """One kind of pass: a draft step under a plan, or a verification pass of some width."""

    context_tokens: int  # in the cache before the pass
    width: int = 1
    skipped: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        return "draft step" if self.width == 1 else "verification"


def random_contexts(
    rng: random.Random, count: int, least: int, most: int, avoid: Iterable[int] = ()
) -> list[int]:
    """Context lengths in tokens, ascending: one in each of `count` geometric bands from `least` to
    `most`, none within CONTEXT_DISTANCE of one in `avoid`. A band without such a place is left out.
    """
    shunned = list(avoid)
    found = []
    for band in range(count):
        for _ in range(100):
            place = (band + rng.uniform(0.15, 0.85)) / count
            context = round(least * (most / least) ** place)
            near = any(abs(context - c) <= CONTEXT_DISTANCE * c for c in shunned)
            if least <= context <= most and not near and context not in found:
                found.append(context)
                break
    return sorted(found)


def random_widths(rng: random.Random, count: int, widest: int) -> list[int]:
    """Widths of verification passes, ascending: `count` of 2..16, and one of 24 and 32."""
    narrow = [b for b in NARROW_WIDTHS if b <= widest]
    wide = [b for b in WIDE_WIDTHS if b <= widest]
    chosen = rng.sample(narrow, min(count, len(narrow)))
    return sorted(chosen + rng.sample(wide, min(1, len(wide)) if count else 0))


@dataclass
class Measured:
    """Repeated measurements of one kind of pass, with what was predicted of it."""

    what: Pass
    predicted_ms: float
    predicted_steps: float  # the same in plain steps
    samples_ms: list[float] = field(default_factory=list)
    samples_steps: list[float] = field(default_factory=list)  # in plain steps timed around each

    @property
    def raw_error(self) -> float:
        """Predicted over measured milliseconds, minus one."""
        return self.predicted_ms / statistics.median(self.samples_ms) - 1.0

    @property
    def corrected_error(self) -> float:
        """The same in plain steps."""
        return self.predicted_steps / statistics.median(self.samples_steps) - 1.0

    @property
    def repeatability(self) -> float:
        """Half the range of the repetitions in plain steps over their median: no error can be told
        that is smaller."""
        samples = self.samples_steps
        return (max(samples) - min(samples)) / 2.0 / statistics.median(samples)


def fastest_ms(
    backend: Backend,
    what: Pass,
    draw: Callable[[int], list[int]],
    clock: Clock,
    *,
    warm_up: bool = True,
) -> float:
    """The fastest of a few passes, in ms; the first one, in which a graph may be built, is not
    counted. `draw(n)` gives n tokens. The cache is at the pass's context before and after."""
    plan = None
    if what.skipped:
        plan = Plan.skipping(len(backend.sublayers), list(what.skipped))
    times: list[float] = []
    wanted = 4 if warm_up else 3
    while len(times) < wanted:
        tokens = draw(what.width)
        begun = clock()
        if what.width == 1:
            backend.decode(tokens[0], GREEDY, plan)
        else:
            backend.verify(tokens, GREEDY)
        times.append(1000.0 * (clock() - begun))
        rewind(backend, what.context_tokens)
        if times[0] > FAST_MS:
            wanted = 3 if warm_up else 2
    return min(times[1:] if warm_up else times)


def fill(backend: Backend, context_tokens: int) -> None:
    """Empty the cache and mark so many cells as filled."""
    rewind(backend, 0)
    backend.fill(context_tokens)


def measure(
    backend: Backend,
    predictor: Predictor,
    passes: Sequence[Pass],
    repeats: int,
    rng: random.Random,
    *,
    progress: Progress = lambda _: None,
    clock: Clock = time.perf_counter,
) -> tuple[list[Measured], list[Measured]]:
    """Time `passes`; returns them and the plain steps that served as references.

    Repetitions of all contexts are interleaved, the order within a context is another one each
    time. The cache has to be empty, and is empty again afterwards. Raises what the backend raises.
    """
    found = {
        p: Measured(p, predicted, predicted / predictor.step_ms(p.context_tokens))
        for p in passes
        for predicted in [_predict(predictor, p, len(backend.sublayers))]
    }
    by_context: dict[int, list[Pass]] = {}
    for p in passes:
        by_context.setdefault(p.context_tokens, []).append(p)
    steps = {
        c: Measured(Pass(c), predicted_ms=predictor.step_ms(c), predicted_steps=1.0)
        for c in by_context
    }

    def draw(n: int) -> list[int]:
        return rng.choices(range(backend.n_vocab), k=n)

    done, total = 0, max(1, repeats * len(passes))
    try:
        for _ in range(repeats):
            for context in rng.sample(sorted(by_context), len(by_context)):
                fill(backend, context)
                plain = steps[context]
                before = fastest_ms(backend, plain.what, draw, clock)
                plain.samples_ms.append(before)
                order = rng.sample(by_context[context], len(by_context[context]))
                for start in range(0, len(order), REFERENCE_EVERY):
                    group = order[start : start + REFERENCE_EVERY]
                    times = [fastest_ms(backend, p, draw, clock) for p in group]
                    after = fastest_ms(backend, plain.what, draw, clock)
                    plain.samples_ms.append(after)
                    for n, (p, ms) in enumerate(zip(group, times, strict=True), 1):
                        # speed is taken to change evenly from one reference to the next
                        share = n / (len(group) + 1)
                        reference = before ** (1.0 - share) * after**share
                        found[p].samples_ms.append(ms)
                        found[p].samples_steps.append(ms / reference)
                    before = after
                    done += len(group)
                    progress(done / total)
    finally:
        rewind(backend, 0)
    for plain in steps.values():
        usual = statistics.median(plain.samples_ms)
        plain.samples_steps = [ms / usual for ms in plain.samples_ms]
    return list(found.values()), list(steps.values())


def _predict(predictor: Predictor, p: Pass, n_sublayers: int) -> float:
    if p.width > 1:
        return predictor.verify_ms(p.context_tokens, p.width)
    return predictor.draft_ms(Plan.skipping(n_sublayers, list(p.skipped)), p.context_tokens)


# ---------------------------------------------------------------------------------------------
# What it says


@dataclass(frozen=True)
class Errors:
    """Relative errors in summary. `bias` is their signed median: positive is predicted too slow."""

    count: int
    median: float  # of the absolute errors
    high: float  # 90th percentile of the absolute errors
    bias: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> Errors:
        """Raises ValueError without any."""
        if not errors:
            raise ValueError("there are no errors to sum up")
        absolute = np.abs(errors)
        return cls(
            len(errors),
            float(np.median(absolute)),
            float(np.quantile(absolute, 0.9)),
            float(np.median(errors)),
        )


@dataclass(frozen=True)
class Row:
    """Errors of one kind of pass at one context; at all of them where it is None."""

    kind: str
    context_tokens: int | None
    raw: Errors
    corrected: Errors
    repeatability: float  # median


def summarise(measured: Sequence[Measured]) -> list[Row]:
    """Per kind: a row for each context, ascending, and one for all where there are several."""
    rows = []
    for kind in dict.fromkeys(m.what.kind for m in measured):
        own = [m for m in measured if m.what.kind == kind]
        contexts: list[int | None] = [*sorted({m.what.context_tokens for m in own})]
        if len(contexts) > 1:
            contexts.append(None)
        for context in contexts:
            here = [m for m in own if context in (None, m.what.context_tokens)]
            rows.append(
                Row(
                    kind,
                    context,
                    Errors.of([m.raw_error for m in here]),
                    Errors.of([m.corrected_error for m in here]),
                    statistics.median(m.repeatability for m in here),
                )
            )
    return rows


def profile_of_check(
    profile: LatencyProfile, measured: Sequence[Measured], steps: Sequence[Measured]
) -> LatencyProfile:
    """The draft steps of this check as a profile, so that the same fit gives its lines a second
    time, from plans and contexts it has not seen."""
    usual = {s.what.context_tokens: statistics.median(s.samples_ms) for s in steps}
    samples = [
        Sample(c, 1, (), True, Timing.of(s.samples_ms))
        for s in steps
        for c in [s.what.context_tokens]
    ]
    samples += [
        Sample(
            m.what.context_tokens,
            1,
            m.what.skipped,
            True,
            Timing.of([usual[m.what.context_tokens] * x for x in m.samples_steps]),
        )
        for m in measured
        if m.what.width == 1
    ]
    return replace(profile, samples=tuple(samples), limit_tokens=max(usual), notes=(), settings={})


def table(rows: Sequence[Row]) -> list[str]:
    """The errors for people, as a Markdown table."""
    heads = ["pass", "context", "n"]
    heads += ["raw error: median", "90 % within", "bias"]
    heads += ["corrected: median", "90 % within", "bias", "repeatable to"]
    lines = []
    for row in rows:
        context = "all" if row.context_tokens is None else f"{row.context_tokens:,}"
        cells = [row.kind, context, str(row.raw.count)]
        for errors in (row.raw, row.corrected):
            cells += [percent(errors.median), percent(errors.high), f"{100 * errors.bias:+.1f} %"]
        lines.append([*cells, percent(row.repeatability)])
    return measuring.table(heads, lines)


def step_table(steps: Sequence[Measured]) -> list[str]:
    """Plain steps: predicted and measured, and how much the machine's speed varied meanwhile."""
    lines = [
        "| plain step at | predicted | measured (quartiles) | raw error |",
        "| --- | --- | --- | --- |",
    ]
    for step in sorted(steps, key=lambda s: s.what.context_tokens):
        t = Timing.of(step.samples_ms)
        lines.append(
            f"| {step.what.context_tokens:,} | {step.predicted_ms:.2f} ms | {t.median_ms:.2f} ms "
            f"({t.low_ms:.2f}–{t.high_ms:.2f}) | {100 * step.raw_error:+.1f} % |"
        )
    return lines


def _line(line: Line) -> str:
    parts = [
        (line.intercept, line.intercept_half_width),
        (1000.0 * line.slope, 1000.0 * line.slope_half_width),
    ]
    # from two contexts a line has no interval
    return " + ".join(
        f"{value:.4f}" + (f" ± {half:.4f}" if math.isfinite(half) else "") for value, half in parts
    )


def class_table(first: Costs, second: Costs) -> list[str]:
    """The line of each class of sublayers with 95 % intervals, from the profile and the check."""
    lines = [
        "| class | sublayers | profile: ms + ms per 1,000 tokens | this check | shape |",
        "| --- | --- | --- | --- | --- |",
    ]
    for ours, theirs in zip(first.class_costs, second.class_costs, strict=True):
        cells = [_line(ours.line), _line(theirs.line)]
        shape = "piecewise" if not ours.is_line else "Θ(n)" if ours.line.rises else "Θ(1)"
        cls = ours.layer_class
        lines.append(f"| {cls.name} | {len(cls.members)} | {' | '.join(cells)} | {shape} |")
    return lines


def crossing(costs: Costs) -> str:
    tokens = costs.crossing_tokens()
    return "nowhere" if tokens is None else f"at {tokens:,.0f} tokens"


# ---------------------------------------------------------------------------------------------
# Filled cells


@dataclass(frozen=True)
class FillRatio:
    """Time behind filled cells over time behind a computed prompt: quartiles of the pairs."""

    context_tokens: int
    width: int
    pairs: int
    low: float
    median: float
    high: float
    filled_ms: float  # median
    computed_ms: float  # median


def check_fill(
    open_backend: Callable[[], AbstractContextManager[Backend]],
    contexts: Sequence[int],
    rng: random.Random,
    *,
    rounds: int = FILL_ROUNDS,
    progress: Progress = lambda _: None,
    clock: Clock = time.perf_counter,
) -> list[FillRatio]:
    """Alternate passes behind filled cells and behind a computed prompt, in contexts of their own.

    Each length gets new contexts, since cells that once held a prompt still do; which of the two is
    opened first changes from length to length, and who begins from round to round. Raises what the
    backend raises.
    """
    ratios = []
    done, total = 0, max(1, len(contexts) * len(FILL_WIDTHS) * rounds)
    for n, context in enumerate(contexts):
        with open_backend() as first, open_backend() as second:
            filled, computed = (first, second) if n % 2 == 0 else (second, first)

            def draw(count: int, vocabulary: int = first.n_vocab) -> list[int]:
                return rng.choices(range(vocabulary), k=count)

            filled.fill(context)
            computed.prefill(draw(context), GREEDY)
            for width in FILL_WIDTHS:
                what = Pass(context, width)
                times: dict[bool, list[float]] = {True: [], False: []}
                for turn in range(rounds + 1):
                    for is_filled in (turn % 2 == 0, turn % 2 == 1):
                        backend = filled if is_filled else computed
                        # the graph of the first turn lives on, in either context
                        ms = fastest_ms(backend, what, draw, clock, warm_up=turn == 0)
                        if turn > 0:
                            times[is_filled].append(ms)
                    if turn > 0:
                        done += 1
                        progress(done / total)
                pairs = [a / b for a, b in zip(times[True], times[False], strict=True)]
                low, median, high = np.quantile(pairs, (0.25, 0.5, 0.75))
                ratios.append(
                    FillRatio(
                        context,
                        width,
                        len(pairs),
                        float(low),
                        float(median),
                        float(high),
                        statistics.median(times[True]),
                        statistics.median(times[False]),
                    )
                )
    return ratios


def fill_table(ratios: Sequence[FillRatio]) -> list[str]:
    lines = [
        "| context | tokens in the pass | filled | computed | filled / computed (quartiles) | n |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {r.context_tokens:,} | {r.width} | {r.filled_ms:.2f} ms | {r.computed_ms:.2f} ms | "
        f"{r.median:.3f} ({r.low:.3f}–{r.high:.3f}) | {r.pairs} |"
        for r in ratios
    ]
    return lines


# ---------------------------------------------------------------------------------------------
# The program


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a path, or a name of the manifest that has been fetched")
    add("--plans", type=int, default=50, help="random plans at each context")
    add("--widths", type=int, default=8, help="widths of 2..16 at each context; one of 24, 32 more")
    add(
        "--contexts", type=int, default=4, help="context lengths, geometric, off the profile's grid"
    )
    add("--repeats", type=int, default=3, help="interleaved repetitions of every pass")
    add("--ctx", type=int, help=f"context size in tokens (default: {DEFAULTS.ctx_tokens} at most)")
    add("--budget", type=float, default=30.0, metavar="SECONDS", help="of the profile")
    measuring.add_settings(parser)
    add("--seed", type=int, default=0, help="of plans, contexts, widths and tokens")
    add("--json", type=Path, metavar="FILE", help="write everything there, samples included")
    add(
        "--check-fill",
        type=int,
        nargs="*",
        metavar="N",
        help="compare filled cells with computed ones at these contexts (or three of its own "
        "choice) and do nothing else",
    )
    return parser


def _check_options(options: argparse.Namespace) -> None:
    for name, least in (("plans", 0), ("widths", 0), ("contexts", 1), ("repeats", 1)):
        if getattr(options, name) < least:
            raise UsageError(f"--{name} must be at least {least}")
    if not options.plans and not options.widths:
        raise UsageError("--plans 0 --widths 0 leaves nothing to check")
    if not 0.0 < options.budget < math.inf:
        raise UsageError("--budget must be a number of seconds above 0")
    measuring.check_settings(options)
    if options.json is not None and not options.json.parent.is_dir():
        raise UsageError(f"--json {options.json}: there is no folder {options.json.parent}")


def run(options: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    """Measure, print the tables, return everything as plain data. Raises KnapspecError."""
    _check_options(options)
    rng = random.Random(options.seed)
    with measuring.opened_model(options, options.model, terminal) as (model, info):
        trained = model.n_ctx_train or DEFAULTS.ctx_tokens
        ctx_tokens = options.ctx or min(trained, DEFAULTS.ctx_tokens)

        _most_context(ctx_tokens)  # before anything is measured

        def open_backend() -> Any:
            return measuring.open_context(
                options, model, ctx_tokens, max_verify_tokens=max(WIDE_WIDTHS)
            )

        with open_backend() as backend:
            if backend.refusal is not None:
                raise PlanError(f"{info.path.name}: {backend.refusal}")
            data = {**measuring.setting(backend, info), "seed": options.seed}
            terminal.text(f"{measuring.setting_line(data)}\n\n")
            if options.check_fill is None:
                with backend.interruptible():
                    data |= _check_predictions(backend, options, rng, terminal)
        if options.check_fill is not None:
            data |= _check_filling(open_backend, options, ctx_tokens, rng, terminal)
    return data


def _most_context(ctx_tokens: int) -> int:
    """The longest context that leaves room for the widest pass. Raises UsageError if too short."""
    most = ctx_tokens - max(WIDE_WIDTHS) - 2
    if most < LEAST_CONTEXT_TOKENS:
        least = LEAST_CONTEXT_TOKENS + max(WIDE_WIDTHS) + 2
        raise UsageError(f"--ctx {ctx_tokens} is too small for this check: at least {least}")
    return most


def _check_predictions(
    backend: Backend, options: argparse.Namespace, rng: random.Random, terminal: Terminal
) -> dict[str, Any]:
    profile = measure_latency(
        backend,
        budget_seconds=options.budget,
        progress=lambda share: terminal.progress("measuring the profile", share),
    )
    costs = Costs(profile)
    longest = min(_most_context(backend.n_ctx), profile.limit_tokens)
    contexts = random_contexts(
        rng, options.contexts, LEAST_CONTEXT_TOKENS, longest, profile.contexts
    )
    if not contexts:
        raise UsageError(
            f"the profile reaches {profile.limit_tokens} tokens, which leaves no context to check: "
            f"raise --budget {options.budget:g} or --ctx {backend.n_ctx}"
        )
    fitted = {s.skipped for s in profile.samples}
    passes: list[Pass] = []
    for context in contexts:
        plans = random_plans(rng, len(backend.sublayers), options.plans, fitted)
        passes += [Pass(context, 1, skipped) for skipped in plans]
        widths = random_widths(rng, options.widths, costs.max_width)
        passes += [Pass(context, width) for width in widths]
    begun = time.perf_counter()
    measured, steps = measure(
        backend,
        costs,
        passes,
        options.repeats,
        rng,
        progress=lambda share: terminal.progress("timing passes it has not seen", share),
    )
    seconds = time.perf_counter() - begun
    terminal.clear_progress()
    rows = summarise(measured)
    again = Costs(profile_of_check(profile, measured, steps))
    lines = [
        f"The profile took {profile.elapsed_seconds:.1f} s of {profile.budget_seconds:.0f} s, up "
        f"to {profile.limit_tokens:,} tokens, {len(profile.samples)} kinds of passes; the check "
        f"{seconds:.0f} s.",
        *(f"* {note}" for note in profile.notes),
        "",
        *table(rows),
        "",
        *step_table(steps),
    ]
    if options.plans:
        lines += [
            "",
            *class_table(costs, again),
            "",
            f"Attention overtakes MLP {crossing(costs)} (this check: {crossing(again)}).",
        ]
    terminal.text("\n".join(lines) + "\n")
    return {
        "profile": profile.to_json(),
        "profile_seconds": profile.elapsed_seconds,
        "check_seconds": seconds,
        "crossing_tokens": costs.crossing_tokens(),
        "classes": _class_records(costs),
        "classes_of_check": _class_records(again) if options.plans else None,
        "errors": [asdict(row) for row in rows],
        "steps": [asdict(m) for m in steps],
        "passes": [asdict(m) for m in measured],
    }


def _class_records(costs: Costs) -> list[dict[str, Any]]:
    return [
        {
            "name": cost.layer_class.name,
            "sublayers": len(cost.layer_class.members),
            "is_line": cost.is_line,
            **{
                # JSON has no infinity: null is an interval that is not known
                key: value if math.isfinite(value) else None
                for key, value in asdict(cost.line).items()
            },
        }
        for cost in costs.class_costs
    ]


def _check_filling(
    open_backend: Callable[[], AbstractContextManager[Backend]],
    options: argparse.Namespace,
    ctx_tokens: int,
    rng: random.Random,
    terminal: Terminal,
) -> dict[str, Any]:
    most = _most_context(ctx_tokens)
    contexts = sorted(options.check_fill) or random_contexts(rng, 3, LEAST_CONTEXT_TOKENS, most)
    for context in contexts:
        if not 1 <= context <= most:
            raise UsageError(f"--check-fill {context}: with --ctx {ctx_tokens} at most {most}")
    ratios = check_fill(
        open_backend,
        contexts,
        rng,
        progress=lambda share: terminal.progress("filled and computed cells in turn", share),
    )
    terminal.clear_progress()
    terminal.text("\n".join(fill_table(ratios)) + "\n")
    return {"fill": [asdict(ratio) for ratio in ratios]}


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)

    def body(terminal: Terminal) -> None:
        data = run(options, terminal)
        if options.json is not None:
            options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    return measuring.run_guarded(body)


if __name__ == "__main__":
    sys.exit(main())
