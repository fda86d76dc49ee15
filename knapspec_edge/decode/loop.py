"""The draft-verify loop. Knows token ids and positions only: no text, no files, no policy.

Four verbs: prefill, draft, verify, rewind. A round drafts a few tokens under the plan, drops all
keys the draft wrote, runs the target once over the last token and the drafted ones, and accepts the
longest prefix equal to the target's own picks plus the target's next one. So every emitted token is
the target's pick, whatever the plan was.

One invariant holds at every yield, after every ending, and after every exception: the cache holds
the prompt and all emitted tokens but the last.

The round follows the KnapSpec reference's description (append a doubtful token first, then stop).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from ..backend import Backend
from ..errors import Interrupted
from ..records import Draft, Pick, RoundTimes, Sampling, Stats, TokenEvent
from .guard import SpeedGuard
from .rollback import rewind

Clock = Callable[[], float]
Progress = Callable[[int, int], None]
Watch = Callable[[RoundTimes], None]


class Loop:
    """One generation. `run` is to be called once."""

    def __init__(
        self,
        backend: Backend,
        *,
        sampling: Sampling,
        draft: Draft | None,
        is_end: Callable[[int], bool],
        stats: Stats,
        guard: SpeedGuard | None = None,
        watch: Watch | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.backend = backend
        self.sampling = sampling
        self.plan_of_draft = draft
        self.is_end = is_end
        self.stats = stats
        self.guard = guard
        self.watch = watch
        self.clock = clock
        self.emitted: list[int] = []
        self._kept = backend.n_past  # tokens that stay in the cache if everything ended now
        self._accepted = 0  # drafted tokens accepted in the latest round

    # -- the verbs ---------------------------------------------------------------------------------

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> Pick:
        """Append the prompt with the full model, never under a plan; the pick after it."""
        start = self._kept

        def done_so_far(done: int, total: int) -> None:
            # Whole slices survive an interrupt, so a repeated prompt continues there.
            self._kept = start + done
            if progress is not None:
                progress(done, total)

        started = self.clock()
        try:
            pick = self.backend.prefill(tokens, self.sampling, done_so_far)
        finally:
            self.stats.prompt_ms += 1000.0 * (self.clock() - started)
        self._kept = start + len(tokens)
        return pick

    def draft(self, last: int, n_tokens: int) -> list[int]:
        """Draft 1..n_tokens tokens after `last` under the plan.

        Stops after a token that is less probable than the threshold (that one is kept: the target
        may still agree) and after an end token.
        """
        draft = self.plan_of_draft
        assert draft is not None
        drafted: list[int] = []
        started = self.clock()
        try:
            while len(drafted) < n_tokens:
                pick = self.backend.decode(last, self.sampling, draft.plan)
                last = pick.token
                drafted.append(last)
                if pick.probability < draft.min_probability or self.is_end(last):
                    break
        finally:
            self.stats.draft_ms += 1000.0 * (self.clock() - started)
        return drafted

    def verify(self, last: int, drafted: Sequence[int]) -> list[Pick]:
        """The target's picks after `last` and after each drafted token, in one pass."""
        started = self.clock()
        try:
            if not drafted:
                return [self.backend.decode(last, self.sampling, None)]
            return self.backend.verify([last, *drafted], self.sampling)
        finally:
            self.stats.verify_ms += 1000.0 * (self.clock() - started)

    # -- the loop ----------------------------------------------------------------------------------

    def run(
        self, tokens: Sequence[int], limit: int, progress: Progress | None = None
    ) -> Iterator[TokenEvent]:
        """Prefill `tokens` behind what is in the cache, then emit up to `limit` (>= 1) tokens.

        Cache positions up to n_past + len(tokens) + limit must exist. Raises what the backend
        raises; Interrupted and KeyboardInterrupt set the finish reason. Time that the reader spends
        between two tokens is not counted.
        """
        stats, backend = self.stats, self.backend
        try:
            pick = self.prefill(tokens, progress)
            stats.target_n = stats.cut_n = 1
            yield self._emit(pick, self._kept, drafted=False)
            while not self._finished(limit):
                position = self._kept  # of the last emitted token, which is not in the cache yet
                started = self.clock()
                try:
                    picks = self._round(self.emitted[-1], limit - len(self.emitted))
                finally:
                    stats.predicted_ms += 1000.0 * (self.clock() - started)
                for i, pick in enumerate(picks):
                    yield self._emit(pick, position + 1 + i, drafted=i < self._accepted)
        except (Interrupted, KeyboardInterrupt):
            stats.finish_reason = "interrupted"
            raise
        finally:
            rewind(backend, min(self._kept, backend.n_past))

    def _finished(self, limit: int) -> bool:
        # The end token wins over the limit where one token is both.
        if self.is_end(self.emitted[-1]):
            self.stats.finish_reason = "stop"
        elif len(self.emitted) >= limit:
            self.stats.finish_reason = "length"
        return self.stats.finish_reason is not None

    def _round(self, last: int, left: int) -> list[Pick]:
        """One round: the picks to emit, cut at an end token; the cache keeps all but the last."""
        stats, backend = self.stats, self.backend
        started = self.clock()
        draft_ms, verify_ms = stats.draft_ms, stats.verify_ms
        n_draft = self._draft_length(left)
        drafted: list[int] = []
        if n_draft:
            drafted = self.draft(last, n_draft)
            rewind(backend, self._kept)
        picks = self.verify(last, drafted)

        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == picks[accepted].token:
            accepted += 1
        picks = picks[: accepted + 1]
        shown = picks
        for i, pick in enumerate(picks):
            if self.is_end(pick.token):
                shown = picks[: i + 1]
                break

        self._accepted = accepted
        stats.rounds += 1
        stats.target_n += 1
        stats.cut_n = len(picks)
        if drafted:
            self._count_draft(len(drafted), accepted)
        # Everything verified is the target's work and stays valid until here: cut once, if at all.
        if drafted:
            rewind(backend, self._kept + len(shown))
        if self.guard is not None and self.plan_of_draft is not None:
            elapsed_ms = 1000.0 * (self.clock() - started)
            self.guard.observe(elapsed_ms, len(picks), speculated=bool(drafted))
            stats.speculation_stopped = self.guard.stopped
        if self.watch is not None:
            self.watch(
                RoundTimes(
                    self._kept,
                    len(drafted),
                    stats.draft_ms - draft_ms,
                    stats.verify_ms - verify_ms,
                )
            )
        return shown

    def _draft_length(self, left: int) -> int:
        """Tokens to draft now; 0 means a plain step.

        A round emits up to one token more than it drafts, so `left` (which the context bounds too)
        allows left - 1; verification takes the last token along.
        """
        draft = self.plan_of_draft
        if draft is None or (self.guard is not None and not self.guard.may_speculate()):
            return 0
        backend = self.backend
        positions = backend.n_ctx - backend.n_past
        return max(0, min(draft.max_tokens, left - 1, positions - 1, backend.max_verify_tokens - 1))

    def _count_draft(self, drafted: int, accepted: int) -> None:
        stats = self.stats
        stats.draft_n += drafted
        stats.draft_n_accepted += accepted
        stats.accepted_lengths[accepted] = stats.accepted_lengths.get(accepted, 0) + 1
        while len(stats.tried_at) < drafted:
            stats.tried_at.append(0)
            stats.accepted_at.append(0)
        for i in range(min(accepted + 1, drafted)):
            stats.tried_at[i] += 1
        for i in range(accepted):
            stats.accepted_at[i] += 1

    def _emit(self, pick: Pick, position: int, *, drafted: bool) -> TokenEvent:
        self.emitted.append(pick.token)
        self._kept = position
        self.stats.completion_tokens += 1
        self.stats.cut_n -= 1
        return TokenEvent(
            pick.token, position, pick.probability, drafted, self.stats.rounds, pick.margin
        )
