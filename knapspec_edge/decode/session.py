"""A sequence over many generations: knows which ids are in the KV cache and reuses them.

Token ids only. Whatever ends a generation (limit, end token, close, interrupt, error),
`Session.ids` equals what is in the cache afterwards, and the next generation starts from there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from ..backend import Backend
from ..closing import Closing
from ..errors import ContextError, PlanError, RollbackError, UsageError
from ..records import Draft, Sampling, Stats, TokenEvent
from .guard import SpeedGuard
from .loop import Clock, Loop, Progress, Watch
from .policy import FixedPolicy, Policy
from .rollback import rewind


def check_idle(events: Iterator[object]) -> None:
    """Raise UsageError while this generator is computing: in another thread, or further up."""
    if getattr(events, "gi_running", False):
        raise UsageError(
            "an answer is being computed right now, in another thread or around this call: "
            "interrupt it, or wait for its next token"
        )


class Generation(Closing):
    """Iterator over the tokens of one answer, with its statistics.

    Closing it early (also by leaving a `with` block, or by starting the next generation) cuts cache
    and statistics to the tokens that were read. Interrupted is raised out of the iteration after
    that has been done: every token read before stays valid and `stats` is complete.
    """

    def __init__(
        self, events: Iterator[TokenEvent], stats: Stats, cut: Callable[[int], None]
    ) -> None:
        self.stats = stats
        self._events = events
        self._cut = cut

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> TokenEvent:
        check_idle(self._events)
        return next(self._events)

    def close(self, finish_reason: str | None = None, *, unread: int = 0) -> None:
        """Stop here. `finish_reason` is recorded unless the generation had ended by itself.

        `unread`: how many of the last tokens that were read do not belong to the answer after all
        (they made up a stop string); cache and statistics lose them too. Call once.
        """
        check_idle(self._events)
        close = getattr(self._events, "close", None)
        if close is not None:
            close()
        if self.stats.finish_reason is None:
            self.stats.finish_reason = finish_reason
        if unread:
            # verified, then not used: what `cut_n` counts
            self.stats.completion_tokens -= unread
            self.stats.cut_n += unread
            self._cut(self.stats.prompt_tokens + self.stats.completion_tokens)


class Session:
    """One backend, one sequence, one generation at a time.

    Threads may take turns; a call that comes while another thread computes raises UsageError.
    """

    def __init__(self, backend: Backend, *, clock: Clock = time.perf_counter) -> None:
        rewind(backend, 0)
        self._backend = backend
        self._clock = clock
        self._ids: list[int] = []
        self._current: Generation | None = None
        self._changing = threading.RLock()  # held while one generation takes the place of another
        self._lost = False  # the cache could not be brought into a known state

    @property
    def ids(self) -> tuple[int, ...]:
        """Token ids in the KV cache, in order."""
        return tuple(self._ids)

    @property
    def n_ctx(self) -> int:
        return self._backend.n_ctx

    def reset(self) -> None:
        """Forget everything. Raises RollbackError if the cache does not empty."""
        self._end_current()
        rewind(self._backend, 0)
        self._ids = []
        self._lost = False

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        sampling: Sampling | None = None,
        draft: Draft | None = None,
        max_tokens: int | None = None,
        is_end: Callable[[int], bool] | None = None,
        progress: Progress | None = None,
        policy: Policy | None = None,
        guard: SpeedGuard | None = None,
        watch: Callable[[Stats], Watch | None] | None = None,
        reuse: bool = True,
    ) -> Generation:
        """Answer to the whole prompt; the longest prefix already in the cache is kept.

        `draft` None (or with max_tokens 0) is plain decoding without any draft work. `max_tokens`
        None means up to the end of the context; prompt and answer together never exceed n_ctx
        tokens. `policy` decides by itself round by round, in place of `draft`. `guard` may give the
        draft up and go on plainly in the middle. `reuse` False computes
        the prompt from its first token, so that batch shapes do not depend on what came before.
        `watch(stats)` gives what sees the times of every round. `progress(done, total)` counts the
        prompt tokens that have to be computed, from 0 on.

        Raises at once: ContextError if the prompt leaves no room, PlanError if the draft cannot be
        honoured, UsageError for a limit below 1, an empty prompt, or a sampling that this model
        cannot be asked for. Raises while iterating: Interrupted, RollbackError, NativeError.
        """
        prompt = list(prompt_ids)
        self._check(prompt, draft, max_tokens)
        sampling = sampling or Sampling()
        self._backend.check_sampling(sampling)
        if draft is not None and draft.plan.head_rows:
            self._backend.prepare_head(draft.plan.head_rows)
        room = self._backend.n_ctx - len(prompt)
        limit = room if max_tokens is None else min(max_tokens, room)
        stats = Stats(prompt_tokens=len(prompt))
        if policy is None:
            policy = FixedPolicy(draft, guard)
        events = self._run(
            prompt,
            limit,
            stats,
            reuse,
            progress,
            sampling=sampling,
            policy=policy,
            is_end=is_end or self._backend.is_end,
            watch=None if watch is None else watch(stats),
        )
        generation = Generation(
            events, stats, lambda n_tokens: self._cut_answer(generation, n_tokens)
        )
        with self._changing:
            self._end_current()
            self._current = generation
        return generation

    def _cut_answer(self, generation: Generation, n_tokens: int) -> None:
        # a reader that ends an older answer late has no say in what the cache holds by now
        if generation is self._current:
            self._truncate(n_tokens)

    def _truncate(self, n_tokens: int) -> None:
        """Keep at most the first n_tokens ids."""
        if n_tokens >= len(self._ids):
            return
        try:
            rewind(self._backend, n_tokens)
        except RollbackError:
            # a state that cannot be cut is started afresh by the next generation
            self._recover()
        else:
            del self._ids[n_tokens:]

    def _run(
        self,
        prompt: list[int],
        limit: int,
        stats: Stats,
        reuse: bool,
        progress: Progress | None,
        *,
        sampling: Sampling,
        policy: Policy,
        is_end: Callable[[int], bool],
        watch: Watch | None,
    ) -> Iterator[TokenEvent]:
        backend = self._backend
        try:
            cached = self._reuse(prompt) if reuse else self._forget()
        except Exception:
            self._recover()
            raise
        stats.cached_tokens = cached
        loop = Loop(
            backend,
            sampling=sampling,
            policy=policy,
            is_end=is_end,
            stats=stats,
            watch=watch,
            clock=self._clock,
        )
        try:
            yield from loop.run(prompt, limit, progress)
        except RollbackError:
            self._recover()
            raise
        finally:
            self._ids = (prompt + loop.emitted)[: backend.n_past]

    def _reuse(self, prompt: list[int]) -> int:
        """Cut the cache to the longest prefix it shares with the prompt; its length."""
        shared = 0
        # The last prompt token is computed again in any case: its logits give the first pick.
        for ours, theirs in zip(self._ids, prompt[:-1], strict=False):
            if ours != theirs:
                break
            shared += 1
        try:
            rewind(self._backend, shared)
        except RollbackError:
            # A state that cannot be cut (recurrent models) can still be started afresh.
            return self._forget()
        return shared

    def _forget(self) -> int:
        rewind(self._backend, 0)
        self._ids = []
        return 0

    def _recover(self) -> None:
        """After a failed cut nothing in the cache is trusted; empty it or refuse to go on."""
        try:
            self._forget()
        except RollbackError:
            self._lost = True

    def _end_current(self) -> None:
        if self._current is not None:
            self._current.close()
            self._current = None

    def _check(self, prompt: list[int], draft: Draft | None, max_tokens: int | None) -> None:
        backend = self._backend
        if self._lost:
            raise RollbackError(
                "the KV cache could not be cut back earlier and its content is unknown; "
                "open the model again"
            )
        if not prompt:
            raise UsageError("the prompt is empty; give at least one token")
        if len(prompt) >= backend.n_ctx:
            raise ContextError(
                f"the prompt has {len(prompt)} tokens and leaves no room for an answer in the "
                f"context of {backend.n_ctx}; raise --ctx or shorten the prompt"
            )
        if max_tokens is not None and max_tokens < 1:
            raise UsageError(f"--max-tokens is {max_tokens}; it has to be at least 1")
        if draft is None:
            return
        if backend.refusal is not None:
            raise PlanError(f"this model cannot speculate: {backend.refusal}; use --spec off")
        if len(draft.plan.modes) != len(backend.sublayers):
            raise PlanError(
                f"the plan is for {len(draft.plan.modes)} sublayers, the model has "
                f"{len(backend.sublayers)}; make a plan for this model"
            )
        if draft.max_tokens < 0 or not 0.0 <= draft.min_probability <= 1.0:
            raise UsageError(
                f"a draft of {draft.max_tokens} tokens with threshold {draft.min_probability} is "
                "not possible; give a length of 0 or more and a threshold in 0..1"
            )
