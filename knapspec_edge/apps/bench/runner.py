"""The comparison itself: one prompt after the other, all sides in turn.

The sides answer the same prompt in turn, with the order rotated, so that a slow minute of the
machine hits all of them. Sides of this process share the keys of the prompt, which is computed
once. Every answer is compared with plain decoding token by token: a difference is reported with its
place and with the distance between the two best logits there, and a side that differs without such
an explanation gets no speed-up. A row is written as soon as it has been compared.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ... import __version__
from ...decode.policy import FixedPolicy, Policy
from ...errors import ContextError, Interrupted, KnapspecError
from ...policies import needs_of
from ..jsonl import Record
from ..peers import Peer, Source
from .options import AUTO, FORCED, PLANNED, Options, sampling_json
from .resume import Key, Rows, missing
from .rows import PLAIN, Run, Summary, compare, quartiles, summaries, summarize
from .sides import Answer, digest, draft_json, own_side, peer_side, prefill
from .tasks import Prompt, build, build_own

if TYPE_CHECKING:
    from ...engine import Engine

# Batches of another width round differently. Up to these distances between the two best logits a
# flip of the pick is rounding (README, Exactness); F32 weights and keys allow next to none.
EXPLAINED_MARGIN = {"f32": 1e-4, "f16": 0.2}
EXPLAINED_MARGIN_QUANTISED = 2.0


@dataclass
class Report:
    """Everything a reader needs to trust and repeat the figures."""

    environment: dict[str, Any]
    options: dict[str, Any]
    plans: dict[str, dict[str, Any]]
    sides: list[Summary]  # all tasks and lengths together
    by_context: list[Summary]
    by_task: list[Summary]  # by length and task
    prompt_speeds: list[dict[str, Any]]  # of plain decoding's library, tokens/s by length
    runs: list[Run]
    notes: list[str]
    complete: bool
    failed: bool = False  # a side gave up

    def to_json(self) -> dict[str, Any]:
        """Everything but the answers themselves."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("sides", "by_context", "by_task"):
            data[name] = [asdict(summary) for summary in data[name]]
        data["runs"] = [run.to_json() for run in self.runs]
        return data


@dataclass
class _Side:
    """One side and what it takes to open it."""

    name: str
    open: Callable[[], Answer]
    digest: str | None = None  # of what it drafts with, where that is not its name alone
    answer: Answer | None = None  # once it is open
    setup_seconds: float = 0.0
    warmup_seconds: float = 0.0
    warmed: set[int | None] = field(default_factory=set)  # lengths


# Called after every answer: (answers done, answers in all, the run).
Progress = Callable[[int, int, Run], None]
# Called while something slow goes on that is no answer: (stage, share done).
Stage = Callable[[str, float | None], None]


def run(
    engine: Engine,
    options: Options,
    progress: Progress | None = None,
    *,
    stage: Stage | None = None,
    sink: Callable[[Record], None] | None = None,
) -> Iterator[Report]:
    """Compare; yields the report so far after every prompt, and at the end.

    So an interrupted comparison keeps its finished rows. `sink` gets each row at once. Raises
    UsageError, ContextError, PlanError, ModelError, LibraryError, OutputError, Interrupted.
    """
    return _Comparison(engine, options, progress, stage, sink).run()


