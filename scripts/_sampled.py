"""Sampled answers with and without drafts, and the rows of logits that they were picked from.

Shared by the programs that judge sampling: named settings, plans by how much harm they do, a
backend that keeps rows, one that repeats drafts without computing them, and the native pick.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from knapspec_edge.apps.bench.texts import QUESTIONS  # noqa: E402
from knapspec_edge.backend import Backend  # noqa: E402
from knapspec_edge.config import DEFAULTS  # noqa: E402
from knapspec_edge.decode.rollback import rewind  # noqa: E402
from knapspec_edge.decode.session import Session  # noqa: E402
from knapspec_edge.errors import NativeError, PlanError  # noqa: E402
from knapspec_edge.latency.fidelity import measure_fidelity, target_text  # noqa: E402
from knapspec_edge.latency.profiler import Progress  # noqa: E402
from knapspec_edge.native import bindings, library  # noqa: E402
from knapspec_edge.records import (  # noqa: E402
    FULL,
    Draft,
    Mode,
    ModeKind,
    Pick,
    Plan,
    RoundTimes,
    Sampling,
    Stats,
)
from knapspec_edge.sampling import PRESETS  # noqa: E402
from knapspec_edge.text.vocabulary import tokenize_prompt  # noqa: E402

Row = NDArray[np.float32]  # f32 [n_vocab]
Picker = Callable[[Row, Sampling, int, Sequence[int]], Pick]  # (row, how, position, text before)

# By the names that options and tables use.
SETTINGS = {
    "greedy": PRESETS["greedy"],
    "t0.7": Sampling(temperature=0.7),
    "t1.0": Sampling(temperature=1.0),
    "paper": PRESETS["paper"],
    "default": PRESETS["llama.cpp"],
    # with the repetition penalty that llama.cpp suggests
    "penalised": replace(PRESETS["llama.cpp"], repeat_penalty=1.1, penalty_last_n=64),
}
SETTING_WORDS = {
    "greedy": "greedy",
    "t0.7": "T 0.7",
    "t1.0": "T 1.0",
    "paper": "paper: T 0.7, then top-k 50, top-p 0.95",
    "default": "llama.cpp: top-k 40, top-p 0.95, min-p 0.05, T 0.8",
    "penalised": "llama.cpp with repetition penalty 1.1",
}
# Share of the sublayers that a plan leaves out, those that do the least harm first.
PLAN_SHARES = {"few": 1 / 12, "some": 1 / 6, "many": 1 / 3}
WINDOW = (4, 16)  # tokens, of the plan "windows": so short that it changes short answers, too
PLANS = (*PLAN_SHARES, "windows", "short-head")
RANKING_TOKENS = 49  # of an answer, on which harm is counted


def prompts_of(vocabulary: Any, template: Any, count: int) -> list[list[int]]:
    """Token ids of the bench's prompts, in the model's chat format where it has one."""
    if template is None:
        return [
            tokenize_prompt(vocabulary, f"{text}\n\n", parse_special=False)
            for text in QUESTIONS[:count]
        ]
    return [
        list(template.apply([{"role": "user", "content": text}]).tokens)
        for text in QUESTIONS[:count]
    ]


def plans_by_harm(backend: Backend, prompt: Sequence[int], progress: Progress) -> dict[str, Plan]:
    """Plans that leave out few, some and many sublayers: those whose absence alone changes the
    fewest picks of an answer. The cache is empty before and after."""
    n = len(backend.sublayers)
    done = 0

    def one_more() -> None:
        nonlocal done
        done += 1
        progress(min(1.0, done / (n + RANKING_TOKENS)))

    text = target_text(backend, prompt, RANKING_TOKENS, one_more)
    found = measure_fidelity(
        backend, text, range(n), DEFAULTS.measure_block_tokens, report=one_more
    )
    rewind(backend, 0)
    order = sorted(found.agreements(backend.sublayers), key=lambda item: (item.loss, item.index))
    plans = {}
    for name, share in PLAN_SHARES.items():
        size = max(1, round(share * n))
        plans[name] = Plan.skipping(n, [item.index for item in order[:size]])
    window = Mode(ModeKind.WINDOW, *WINDOW)
    able = [traits.can_window for traits in backend.traits]
    if any(able):
        plans["windows"] = Plan(tuple(window if can else FULL for can in able))
    if backend.head_sizes:
        plans["short-head"] = replace(plans["few"], head_rows=backend.head_sizes[0])
    return plans


# ---------------------------------------------------------------------------------------------
# Answers


@dataclass(frozen=True)
class Answer:
    """One answer. `rounds` and `margins` are those of its tokens, see TokenEvent."""

    tokens: tuple[int, ...]
    rounds: tuple[int, ...]
    margins: tuple[float, ...]
    stats: Stats
    whole_rounds: int  # whose draft was accepted to its end

    @property
    def rejected(self) -> int:
        """Drafted tokens that the target's pick turned down."""
        return sum(self.stats.tried_at) - sum(self.stats.accepted_at)

    def row_of(self, token: int) -> tuple[int, int]:
        """(pass, row) that token number `token` was picked from; pass 0 is the prompt's."""
        number = self.rounds[token]
        return number, token - self.rounds.index(number)


