"""Paired comparison: plain decoding, forced plans, and another build of llama.cpp.

The sides answer the same prompts in turn, answer by answer, with the order rotated, so that a slow
minute of the machine hits all of them. Everything is greedy and every answer is compared with plain
decoding token by token: a difference is reported with its place and with the distance between the
two best logits there, and a side that differs without such an explanation gets no speed-up.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..decode.policy import FixedPolicy, Policy
from ..errors import PlanError, UsageError
from ..records import Draft, Sampling
from .peers import UNPATCHED, Peer, parse_all

if TYPE_CHECKING:
    from ..engine import Engine

PLAIN = "plain"
AUTO = "auto"
FORCED = "best plans, forced"

# Batches of another width round differently. Up to these distances between the two best logits a
# flip of the pick is rounding (README, Exactness); F32 weights and keys allow next to none.
EXPLAINED_MARGIN = {"f32": 1e-4, "f16": 0.2}
EXPLAINED_MARGIN_QUANTISED = 2.0

PROMPTS = (
    "Explain why the sky is blue in a few sentences.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "List five tips for someone who starts to learn the piano.",
    "What is the difference between a virus and a bacterium?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Describe how bread is made, step by step.",
    "Give me a recipe for a simple vegetable soup.",
    "Summarize the plot of Romeo and Juliet in one paragraph.",
    "Write an email that asks a colleague to move a meeting to Thursday.",
    "What are the main causes of ocean tides?",
    "Translate into French: The train leaves at seven in the morning.",
    "Explain recursion to a ten-year-old child.",
    "Name three famous scientists and what they discovered.",
    "Write a poem about the first snow of winter.",
    "How does a bicycle stay upright when it moves?",
    "Compare living in a city with living in a village.",
    "What should one think of before adopting a dog?",
    "Write a regular expression that matches a date such as 2024-05-17, and explain it.",
    "Tell me about the history of the printing press.",
    "How do you calculate the area of a circle? Give an example.",
)


@dataclass(frozen=True)
class Options:
    """What to compare. `unpatched`: folder of another build's libraries, or None; `peers`: further
    ones, as apps/peers.py parses them."""

    n_prompts: int = len(PROMPTS)
    max_tokens: int = 128
    repeats: int = 1
    warmup_tokens: int = 16
    cooldown_seconds: float = 0.0
    plans: tuple[Path, ...] = ()
    best: bool = True  # the planner's best plan, forced
    unpatched: Path | None = None
    peers: tuple[str, ...] = ()


@dataclass
class Run:
    """One answer of one side."""

    side: str
    prompt: int
    repeat: int
    speculated: bool
    prompt_tokens: int
    completion_tokens: int
    prompt_ms: float
    predicted_ms: float  # after the first token
    per_second: float  # tokens after the first, per second
    draft_n: int = 0
    draft_n_accepted: int = 0
    rounds: int = 0
    overhead_share: float | None = None  # of the decode time, outside native calls
    graph_builds: int | None = None
    differs_at: int | None = None  # first token that is not plain decoding's, 0-based
    margin: float | None = None  # of plain decoding's pick there
    tokens: list[int] = field(default_factory=list, repr=False)
    margins: list[float] = field(default_factory=list, repr=False)  # of this side's picks


@dataclass
class Side:
    """What all runs of one side say together."""

    name: str
    speculated: bool
    runs: int
    per_second: float  # median
    per_second_low: float  # first quartile
    per_second_high: float  # third quartile
    ratio: float | None  # median of the paired ratios to plain; None if the text is not explained
    ratio_low: float | None
    ratio_high: float | None
    draft_n: int
    acceptance: float | None
    tokens_per_round: float | None
    overhead_share: float | None
    identical: int  # runs with the text of plain decoding
    explained: int  # runs that differ first where the two best logits are close
    unexplained: int
    largest_margin: float | None  # at a first difference


@dataclass
class Report:
    """Everything a reader needs to trust and repeat the figures."""

    environment: dict[str, Any]
    options: dict[str, Any]
    plans: dict[str, dict[str, Any]]
    sides: list[Side]
    runs: list[Run]
    notes: list[str]
    complete: bool

    def to_json(self) -> dict[str, Any]:
        """Everything but the answers themselves."""
        data = asdict(self)
        for run in data["runs"]:
            del run["tokens"], run["margins"]
        return data


# Called after every answer: (answers done, answers in all, the run).
Progress = Callable[[int, int, Run], None]


def run(engine: Engine, options: Options, progress: Progress | None = None) -> Iterator[Report]:
    """Compare; yields the report so far after every round of all sides, and at the end.

    So an interrupted comparison keeps its finished rounds. Raises UsageError, PlanError,
    LibraryError, Interrupted.
    """
    prompts = PROMPTS[: max(1, options.n_prompts)]
    sources = parse_all(options.peers, options.unpatched)
    policies, drafts, notes = _policies(engine, options)
    with ExitStack() as resources:
        sides: dict[str, Callable[[list[int], int], Run]] = {
            name: _own_side(engine, name, policy) for name, policy in policies.items()
        }
        for source in sources:
            if source.name in sides:
                raise UsageError(f"{source.given}: a side of the comparison has this name")
            peer = resources.enter_context(Peer.beside(engine, source))
            sides[source.name] = _peer_side(peer)
            notes.append(f"{source.name}: {peer.package}")
        token_lists = [_prompt_tokens(engine, text) for text in prompts]
        for side in sides.values():
            side(token_lists[0], options.warmup_tokens)

        environment = _environment(engine)
        runs: list[Run] = []
        total = len(sides) * len(prompts) * options.repeats
        order, forward = list(sides), True
        for repeat in range(options.repeats):
            for number, tokens in enumerate(token_lists):
                block = []
                for name in order if forward else order[::-1]:
                    if options.cooldown_seconds:
                        time.sleep(options.cooldown_seconds)
                    result = sides[name](tokens, options.max_tokens)
                    result.prompt, result.repeat = number, repeat
                    block.append(result)
                    if progress is not None:
                        progress(len(runs) + len(block), total, result)
                # Every other time backwards as well: what runs after what matters, too.
                order, forward = order[1:] + order[:1], not forward
                _compare(block)
                runs += block
                complete = len(runs) == total
                yield _report(engine, environment, options, drafts, sides, runs, notes, complete)


def _prompt_tokens(engine: Engine, text: str) -> list[int]:
    if engine.has_template:
        return engine.require_template().apply([{"role": "user", "content": text}]).tokens
    from ..text.vocabulary import tokenize_prompt

    return tokenize_prompt(engine.vocabulary, text + "\n\n", parse_special=False)


def _policies(
    engine: Engine, options: Options
) -> tuple[dict[str, Policy], dict[str, Draft], list[str]]:
    """What decides in each side, the drafts that the forced ones begin with, and what the reader
    should know."""
    policies: dict[str, Policy] = {PLAIN: FixedPolicy(None)}
    drafts: dict[str, Draft] = {}
    notes: list[str] = []
    if options.best:
        try:
            engine.set_speculation("on")
        except PlanError as error:
            notes.append(str(error))
        else:
            notes.append(engine.speculation.reason)
            assert engine.speculation.draft is not None
            drafts[FORCED] = engine.speculation.draft
            policies[FORCED] = engine.policy
            engine.set_speculation("auto")
            policies[AUTO] = engine.policy
    for path in options.plans:
        engine.set_speculation(path)
        assert engine.speculation.draft is not None
        name = f"plan {path.stem}"
        if name in drafts:
            raise UsageError(f"two plan files are called {path.stem}; rename one of them")
        drafts[name] = engine.speculation.draft
        policies[name] = engine.policy
    engine.set_speculation("off")
    return policies, drafts, notes


def _own_side(engine: Engine, name: str, policy: Policy) -> Callable[[list[int], int], Run]:
    """A side that this process computes."""
    session, backend = engine.session, engine.backend
    greedy = Sampling()

    def builds() -> int | None:
        stats = getattr(backend, "graph_stats", None)
        return None if stats is None else int(stats()["n_builds"])

    def answer(prompt: list[int], max_tokens: int) -> Run:
        before = builds()
        with engine.interruptible():
            generation = session.generate(
                prompt, sampling=greedy, policy=policy, max_tokens=max_tokens, reuse=False
            )
            events = list(generation)
        stats = generation.stats
        after = builds()
        later = stats.completion_tokens - 1  # the first token comes with the prompt
        return Run(
            side=name,
            prompt=0,
            repeat=0,
            speculated=stats.draft_n > 0,
            prompt_tokens=stats.prompt_tokens,
            completion_tokens=stats.completion_tokens,
            prompt_ms=stats.prompt_ms,
            predicted_ms=stats.predicted_ms,
            per_second=1000.0 * later / stats.predicted_ms if stats.predicted_ms else 0.0,
            draft_n=stats.draft_n,
            draft_n_accepted=stats.draft_n_accepted,
            rounds=stats.rounds,
            overhead_share=stats.overhead_ms / stats.predicted_ms if stats.predicted_ms else None,
            graph_builds=None if before is None or after is None else after - before,
            tokens=[e.token for e in events],
            margins=[0.0 if e.margin is None else e.margin for e in events],
        )

    return answer


def _peer_side(peer: Peer) -> Callable[[list[int], int], Run]:
    """A side that the worker process of another build computes."""

    def answer(prompt: list[int], max_tokens: int) -> Run:
        found = peer.answer(prompt, max_tokens)
        n, ms = len(found.tokens), found.predicted_ms
        return Run(
            side=peer.source.name,
            prompt=0,
            repeat=0,
            speculated=False,
            prompt_tokens=len(prompt),
            completion_tokens=n,
            prompt_ms=found.prompt_ms,
            predicted_ms=ms,
            per_second=1000.0 * (n - 1) / ms if ms else 0.0,
            tokens=found.tokens,
        )

    return answer


def _compare(block: Sequence[Run]) -> None:
    """Set differs_at and margin of every run against the plain one of the same round."""
    plain = next(r for r in block if r.side == PLAIN)
    for other in block:
        pairs = zip(plain.tokens, other.tokens, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is None and len(plain.tokens) != len(other.tokens):
            at = min(len(plain.tokens), len(other.tokens))
        other.differs_at = at
        other.margin = plain.margins[at] if at is not None and at < len(plain.margins) else None


def explained_margin(engine: Engine) -> float:
    """Distance of the two best logits up to which a flipped pick is rounding, for this model."""
    weights = engine.info.file_type.lower() if engine.info is not None else ""
    kv_type = engine.backend.settings["kv_type"]  # type: ignore[attr-defined]
    if weights in ("f32", "all f32") and kv_type == "f32":
        return EXPLAINED_MARGIN["f32"]
    if any(name in weights for name in ("f32", "f16")) and kv_type in ("f32", "f16"):
        return EXPLAINED_MARGIN["f16"]
    return EXPLAINED_MARGIN_QUANTISED


def _report(
    engine: Engine,
    environment: dict[str, Any],
    options: Options,
    drafts: dict[str, Draft],
    sides: dict[str, Any],
    runs: list[Run],
    notes: list[str],
    complete: bool,
) -> Report:
    tolerance = explained_margin(engine)
    plain = {(r.prompt, r.repeat): r for r in runs if r.side == PLAIN}
    summaries = [
        _summary(name, [r for r in runs if r.side == name], plain, tolerance) for name in sides
    ]
    settings = {**asdict(options), "explained_margin": tolerance}
    settings["plans"] = [os.fspath(p) for p in options.plans]
    settings["unpatched"] = None if options.unpatched is None else os.fspath(options.unpatched)
    plans = {
        name: {
            "skipped": [str(s) for s in engine.backend.sublayers if s.index in d.plan.skipped],
            "max_tokens": d.max_tokens,
            "min_probability": d.min_probability,
        }
        for name, d in drafts.items()
    }
    stamped = {**environment, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    return Report(stamped, settings, plans, summaries, list(runs), notes, complete)


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _summary(
    name: str, runs: list[Run], plain: dict[tuple[int, int], Run], tolerance: float
) -> Side:
    low, middle, high = _quartiles([r.per_second for r in runs])
    different = [r for r in runs if r.differs_at is not None]
    explained = [r for r in different if r.margin is not None and r.margin <= tolerance]
    unexplained = len(different) - len(explained)
    ratios = [
        r.per_second / base.per_second
        for r in runs
        if (base := plain[r.prompt, r.repeat]).per_second and r.completion_tokens > 1
    ]
    ratio: tuple[float | None, float | None, float | None] = (None, None, None)
    if ratios and not unexplained and name != PLAIN:
        ratio = _quartiles(ratios)
    draft_n, rounds = sum(r.draft_n for r in runs), sum(r.rounds for r in runs)
    shares = [r.overhead_share for r in runs if r.overhead_share is not None]
    margins = [r.margin for r in different if r.margin is not None]
    return Side(
        name=name,
        speculated=any(r.speculated for r in runs),
        runs=len(runs),
        per_second=middle,
        per_second_low=low,
        per_second_high=high,
        ratio=ratio[1],
        ratio_low=ratio[0],
        ratio_high=ratio[2],
        draft_n=draft_n,
        acceptance=sum(r.draft_n_accepted for r in runs) / draft_n if draft_n else None,
        tokens_per_round=(
            sum(r.completion_tokens - 1 for r in runs) / rounds if rounds and draft_n else None
        ),
        overhead_share=statistics.median(shares) if shares else None,
        identical=len(runs) - len(different),
        explained=len(explained),
        unexplained=unexplained,
        largest_margin=max(margins, default=None),
    )


def _environment(engine: Engine) -> dict[str, Any]:
    """Machine, library, model and settings: the same for the whole comparison."""
    from ..native import library_info

    info = engine.info
    library = library_info()
    return {
        "version": __version__,
        "model": None if info is None else info.path.name,
        "model_fingerprint": engine.fingerprint(),
        "model_type": None if info is None else info.file_type,
        "settings": engine.backend.settings,  # type: ignore[attr-defined]
        "library_digest": library["digest"],
        "library_build": library["build"],
        "devices": [d["description"] for d in library["devices"]],
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def markdown(report: Report) -> str:
    """The report as a table for people, with the machine above and the notes below it."""
    e, o = report.environment, report.options
    settings = e["settings"]
    lines = [
        f"Model {e['model']} ({e['model_type']}), {', '.join(e['devices'])}, "
        f"{settings['threads']} threads, flash attention {settings['flash_attn']}, "
        f"{settings['kv_type']} keys and values; greedy, up to {o['max_tokens']} tokens, "
        f"{o['n_prompts']} prompts × {o['repeats']}.",
        "",
        "| side | speculated | tokens/s (quartiles) | against plain (quartiles) | drafted | "
        "accepted | tokens/round | overhead | same text |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for s in report.sides:
        ratio = "–"
        if s.name != PLAIN:
            ratio = (
                f"{s.ratio:.2f}× ({s.ratio_low:.2f}–{s.ratio_high:.2f})"
                if s.ratio is not None
                else "not given: the text differs"
            )
        same = f"{s.identical} of {s.runs}"
        if s.explained:
            same += f", {s.explained} by rounding (margin up to {s.largest_margin:.2g})"
        if s.unexplained:
            same += f", **{s.unexplained} unexplained**"
        accepted = "–" if s.acceptance is None else f"{s.acceptance:.2f}"
        per_round = "–" if s.tokens_per_round is None else f"{s.tokens_per_round:.2f}"
        overhead = "–" if s.overhead_share is None else f"{100 * s.overhead_share:.1f} %"
        lines.append(
            f"| {s.name} | {'yes' if s.speculated else 'no'} | {s.per_second:.1f} "
            f"({s.per_second_low:.1f}–{s.per_second_high:.1f}) | {ratio} | {s.draft_n} | "
            f"{accepted} | {per_round} | {overhead} | {same if s.name != PLAIN else '–'} |"
        )
    lines.append("")
    for name, plan in report.plans.items():
        lines.append(
            f"* {name}: skips {', '.join(plan['skipped'])}; up to {plan['max_tokens']} drafted, "
            f"stop below {plan['min_probability']:.2f}"
        )
    lines += [f"* {note}" for note in report.notes]
    if not report.complete:
        lines.append("* Interrupted: the figures are of the rounds that were finished.")
    return "\n".join(lines)


__all__ = ["UNPATCHED", "Options", "Progress", "Report", "Run", "Side", "markdown", "run"]
