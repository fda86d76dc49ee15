"""What one pick costs: by setting, by size of the vocabulary, with a grammar, and around it.

Times of the native pick are those of knapspec_pick without the copy that it makes of the row and
without the call from Python, which are timed beside it: the loop has neither. All that is compared
takes turns. Rows are those of a real answer; for a vocabulary that the model does not have, rows of
several places stand side by side. A round is one of the real loop with γ = 4, in the same run.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import _measuring as measuring  # noqa: E402
from _rounds import quartiles, visit  # noqa: E402
from _sampled import SETTINGS, NativePick, Recorder, Row, answered, primed  # noqa: E402

from knapspec_edge.apps.report import sig  # noqa: E402
from knapspec_edge.backend import Backend  # noqa: E402
from knapspec_edge.decode.session import Session  # noqa: E402
from knapspec_edge.errors import NativeError, UsageError  # noqa: E402
from knapspec_edge.native import library  # noqa: E402
from knapspec_edge.records import GREEDY, Draft, Grammar, Pick, Plan, Sampling  # noqa: E402
from knapspec_edge.text.calibration import long_calibration_tokens  # noqa: E402
from knapspec_edge.text.grammar import ANY_JSON, grammar_of_schema  # noqa: E402
from knapspec_edge.text.stop import StopFilter  # noqa: E402
from knapspec_edge.text.stream import StreamDecoder  # noqa: E402
from knapspec_edge.text.templates import choose_template  # noqa: E402

Show = Callable[[str, float], None]
Call = Callable[[], object]

GOAL = 0.03  # share of a round that all its picks together may take
DRAFTED = 4  # γ of the round
PICKS = 2 * DRAFTED + 1  # of the draft, and of every row that is verified
LARGE_VOCABULARY = 262_144
ROWS = 12
ANSWER_TOKENS = 48
ROUND_CONTEXT_TOKENS = 256
ROUND_VISITS = 3  # before and after everything else
LEAST_TURNS = 5
HISTORY_TOKENS = 8192
REPORTED = 10  # most probable tokens where log-probabilities are asked for
GRAMMAR_ANSWERS = 4
GRAMMAR_TOKENS = 40
PYTHON_TOKENS = 4000
STOPS = ("\n\nUser:", "</answer>")

# What is timed on every kind of row: (name, settings, tokens of text before the row).
CASES: tuple[tuple[str, Sampling, int], ...] = (
    ("greedy", GREEDY, 0),
    ("T 1.0", SETTINGS["t1.0"], 0),
    ("T 1.0, min-p 0.05", Sampling(1.0, min_p=0.05), 0),
    ("paper: T 0.7, top-k 50, top-p 0.95", SETTINGS["paper"], 0),
    ("top-k 40, top-p 0.95, min-p 0.05, T 0.8", SETTINGS["default"], 0),
    ("the same, penalties over 64 tokens", SETTINGS["penalised"], HISTORY_TOKENS),
    (
        "the same, penalties over 8K tokens",
        replace(SETTINGS["penalised"], penalty_last_n=-1),
        HISTORY_TOKENS,
    ),
    ("T 1.0, penalties over 8K tokens",
     Sampling(1.0, repeat_penalty=1.1, penalty_last_n=-1), HISTORY_TOKENS),
    ("top-p 0.95 alone, T 0.7", Sampling(0.7, top_p=0.95), 0),
    ("typical 0.9 alone, T 0.7", Sampling(0.7, typical_p=0.9), 0),
)  # fmt: skip
GRAMMAR_CASES: dict[str, Sampling] = {
    "greedy": GREEDY,
    "top-k 40, top-p 0.95, min-p 0.05, T 0.8": SETTINGS["default"],
    "T 1.0": SETTINGS["t1.0"],
    "top-p 0.95 alone, T 0.7": Sampling(0.7, top_p=0.95),
}


# ---------------------------------------------------------------------------------------------
# Timing


class Time(NamedTuple):
    """Quartiles, in microseconds."""

    low: float
    median: float
    high: float

    def less(self, us: float) -> Time:
        return Time(*(max(0.0, t - us) for t in self))


def time_of(us: Sequence[float]) -> Time:
    return Time(*quartiles(us))


def timed(
    cases: Sequence[Sequence[Call]],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[float], None] = lambda _: None,
) -> list[list[list[float]]]:
    """Microseconds [case][call][turn]. The cases take turns, each with all its calls in order, for
    so many seconds and LEAST_TURNS times at least; a first turn does not count."""
    found: list[list[list[float]]] = [[[] for _ in calls] for calls in cases]
    started = clock()
    turns = 0
    while turns <= LEAST_TURNS or clock() - started < seconds:
        for case, calls in enumerate(cases):
            for number, call in enumerate(calls):
                before = clock()
                call()
                us = 1e6 * (clock() - before)
                if turns:
                    found[case][number].append(us)
        turns += 1
        progress(min(1.0, max(turns / LEAST_TURNS, (clock() - started) / max(seconds, 1e-9))))
    return found


def _all(case: Sequence[Sequence[float]]) -> list[float]:
    return [us for call in case for us in call]


@dataclass(frozen=True)
class Cost:
    """One pick of one kind of rows."""

    n_vocab: int
    rows: str  # what they are
    setting: str
    us: Time
    share: float | None  # of a round of the model, all its picks; None where it has no such rows


@dataclass
class GrammarCost:
    """Picks that a grammar holds for, on the rows of answers that it made."""

    setting: str
    places: int
    rejected: int  # places whose first choice it turned down
    plain: Time  # the same picks without a grammar
    test: Time | None  # what the grammar adds where the first choice passes
    rejection: Time | None  # and where it does not
    worst_us: float | None  # the most that a rejection adds
    share: float  # of a round, with rejections as often as here


@dataclass
class Found:
    """Everything that was timed with one model."""

    n_vocab: int
    round_ms: tuple[float, float, float]
    copies: dict[int, Time] = field(default_factory=dict)  # of a row, by its length
    call: Time = Time(0.0, 0.0, 0.0)  # from Python, without any work
    costs: list[Cost] = field(default_factory=list)
    grammars: list[GrammarCost] = field(default_factory=list)
    logprobs: dict[int, Time] = field(default_factory=dict)  # by how many tokens are reported
    python: dict[str, float] = field(default_factory=dict)  # microseconds for each token
    tokens_per_round: float = 1.0


# ---------------------------------------------------------------------------------------------
# Rows


def rows_of(backend: Backend, prompt: Sequence[int], sampling: Sampling, count: int) -> list[Row]:
    """Rows of the first places of an answer."""
    recorder = Recorder(backend, lambda _: 0)
    session = primed(recorder, prompt)
    list(session.generate(prompt, sampling=sampling, is_end=lambda _: False, max_tokens=count))
    return [recorder.rows[i] for i in range(count)]


def of_length(rows: Sequence[Row], n_vocab: int) -> list[Row]:
    """Rows of so many logits: cut, or continued with those of the next places."""
    n = len(rows)
    repeats = -(-n_vocab // len(rows[0]))
    return [np.concatenate([rows[(i + k) % n] for k in range(repeats)])[:n_vocab] for i in range(n)]


def flat_rows(n_vocab: int, count: int) -> list[Row]:
    """Rows in which nothing is likely: logits that differ by a tenth."""
    random = np.random.default_rng(0)
    return [random.normal(0.0, 0.1, n_vocab).astype(np.float32) for _ in range(count)]


# ---------------------------------------------------------------------------------------------
# Measuring


def round_times(backend: Backend, prompt: Sequence[int], draft: Draft) -> list[tuple[float, float]]:
    """(ms, tokens) of a round, of several visits."""
    session = Session(backend)
    visits = [visit(session, prompt, draft) for _ in range(ROUND_VISITS)]
    return [(v.ms / v.rounds, v.tokens / v.rounds) for v in visits]


def share_of_round(us: float, greedy_us: float, round_ms: float, picks: int = PICKS) -> float:
    """What so many picks take of a round, of which a greedy one was timed with its own PICKS."""
    mine = picks * us
    return mine / (1000.0 * round_ms - PICKS * greedy_us + mine)


def _pick_costs(
    found: Found,
    n_vocab: int,
    kinds: dict[str, list[Row]],
    text: Sequence[int],
    own: bool,
    seconds: float,
    progress: Callable[[float], None],
) -> None:
    pick = NativePick()
    buffer = np.empty(n_vocab, dtype=np.float32)
    copies = [_copy(buffer, row) for row in next(iter(kinds.values()))]
    tiny = pick.prepared(np.zeros(16, dtype=np.float32), GREEDY, 0, ())
    cases: list[list[Call]] = [copies, [tiny] * ROWS]
    names = []
    for kind, rows in kinds.items():
        for name, sampling, n_text in CASES:
            history = text[:n_text]
            cases.append([
                pick.prepared(row, sampling, len(history) + i, history)
                for i, row in enumerate(rows)
            ])  # fmt: skip
            names.append((kind, name))
    times = timed(cases, seconds, progress=progress)
    found.copies[n_vocab] = time_of(_all(times[0]))
    found.call = time_of(_all(times[1]))
    besides = found.copies[n_vocab].median + found.call.median
    net = [time_of(_all(case)).less(besides) for case in times[2:]]
    greedy = next(t for t, (_, name) in zip(net, names, strict=True) if name == CASES[0][0])
    for us, (kind, name) in zip(net, names, strict=True):
        share = share_of_round(us.median, greedy.median, found.round_ms[1]) if own else None
        found.costs.append(Cost(n_vocab, kind, name, us, share))


def _copy(buffer: Row, row: Row) -> Call:
    return lambda: np.copyto(buffer, row)


def _grammar_costs(
    found: Found, backend: Any, model: Any, prompts: Sequence[Sequence[int]], greedy_us: float,
    seconds: float, progress: Callable[[float], None],
) -> None:  # fmt: skip
    """Each setting on the text that it gives itself under a JSON grammar."""
    lib = library.load()._lib
    grammar = Grammar(grammar_of_schema(ANY_JSON)[0])
    handle = lib.knapspec_grammar_init(
        model.pointer, grammar.text.encode(), grammar.root.encode(), None, 0
    )
    if not handle:
        raise NativeError("this library cannot read the grammar for any JSON value")
    try:
        for number, (name, sampling) in enumerate(GRAMMAR_CASES.items()):
            with_it: list[Call] = []
            without: list[Call] = []
            rejected: list[bool] = []
            for seed, prompt in enumerate(prompts[:GRAMMAR_ANSWERS], 1):
                law = replace(sampling, seed=seed)
                held = replace(law, grammar=grammar)
                recorder = Recorder(backend, lambda _: 0)
                session = primed(recorder, prompt)
                tokens = answered(session, prompt, held, None, GRAMMAR_TOKENS).tokens
                free, bound = NativePick(), NativePick(handle, len(prompt))
                for i in range(len(tokens)):
                    place = (recorder.rows[i], law, len(prompt) + i, [*prompt, *tokens[:i]])
                    without.append(free.prepared(*place))
                    with_it.append(bound.prepared(*place))
                    first = free(*place).token
                    answer = (ctypes.c_int32 * i)(*tokens[:i])
                    rejected.append(not lib.knapspec_grammar_allows(handle, answer, i, first))
            base = number / len(GRAMMAR_CASES)
            times = timed(
                [without, with_it],
                seconds / len(GRAMMAR_CASES),
                progress=lambda share, base=base: progress(base + share / len(GRAMMAR_CASES)),
            )
            found.grammars.append(
                _grammar_cost(name, times[0], times[1], rejected, greedy_us, found)
            )
    finally:
        lib.knapspec_grammar_free(handle)


def _grammar_cost(
    name: str,
    without: Sequence[Sequence[float]],
    with_it: Sequence[Sequence[float]],
    rejected: Sequence[bool],
    greedy_us: float,
    found: Found,
) -> GrammarCost:
    """Of times [place][turn]."""
    added = [
        statistics.median(a) - statistics.median(b) for a, b in zip(with_it, without, strict=True)
    ]
    passed = [us for us, no in zip(added, rejected, strict=True) if not no]
    turned_down = [us for us, no in zip(added, rejected, strict=True) if no]
    besides = found.copies[found.n_vocab].median + found.call.median
    plain = time_of(_all(without)).less(besides)
    whole = plain.median + sum(added) / len(added)
    return GrammarCost(
        name,
        len(added),
        len(turned_down),
        plain,
        time_of(passed) if passed else None,
        time_of(turned_down) if turned_down else None,
        max(turned_down, default=None),
        share_of_round(whole, greedy_us, found.round_ms[1]),
    )


def _logprob_costs(found: Found, backend: Any, prompt: Sequence[int], seconds: float) -> None:
    """Of the rows of one verification."""
    lib = library.load()._lib
    session = primed(backend, prompt)
    tokens = answered(session, prompt, GREEDY, None, DRAFTED + 2).tokens
    backend.truncate(len(prompt))
    picks = backend.verify(list(tokens[: DRAFTED + 1]), GREEDY)
    tokens_out = (ctypes.c_int32 * REPORTED)()
    logprobs = (ctypes.c_float * REPORTED)()
    one = ctypes.c_float()

    def call(row: int, token: int, n: int) -> Call:
        return lambda: lib.knapspec_logprobs(
            backend.pointer, row, token, n, ctypes.byref(one), tokens_out, logprobs
        )

    numbers = (0, REPORTED)
    cases = [[call(row, p.token, n) for row, p in enumerate(picks)] for n in numbers]
    for n, times in zip(numbers, timed(cases, seconds), strict=True):
        found.logprobs[n] = time_of(_all(times)).less(found.call.median)


class Instant:
    """A backend that computes nothing: what an answer takes with it is the Python around."""

    n_ctx = 10**6
    n_past = 0
    max_verify_tokens = 32
    refusal = None

    def __init__(self, sublayers: Any) -> None:
        self.sublayers = sublayers
        self._pick = Pick(1, 1.0, 1.0)

    def is_end(self, token: int) -> bool:
        return False

    def check_sampling(self, sampling: Sampling) -> None:
        pass

    def prefill(self, tokens: Sequence[int], sampling: Sampling, progress: Any = None) -> Pick:
        self.n_past += len(tokens)
        return self._pick

    def decode(self, token: int, sampling: Sampling, plan: Plan | None = None) -> Pick:
        self.n_past += 1
        return self._pick

    def verify(self, tokens: Sequence[int], sampling: Sampling) -> list[Pick]:
        self.n_past += len(tokens)
        return [Pick(1, 1.0, 1.0) for _ in tokens]

    def truncate(self, n_tokens: int) -> None:
        self.n_past = n_tokens


def python_costs(
    sublayers: Any,
    plan: Plan,
    vocabulary: Any,
    tokens: Sequence[int],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Microseconds of Python for each token of an answer, by part."""

    def per_token(body: Callable[[], int]) -> float:
        found = []
        for _ in range(LEAST_TURNS):
            started = clock()
            n = body()
            found.append(1e6 * (clock() - started) / n)
        return statistics.median(found)

    def loop(draft: Draft | None) -> int:
        session = Session(Instant(sublayers))  # type: ignore[arg-type]
        return sum(1 for _ in session.generate([1], draft=draft, max_tokens=PYTHON_TOKENS))

    pieces = (list(tokens) * (1 + PYTHON_TOKENS // len(tokens)))[:PYTHON_TOKENS]
    decoder = StreamDecoder(vocabulary)
    texts = [decoder.push(token) for token in pieces]

    def decode() -> int:
        stream = StreamDecoder(vocabulary)
        for token in pieces:
            stream.push(token)
        return len(pieces)

    def stop() -> int:
        stops = StopFilter(STOPS)
        for text in texts:
            stops.push(text)
        return len(texts)

    return {
        "loop, plain": per_token(lambda: loop(None)),
        f"loop, {DRAFTED} drafted and all accepted": per_token(
            lambda: loop(Draft(plan, DRAFTED, 0.0))
        ),
        "detokeniser": per_token(decode),
        f"{len(STOPS)} stop strings": per_token(stop),
    }


def measure(
    backend: Any,
    model: Any,
    prompts: Sequence[Sequence[int]],
    plan: Plan,
    options: argparse.Namespace,
    show: Show,
) -> Found:
    template = choose_template(model)
    long_prompt = long_calibration_tokens(model, template, ROUND_CONTEXT_TOKENS)
    draft = Draft(plan, DRAFTED, 0.0)
    show("timing rounds", 0.0)
    before = round_times(backend, long_prompt, draft)
    found = Found(backend.n_vocab, quartiles([ms for ms, _ in before]))
    rows = rows_of(backend, prompts[0], SETTINGS["default"], ROWS)
    text = long_calibration_tokens(model, template, HISTORY_TOKENS)
    sizes = [backend.n_vocab, *(n for n in (options.vocab,) if n != backend.n_vocab)]
    for n_vocab in sizes:
        own = n_vocab == backend.n_vocab
        kinds = {
            "of an answer" if own else "of several places": of_length(rows, n_vocab),
            "flat": flat_rows(n_vocab, ROWS),
        }
        what = f"timing picks of {n_vocab:,}"
        _pick_costs(found, n_vocab, kinds, text, own, options.budget,
                    lambda share, what=what: show(what, share))  # fmt: skip
    after = round_times(backend, long_prompt, draft)
    # of the whole run, which the shares are of
    found.round_ms = quartiles([ms for ms, _ in (*before, *after)])
    found.tokens_per_round = statistics.median(n for _, n in (*before, *after))
    greedy = next(c.us.median for c in found.costs if c.setting == CASES[0][0])
    found.costs = [
        c if c.share is None
        else replace(c, share=share_of_round(c.us.median, greedy, found.round_ms[1]))
        for c in found.costs
    ]  # fmt: skip
    _grammar_costs(found, backend, model, prompts, greedy, options.budget,
                   lambda share: show("timing grammars", share))  # fmt: skip
    _logprob_costs(found, backend, prompts[0], 0.1 * options.budget)
    show("timing Python", 0.0)
    found.python = python_costs(backend.sublayers, plan, model, prompts[0])
    return found


# ---------------------------------------------------------------------------------------------
# What it says


def _words(us: Time | None) -> str:
    return "–" if us is None else f"{sig(us.median)} ({sig(us.low)}–{sig(us.high)})"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{sig(100 * share, 2)} %"


def report(found: Found) -> list[str]:
    low, median, high = found.round_ms
    lines = [
        f"A round of {DRAFTED} drafted tokens takes {median:.1f} ms ({low:.1f}–{high:.1f}) and has "
        f"{PICKS} picks. Times are microseconds, quartiles in parentheses."
    ]
    kinds = list(dict.fromkeys((c.n_vocab, c.rows) for c in found.costs))
    heads = ["a pick"]
    for n_vocab, rows in kinds:
        heads.append(f"{n_vocab:,} entries, {rows}")
        if any(c.share is not None for c in found.costs if (c.n_vocab, c.rows) == (n_vocab, rows)):
            heads.append("of a round")
    table = []
    for name in dict.fromkeys(c.setting for c in found.costs):
        line = [name]
        for kind in kinds:
            cost = next(c for c in found.costs if c.setting == name and (c.n_vocab, c.rows) == kind)
            line.append(_words(cost.us))
            if cost.share is not None:
                line.append(_percent(cost.share))
        table.append(line)
    lines += ["", *measuring.table(heads, table), ""]
    copies = ", ".join(f"{_words(us)} for {n:,}" for n, us in found.copies.items())
    lines.append(
        f"Taken off: the copy of a row ({copies}) and the call from Python ({_words(found.call)})."
    )
    if found.grammars:
        heads = ["JSON grammar", "places", "first choice rejected", "pick without grammar"]
        heads += ["added by a test", "added by a rejection", "at most", "of a round"]
        lines += ["", *measuring.table(heads, (
            [g.setting, str(g.places), measuring.percent(g.rejected / g.places), _words(g.plain),
             _words(g.test), _words(g.rejection),
             "–" if g.worst_us is None else sig(g.worst_us), _percent(g.share)]
            for g in found.grammars
        ))]  # fmt: skip
    if found.logprobs:
        greedy = next(c.us.median for c in found.costs if c.setting == CASES[0][0])
        heads = ["log-probabilities", "time of a row", f"of a round ({DRAFTED + 1} rows)"]
        lines += ["", *measuring.table(heads, (
            [f"and the {n} most probable tokens" if n else "of the token alone", _words(us),
             _percent(share_of_round(us.median, greedy, median, DRAFTED + 1))]
            for n, us in found.logprobs.items()
        ))]  # fmt: skip
    if found.python:
        heads = ["Python", "time of a token", "of a round"]
        lines += ["", *measuring.table(heads, (
            [name, sig(us), _percent(us * found.tokens_per_round / (1000.0 * median))]
            for name, us in found.python.items()
        ))]  # fmt: skip
    return [*lines, "", goal_line(found)]


def goal_line(found: Found) -> str:
    """Which settings miss the goal on rows of the model, in words."""
    shares = {c.setting: c.share for c in found.costs if c.share is not None and c.rows != "flat"}
    shares |= {f"JSON grammar, {g.setting}": g.share for g in found.grammars}
    above = [f"{name} ({_percent(share)})" for name, share in shares.items() if share > GOAL]
    if not above:
        return f"Every setting stays below {100 * GOAL:.0f} % of a round."
    return f"Above {100 * GOAL:.0f} % of a round: {', '.join(above)}."


def to_json(found: Found) -> dict[str, Any]:
    return {
        "round_ms": found.round_ms,
        "tokens_per_round": found.tokens_per_round,
        "copies": {n: tuple(us) for n, us in found.copies.items()},
        "call": tuple(found.call),
        "costs": [asdict(c) for c in found.costs],
        "grammars": [asdict(g) for g in found.grammars],
        "logprobs": {n: tuple(us) for n, us in found.logprobs.items()},
        "python": found.python,
    }


# ---------------------------------------------------------------------------------------------
# Options


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--budget",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="of each size of the vocabulary, and of grammars",
    )
    parser.add_argument(
        "--vocab",
        type=int,
        default=LARGE_VOCABULARY,
        metavar="N",
        help="a further size, where the model has another",
    )


def check_options(options: argparse.Namespace) -> None:
    """Raises UsageError."""
    if not 0.0 < options.budget < float("inf"):
        raise UsageError("--budget must be a number of seconds above 0")
    if options.vocab < 64:
        raise UsageError("--vocab must be at least 64")
    least = ROUND_CONTEXT_TOKENS + 128
    if options.ctx < least:
        raise UsageError(f"--ctx must be at least {least}")