def primed(backend: Backend, prompt: Sequence[int]) -> Session:
    """A session whose cache holds the prompt. All answers to it begin with the same keys then, and
    compute its last token once more, by itself."""
    session = Session(backend)
    list(session.generate(prompt, max_tokens=1))
    return session


def answered(
    session: Session,
    prompt: Sequence[int],
    sampling: Sampling,
    draft: Draft | None,
    max_tokens: int,
) -> Answer:
    whole = 0

    def watch(_stats: Stats) -> Callable[[RoundTimes], None]:
        def see(times: RoundTimes) -> None:
            nonlocal whole
            whole += times.drafted > 0 and times.accepted == times.width - 1

        return see

    generation = session.generate(
        prompt, sampling=sampling, draft=draft, max_tokens=max_tokens, watch=watch
    )
    events = list(generation)
    return Answer(
        tuple(e.token for e in events),
        tuple(e.round for e in events),
        tuple(0.0 if e.margin is None else e.margin for e in events),
        generation.stats,
        whole,
    )


class Recorder:
    """A backend that keeps rows of logits, and the picks of drafts.

    `wanted` says which row of a pass of the full model to keep, or None. Passes count from 0, which
    is the prompt's.
    """

    def __init__(self, backend: Any, wanted: Callable[[int], int | None]) -> None:
        self._backend = backend
        self._wanted = wanted
        self._passes = 0
        self.rows: dict[int, Row] = {}  # by the number of the pass
        self.drafted: list[Pick] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def prefill(self, tokens: Sequence[int], sampling: Sampling, progress: Any = None) -> Pick:
        pick: Pick = self._backend.prefill(tokens, sampling, progress)
        self._passes = 0
        self.rows.clear()
        self.drafted.clear()
        self._keep()
        return pick

    def decode(self, token: int, sampling: Sampling, plan: Plan | None = None) -> Pick:
        if plan is not None:
            self.drafted.append(self._draft(token, sampling, plan))
            return self.drafted[-1]
        pick: Pick = self._backend.decode(token, sampling, None)
        self._keep()
        return pick

    def verify(self, tokens: Sequence[int], sampling: Sampling) -> list[Pick]:
        picks: list[Pick] = self._backend.verify(tokens, sampling)
        self._keep()
        return picks

    def _draft(self, token: int, sampling: Sampling, plan: Plan) -> Pick:
        pick: Pick = self._backend.decode(token, sampling, plan)
        return pick

    def _keep(self) -> None:
        row = self._wanted(self._passes)
        if row is not None:
            # a run that goes another way may have no such row in this pass
            with contextlib.suppress(IndexError):
                self.rows[self._passes] = self._backend.logits(row)
        self._passes += 1


class Repeater(Recorder):
    """Drafts what was drafted before, without computing anything: what is left are the passes of
    the full model."""

    def __init__(
        self, backend: Any, wanted: Callable[[int], int | None], drafted: Sequence[Pick]
    ) -> None:
        super().__init__(backend, wanted)
        self._repeated = list(drafted)

    def _draft(self, token: int, sampling: Sampling, plan: Plan) -> Pick:
        if len(self.drafted) < len(self._repeated):
            return self._repeated[len(self.drafted)]
        return Pick(token, 1.0, 0.0)  # the text went another way


# ---------------------------------------------------------------------------------------------
# The native pick


class NativePick:
    """knapspec_pick on rows of one's own. With a grammar, `answer_start` is the position of the
    first token that it is about."""

    def __init__(self, grammar: Any = None, answer_start: int = 0) -> None:
        self._lib = library.load()._lib
        self._grammar = grammar
        self._answer_start = answer_start

    def prepared(
        self, row: Row, sampling: Sampling, position: int, history: Sequence[int]
    ) -> Callable[[], Pick]:
        """A call that picks from this row; all else is done before."""
        row = np.ascontiguousarray(row, dtype=np.float32)
        settings = bindings.Sampling()
        settings.set(sampling)
        settings.grammar, settings.answer_start = self._grammar, self._answer_start
        token, probability, margin = ctypes.c_int32(), ctypes.c_float(), ctypes.c_float()
        function = self._lib.knapspec_pick
        logits = row.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        text = (ctypes.c_int32 * len(history))(*history)
        arguments = (
            logits,
            len(row),
            ctypes.byref(settings),
            position,
            text,
            len(history),
            ctypes.byref(token),
            ctypes.byref(probability),
            ctypes.byref(margin),
        )

        def call(_row: Row = row) -> Pick:  # the row has to live as long as the call
            code = function(*arguments)
            if code:
                raise NativeError(f"a pick failed with code {code}")
            return Pick(token.value, probability.value, margin.value)

        return call

    def __call__(self, row: Row, sampling: Sampling, position: int, history: Sequence[int]) -> Pick:
        return self.prepared(row, sampling, position, history)()


def require_plans(backend: Backend, name: str) -> None:
    """Raises PlanError for a model that cannot be drafted with."""
    if backend.refusal is not None:
        raise PlanError(f"{name}: {backend.refusal}")