class _Comparison:
    def __init__(
        self,
        engine: Engine,
        options: Options,
        progress: Progress | None,
        stage: Stage | None,
        sink: Callable[[Record], None] | None,
    ) -> None:
        self.engine = engine
        self.options = options
        self.progress = progress
        self.stage = stage
        self.sink = sink
        self.notes: list[str] = []
        self.plans: dict[str, dict[str, Any]] = {}
        self.runs: list[Run] = []
        self.failed = False
        self.environment = environment(engine)
        self.tolerance = explained_margin(self.environment)
        self.session_id = uuid4().hex[:8]
        self.n_visits = 0
        self.measured_seconds: float | None = None  # of what all planned sides rest on

    def run(self) -> Iterator[Report]:
        options = self.options
        with ExitStack() as resources:
            self.resources = resources
            prompts = self.prompts()
            sides = self.sides()
            wanted = {
                key(name, prompt): (prompt.digest, side.digest)
                for prompt in prompts
                for name, side in sides.items()
            }
            same = {
                **self.environment,
                "max_tokens": options.max_tokens,
                "sampling": sampling_json(options.sampling),
            }
            self.rows = resources.enter_context(Rows(options.resume, same, self.sink))
            if self.rows.repaired is not None:
                self.notes.append(self.rows.repaired)
            kept, notes = self.rows.kept(wanted)
            self.notes += notes
            self.runs = kept
            left = missing(wanted, kept)
            if kept:
                self.notes.append(
                    f"{len(wanted) - len(left)} of {len(wanted)} rows were in {options.resume}"
                )
            self.open({name: side for name, side in sides.items() if has(left, name)}, sides)
            self.left = left = {k for k in left if k[0] in sides}
            self.total = len(left)
            self.done = 0
            if not left:
                yield self.report(sides, complete=True)
                return
            order, forward = list(sides), True
            todo = [p for p in prompts if any(key(name, p) in left for name in sides)]
            for number, prompt in enumerate(todo, 1):
                turn = [n for n in (order if forward else order[::-1]) if n in sides]
                # whoever answers is compared with a plain answer of the same visit
                turn = [n for n in turn if n == PLAIN or key(n, prompt) in left]
                self.visit(prompt, turn, sides)
                # Every other time backwards as well: what runs after what matters, too.
                order, forward = order[1:] + order[:1], not forward
                yield self.report(sides, complete=number == len(todo))

    # -- what is compared

    def prompts(self) -> list[Prompt]:
        """All prompts, lengths ascending, tasks in turn."""
        options, engine = self.options, self.engine
        template = engine.require_template() if engine.has_template else None
        room = engine.n_ctx - options.max_tokens
        if options.prompts:
            return [
                build_own(engine.vocabulary, template, own, repeat, room)
                for repeat in range(options.repeats)
                for own in options.prompts
            ]
        longest = max(options.contexts)
        if longest > room:  # said before anything is measured
            raise ContextError(
                f"prompts of {longest} tokens and answers of {options.max_tokens} need a context "
                f"of {longest + options.max_tokens}, and it has {engine.n_ctx}: raise --ctx, or "
                "lower --contexts or --max-tokens"
            )
        return [
            build(engine.vocabulary, template, task, n_tokens, repeat)
            for n_tokens in options.contexts
            for repeat in range(options.repeats)
            for task in options.tasks
        ]

    def sides(self) -> dict[str, _Side]:
        """All sides by name, none of them open."""
        options = self.options
        found = {PLAIN: _Side(PLAIN, partial(self.own, PLAIN, partial(FixedPolicy, None)))}
        for name in options.policies:
            uses = options.draft_model if "draft model" in needs_of(name) else None
            found[name] = _Side(
                name,
                partial(self.own, name, partial(self.policy, name)),
                None if uses is None else digest(os.fspath(uses.resolve())),
            )
        for path in options.plans:
            self.engine.set_speculation(path)
            draft = self.engine.speculation.draft
            assert draft is not None
            self.engine.set_speculation("off")
            name = f"plan {path.stem}"
            self.plans[name] = draft_json(self.engine, draft)
            found[name] = _Side(
                name,
                partial(self.own, name, partial(FixedPolicy, draft)),
                digest(self.plans[name]),
            )
        for source in options.peers:
            place = source.python if source.library is None else source.library
            found[source.name] = _Side(
                source.name, partial(self.peer, source), digest(os.fspath(place))
            )
        return found

    def own(self, name: str, create: Callable[[], Policy]) -> Answer:
        """Open a side of this process."""
        engine, policy = self.engine, create()
        ends = self.more_ends()

        def is_end(token: int) -> bool:
            return token in ends or engine.backend.is_end(token)

        return own_side(engine, name, policy, self.options.sampling, is_end, lambda: engine.costs)

    def peer(self, source: Source) -> Answer:
        """Open the worker process of another build. Raises UsageError, LibraryError."""
        peer = self.resources.enter_context(Peer.beside(self.engine, source))
        peer.ends += sorted(self.more_ends() - set(peer.ends))
        self.notes.append(f"{source.name}: {peer.package}")
        return peer_side(peer)

    def more_ends(self) -> frozenset[int]:
        """Tokens that end an answer in the chat format alone."""
        if not self.engine.has_template:
            return frozenset()
        return self.engine.require_template().extra_end_tokens

    def policy(self, name: str) -> Policy:
        """Raises PlanError, ModelError, UsageError."""
        engine = self.engine
        if name in PLANNED:
            self.measure()
            engine.set_speculation("auto" if name == AUTO else "on", progress=self.stage)
            self.notes.append(f"{name}: {engine.speculation.reason}")
            if name != AUTO and engine.speculation.draft is not None:
                self.plans[name] = draft_json(engine, engine.speculation.draft)
            engine.set_speculation("off")
        policy = engine.create_policy(
            FORCED if name == AUTO else name, forced=name != AUTO, progress=self.stage
        )
        close = getattr(policy, "close", None)
        if close is not None:
            self.resources.callback(close)
        return policy

    def measure(self) -> None:
        """What the planner goes by, at each length: as `plan --at` does, and kept like that."""
        if self.measured_seconds is not None or self.options.prompts:
            return
        started = time.perf_counter()
        try:
            for n_tokens in self.options.contexts:
                self.engine.plan(n_tokens, progress=self.stage)
        finally:
            self.measured_seconds = time.perf_counter() - started

    def open(self, chosen: Mapping[str, _Side], sides: dict[str, _Side]) -> None:
        """Open these sides. One that cannot be had ends the comparison where it was named, and is
        noted and left out otherwise."""
        for name, side in chosen.items():
            started = time.perf_counter()
            try:
                side.answer = side.open()
            except Interrupted:
                raise
            except KnapspecError as error:
                if self.options.named or name not in self.options.policies:
                    raise
                self.notes.append(f"{name} is left out: {error}")
                del sides[name]
                continue
            side.setup_seconds = time.perf_counter() - started
            if name in PLANNED and self.measured_seconds is not None:
                # whoever comes second rests on the same measurement
                side.setup_seconds = max(side.setup_seconds, self.measured_seconds)
        plain = sides[PLAIN]
        if plain.answer is None and any(side.answer is not None for side in sides.values()):
            plain.answer = plain.open()

    # -- comparing

    def visit(self, prompt: Prompt, turn: Sequence[str], sides: dict[str, _Side]) -> None:
        """All sides of the turn answer one prompt."""
        self.n_visits += 1
        visit = f"{self.session_id}-{self.n_visits}"
        prompt_ms = prefill(self.engine, prompt.tokens)
        self.warm_up(prompt, turn, sides)
        peers = {source.name for source in self.options.peers}
        plain: Run | None = None
        waiting: list[Run] = []
        for place, name in enumerate(turn):
            if name not in sides:
                continue
            if self.options.cooldown_seconds:
                time.sleep(self.options.cooldown_seconds)
            result = self.answer(sides, name, prompt, self.options.max_tokens)
            if result is None:
                continue
            result.task, result.prompt = prompt.task, prompt.name
            result.context, result.repeat = prompt.context, prompt.repeat
            result.visit, result.place = visit, place
            result.setup_seconds = round(sides[name].setup_seconds, 3)
            result.warmup_seconds = round(sides[name].warmup_seconds, 3)
            if name not in peers:
                result.prompt_ms = prompt_ms
            waiting.append(result)
            plain = result if name == PLAIN else plain
            if plain is None:
                continue
            for one in waiting:
                compare(plain, one)
                self.runs.append(one)
                self.rows.append(one, prompt.digest, sides[one.side].digest)
                self.done += 1
                self.left.discard(key(one.side, prompt))
                if self.progress is not None:
                    self.progress(min(self.done, self.total), self.total, one)
            waiting = []

    def warm_up(self, prompt: Prompt, turn: Sequence[str], sides: dict[str, _Side]) -> None:
        """A short answer of every side that has given none at this length: what is built and
        learned at first is no part of a row."""
        for name in turn:
            side = sides.get(name)
            if side is None or prompt.context in side.warmed:
                continue
            started = time.perf_counter()
            self.answer(sides, name, prompt, self.options.warmup_tokens)
            side.warmed.add(prompt.context)
            side.warmup_seconds += time.perf_counter() - started

    def answer(
        self, sides: dict[str, _Side], name: str, prompt: Prompt, max_tokens: int
    ) -> Run | None:
        """None where the side failed; it is left out from then on."""
        answer = sides[name].answer
        assert answer is not None
        try:
            return answer(prompt.tokens, max_tokens)
        except Interrupted:
            raise
        except KnapspecError as error:
            if name == PLAIN:
                raise
            self.failed = True
            self.notes.append(f"{name} failed and is left out from {prompt.name} on: {error}")
            self.total -= sum(1 for k in self.left if k[0] == name)
            del sides[name]
            return None

    # -- saying it

    def report(self, sides: Mapping[str, Any], *, complete: bool) -> Report:
        names = list(dict.fromkeys([*sides, *(r.side for r in self.runs)]))
        runs, tolerance = self.runs, self.tolerance
        totals = (summarize(name, runs, tolerance) for name in names)
        return Report(
            environment={**self.environment, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")},
            options={**self.options.to_json(), "explained_margin": tolerance},
            plans=dict(self.plans),
            sides=[s for s in totals if s is not None],
            by_context=summaries(names, runs, tolerance, by_task=False),
            by_task=summaries(names, runs, tolerance, by_task=True),
            prompt_speeds=prompt_speeds(runs),
            runs=list(runs),
            notes=list(self.notes),
            complete=complete and not self.failed,
            failed=self.failed,
        )


def key(side: str, prompt: Prompt) -> Key:
    return (side, prompt.task, prompt.name, prompt.context, prompt.repeat)


def has(keys: set[Key], side: str) -> bool:
    return any(k[0] == side for k in keys)


def prompt_speeds(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """How fast prompts were computed, by length: quartiles in tokens/s."""
    found = []
    plain = [r for r in runs if r.side == PLAIN and r.prompt_ms > 0.0]
    contexts = dict.fromkeys(r.context for r in plain)
    for context in sorted(contexts, key=lambda c: (c is not None, c or 0)):
        here = [r for r in plain if r.context == context]
        speeds = [1000.0 * r.prompt_tokens / r.prompt_ms for r in here]
        lengths = [r.prompt_tokens for r in here]
        low, median, high = quartiles(speeds)
        found.append(
            {
                "context": context,
                "prompt_tokens": round(statistics.median(lengths)),
                "runs": len(speeds),
                "per_second": median,
                "per_second_low": low,
                "per_second_high": high,
            }
        )
    return found


def explained_margin(environment: Mapping[str, Any]) -> float:
    """Distance of the two best logits up to which a flipped pick is rounding, for this model."""
    weights = (environment["model_type"] or "").lower()
    kv_type = environment["settings"]["kv_type"]
    if weights in ("f32", "all f32") and kv_type == "f32":
        return EXPLAINED_MARGIN["f32"]
    if any(name in weights for name in ("f32", "f16")) and kv_type in ("f32", "f16"):
        return EXPLAINED_MARGIN["f16"]
    return EXPLAINED_MARGIN_QUANTISED


def environment(engine: Engine) -> dict[str, Any]:
    """Machine, library, model and settings: the same for the whole comparison, and in each row."""
    import platform

    from ...native import library_info

    info = engine.info
    library = library_info()
    return {
        "version": __version__,
        "model": None if info is None else info.path.name,
        "model_fingerprint": engine.fingerprint(),
        "model_type": None if info is None else info.file_type,
        "model_architecture": None if info is None else info.architecture,
        "model_size": None if info is None else info.size_bytes,
        "model_n_params": None if info is None else info.n_params,
        "settings": dict(engine.backend.settings),  # type: ignore[attr-defined]
        "library_digest": library["digest"],
        "library_build": library["build"],
        "devices": [d["description"] for d in library["devices"]],
        "machine": {
            "devices": [d["description"] for d in library["devices"]],
            "architecture": platform.machine(),
            "system": platform.system(),
        },
        "python": platform.python_version(),
    }


__all__ = ["EXPLAINED_MARGIN", "EXPLAINED_MARGIN_QUANTISED", "Progress", "Report", "run"]
