"""Answers of the sides, and what several of them say together. Arithmetic only."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

PLAIN = "plain"

# An answer with fewer tokens after its first is compared, and not timed: of a handful of steps a
# single slow one decides.
LEAST_TIMED_TOKENS = 8


@dataclass
class Run:
    """One answer of one side."""

    side: str
    task: str
    prompt: str  # its name
    context: int | None  # prompt tokens asked for; None: the prompt's own length
    repeat: int  # 0-based
    visit: str  # answers of one visit were given in turn to one prompt, and are compared
    place: int  # in the order of the visit
    speculated: bool
    prompt_tokens: int
    completion_tokens: int
    prompt_ms: float  # of the whole prompt; sides of this process share it
    start_ms: float  # of what the side itself did before its first token
    predicted_ms: float  # after the first token
    per_second: float  # tokens after the first, per second
    draft_n: int = 0
    draft_n_accepted: int = 0
    rounds: int = 0
    # parts of predicted_ms; None for a library that does not tell
    draft_ms: float | None = None
    verify_ms: float | None = None
    plan_ms: float | None = None  # searching, learning and judging
    overhead_ms: float | None = None
    model_ms: float | None = None  # what the cost model says for these rounds
    graph_builds: int | None = None
    stopped: str | None = None  # why speculation was given up in the middle
    setup_seconds: float = 0.0  # of the side, before its first answer: measuring, searching
    warmup_seconds: float = 0.0  # answers that are not counted
    differs_at: int | None = None  # first token that is not plain decoding's, 0-based
    margin: float | None = None  # of plain decoding's pick there
    tokens: list[int] = field(default_factory=list, repr=False)
    margins: list[float] = field(default_factory=list, repr=False)  # of this side's picks

    @property
    def timed(self) -> bool:
        return self.completion_tokens > LEAST_TIMED_TOKENS and self.per_second > 0.0

    def to_json(self) -> dict[str, Any]:
        """Everything but the answer itself; the side comes first."""
        data = asdict(self)
        del data["tokens"], data["margins"]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Run:
        """Raises KeyError for a record without one of the fields."""
        names = [f.name for f in fields(cls) if f.name not in ("tokens", "margins")]
        return cls(**{name: data[name] for name in names})


@dataclass
class Summary:
    """What runs of one side say together."""

    side: str
    task: str | None  # None: of all tasks
    context: int | None  # None: of all lengths, or the prompts' own
    speculated: bool
    runs: int
    timed: int  # runs that were long enough to be timed
    prompt_tokens: int  # median
    completion_tokens: int  # median
    per_second: float | None  # median; None without a timed run
    per_second_low: float | None  # first quartile
    per_second_high: float | None  # third quartile
    per_second_mean: float | None
    per_second_deviation: float | None  # standard deviation, None for fewer than two
    # median and quartiles of the paired ratios to plain; None if a text is not explained
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    draft_n: int
    draft_n_accepted: int
    acceptance: float | None  # α: accepted of drafted
    tokens_per_round: float | None
    # medians of the shares of decode time
    draft_share: float | None
    verify_share: float | None
    plan_share: float | None
    overhead_share: float | None
    draft_cost: float | None  # c: a draft step, in plain steps of the same visit
    verify_cost: float | None  # a round's verification, in the same
    model_error: float | None  # median of predicted / measured time - 1
    setup_seconds: float
    warmup_seconds: float
    identical: int  # runs with the text of plain decoding
    explained: int  # runs that differ first where the two best logits are close
    unexplained: int
    largest_margin: float | None  # at a first difference


def compare(plain: Run, other: Run) -> None:
    """Set differs_at and margin of a run against the plain one of the same visit."""
    pairs = zip(plain.tokens, other.tokens, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None and len(plain.tokens) != len(other.tokens):
        at = min(len(plain.tokens), len(other.tokens))
    other.differs_at = at
    other.margin = plain.margins[at] if at is not None and at < len(plain.margins) else None


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def summarize(
    side: str,
    runs: Iterable[Run],
    tolerance: float,
    *,
    task: str | None = None,
    context: int | None = None,
) -> Summary | None:
    """Runs of one side, against the plain ones of the same visits. None where it has none.

    `runs`: of all sides. `tolerance`: distance of the two best logits up to which another pick is
    rounding. `task`, `context`: what the result says it is of; nothing is left out by them.
    """
    every = list(runs)
    plain = {r.visit: r for r in every if r.side == PLAIN}
    own = [r for r in every if r.side == side]
    if not own:
        return None
    timed = [r for r in own if r.timed]
    speeds = [r.per_second for r in timed]
    low, middle, high = quartiles(speeds) if speeds else (None, None, None)
    different = [r for r in own if r.differs_at is not None]
    explained = [r for r in different if r.margin is not None and r.margin <= tolerance]
    unexplained = len(different) - len(explained)
    pairs = [(r, base) for r in timed if (base := plain.get(r.visit)) is not None and base.timed]
    ratio: tuple[float | None, float | None, float | None] = (None, None, None)
    if pairs and not unexplained and side != PLAIN:
        ratio = quartiles([r.per_second / base.per_second for r, base in pairs])
    draft_n, accepted = sum(r.draft_n for r in own), sum(r.draft_n_accepted for r in own)
    rounds = sum(r.rounds for r in own)
    margins = [r.margin for r in different if r.margin is not None]

    def share(name: str) -> float | None:
        return _median(
            value / r.predicted_ms for r in timed if (value := getattr(r, name)) is not None
        )

    def cost(of: Callable[[Run], float | None]) -> float | None:
        """In plain steps."""
        return _median(
            value * base.per_second / 1000.0
            for r, base in pairs
            if r.draft_n and (value := of(r)) is not None
        )

    return Summary(
        side=side,
        task=task,
        context=context,
        speculated=any(r.speculated for r in own),
        runs=len(own),
        timed=len(timed),
        prompt_tokens=round(statistics.median(r.prompt_tokens for r in own)),
        completion_tokens=round(statistics.median(r.completion_tokens for r in own)),
        per_second=middle,
        per_second_low=low,
        per_second_high=high,
        per_second_mean=statistics.fmean(speeds) if speeds else None,
        per_second_deviation=statistics.stdev(speeds) if len(speeds) > 1 else None,
        ratio=ratio[1],
        ratio_low=ratio[0],
        ratio_high=ratio[2],
        draft_n=draft_n,
        draft_n_accepted=accepted,
        acceptance=accepted / draft_n if draft_n else None,
        tokens_per_round=(
            sum(r.completion_tokens - 1 for r in own) / rounds if rounds and draft_n else None
        ),
        draft_share=share("draft_ms"),
        verify_share=share("verify_ms"),
        plan_share=share("plan_ms"),
        overhead_share=share("overhead_ms"),
        draft_cost=cost(lambda r: None if r.draft_ms is None else r.draft_ms / r.draft_n),
        verify_cost=cost(
            lambda r: None if r.verify_ms is None or not r.rounds else r.verify_ms / r.rounds
        ),
        model_error=_median(
            r.model_ms / (r.predicted_ms - (r.plan_ms or 0.0)) - 1.0
            for r in timed
            if r.model_ms is not None and r.predicted_ms > (r.plan_ms or 0.0)
        ),
        setup_seconds=max(r.setup_seconds for r in own),
        warmup_seconds=max(r.warmup_seconds for r in own),
        identical=len(own) - len(different),
        explained=len(explained),
        unexplained=unexplained,
        largest_margin=max(margins, default=None),
    )


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def summaries(
    sides: Sequence[str], runs: Sequence[Run], tolerance: float, *, by_task: bool
) -> list[Summary]:
    """One for each side at each length, and with `by_task` for each task."""
    found = []
    keys = {(r.context, r.task if by_task else None): None for r in runs}
    for context, task in sorted(keys, key=lambda k: (k[0] is not None, k[0] or 0)):
        here = [r for r in runs if r.context == context and task in (None, r.task)]
        for side in sides:
            summary = summarize(side, here, tolerance, task=task, context=context)
            if summary is not None:
                found.append(summary)
    return found
