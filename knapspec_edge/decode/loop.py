"""The draft-verify loop. Knows token ids and positions only: no text, no files, no policy.

Four verbs: prefill, draft, verify, rewind. A round drafts a few tokens under the plan (or takes
those that the policy proposes), drops all keys the draft wrote, runs the target once over the last
token and the drafted ones (or as many of them as are worth it), and accepts the longest prefix
equal to the target's own picks plus the target's next one. So every emitted token is the target's
pick, whatever was drafted, and by whom.

One invariant holds at every yield, after every ending, and after every exception: the cache holds
the prompt and all emitted tokens but the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from ..backend import Backend
from ..errors import CompleteError, Interrupted, NoTokenError
from ..records import Pick, Plan, RoundTimes, Sampling, Stats, TokenEvent
from .policy import Policy, Proposer
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
        policy: Policy,
        is_end: Callable[[int], bool],
        stats: Stats,
        watch: Watch | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.backend = backend
        self.sampling = sampling
        self.policy = policy
        self._proposer = policy if isinstance(policy, Proposer) else None
        self.is_end = is_end
        self.stats = stats
        self.watch = watch
        self.clock = clock
        self.emitted: list[int] = []
        self._kept = backend.n_past  # tokens that stay in the cache if everything ended now
        self._accepted = 0  # drafted tokens accepted in the latest round

    # -- the verbs ---------------------------------------------------------------------------------

    def prefill(self, prompt: Sequence[int], progress: Progress | None = None) -> Pick:
        """Append what the cache lacks of the prompt with the full model, never under a plan; the
        pick after it."""
        start = self._kept
        tokens = prompt[start:]

        def done_so_far(done: int, total: int) -> None:
            # Whole slices survive an interrupt, so a repeated prompt continues there.
            self._kept = start + done
            if progress is not None:
                progress(done, total)

        if progress is not None:
            progress(0, len(tokens))
        started = self.clock()
        try:
            self.policy.begin(self.sampling, prompt)
            pick = self.backend.prefill(tokens, self.sampling, done_so_far)
        finally:
            self.stats.prompt_ms += 1000.0 * (self.clock() - started)
        self._kept = start + len(tokens)
        return pick

    def propose(self, n_tokens: int) -> tuple[list[int], list[float]]:
        """Up to n_tokens tokens that the policy proposes by itself, with its probabilities; none
        where it does not. Nothing behind an end token."""
        proposed: list[int] = []
        confidences: list[float] = []
        if self._proposer is None or n_tokens < 1:
            return proposed, confidences
        started = self.clock()
        try:
            for token, probability in self._proposer.propose(self.emitted, n_tokens)[:n_tokens]:
                proposed.append(token)
                confidences.append(probability)
                if self.is_end(token):
                    break
        finally:
            self.stats.draft_ms += 1000.0 * (self.clock() - started)
        return proposed, confidences

    def draft(self, last: int, plan: Plan, n_tokens: int) -> tuple[list[int], list[float]]:
        """Draft up to n_tokens tokens after `last` under the plan, with their probabilities.

        Stops where the policy says so, after an end token, and where the draft network has nothing
        to propose: whether the text can go on there is for the target to say.
        """
        drafted: list[int] = []
        confidences: list[float] = []
        started = self.clock()
        try:
            while len(drafted) < n_tokens and self.policy.go_on(confidences):
                try:
                    pick = self.backend.decode(last, self.sampling, plan)
                except NoTokenError:
                    break
                last = pick.token
                drafted.append(last)
                confidences.append(pick.probability)
                if self.is_end(last):
                    break
        finally:
            self.stats.draft_ms += 1000.0 * (self.clock() - started)
        return drafted, confidences

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
        self, prompt: Sequence[int], limit: int, progress: Progress | None = None
    ) -> Iterator[TokenEvent]:
        """Prefill the prompt, then emit up to `limit` (>= 1) tokens. The cache holds the beginning
        of the prompt, all of it but one token at most.

        Cache positions up to len(prompt) + limit must exist. Raises what backend and policy raise,
        but for CompleteError, which is an end; Interrupted and KeyboardInterrupt set the finish
        reason. Time that the reader spends between two tokens is not counted.
        """
        stats, backend = self.stats, self.backend
        try:
            pick = self.prefill(prompt, progress)
            stats.target_n = stats.cut_n = 1
            yield self._emit(pick, self._kept, drafted=False)
            while not self._finished(limit):
                position = self._kept  # of the last emitted token, which is not in the cache yet
                started = self.clock()
                try:
                    self._spare(position)
                    picks = self._round(self.emitted[-1], limit - len(self.emitted))
                finally:
                    stats.predicted_ms += 1000.0 * (self.clock() - started)
                for i, pick in enumerate(picks):
                    yield self._emit(pick, position + 1 + i, drafted=i < self._accepted)
        except CompleteError:
            stats.finish_reason = "stop"
        except (Interrupted, KeyboardInterrupt):
            stats.finish_reason = "interrupted"
            raise
        finally:
            rewind(backend, min(self._kept, backend.n_past))

    def _spare(self, position: int) -> None:
        started = self.clock()
        try:
            self.policy.spare(self.emitted, position)
        finally:
            self.stats.plan_ms += 1000.0 * (self.clock() - started)

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
        most = self._most_drafted(left)
        drafted, confidences = self.propose(most)
        proposed = bool(drafted)
        draft = None if drafted else self.policy.draft(self._kept)
        if draft is not None and (n_draft := min(draft.max_tokens, most)) > 0:
            drafted, confidences = self.draft(last, draft.plan, n_draft)
            if drafted:
                stats.latest_draft = draft
            rewind(backend, self._kept)
        guesses, n_drafted = drafted, len(drafted)
        if n_drafted:
            drafted = guesses[: self.policy.keep(confidences)]
        picks = self.verify(last, drafted)

        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == picks[accepted].token:
            accepted += 1
        if picks[accepted].token < 0:
            # behind the accepted tokens there is nothing to pick: the next round begins with that
            accepted -= 1
        picks = picks[: accepted + 1]
        # the target's next pick also tells about a token that was not worth verifying
        right = (True,) * accepted
        if accepted < n_drafted:
            right += (guesses[accepted] == picks[accepted].token,)
        shown = picks
        for i, pick in enumerate(picks):
            if self.is_end(pick.token):
                shown = picks[: i + 1]
                break

        self._accepted = accepted
        stats.rounds += 1
        stats.target_n += 1
        stats.cut_n = len(picks)
        if n_drafted:
            self._count_draft(n_drafted, len(drafted), accepted, proposed=proposed)
        # Everything verified is the target's work and stays valid until here: cut once, if at all.
        if drafted:
            rewind(backend, self._kept + len(shown))
        times = RoundTimes(
            self._kept,
            n_drafted,
            stats.draft_ms - draft_ms,
            stats.verify_ms - verify_ms,
            verified=len(drafted),
            accepted=accepted,
            confidences=tuple(confidences),
            right=right,
            tokens=len(picks),
            elapsed_ms=1000.0 * (self.clock() - started),
            proposed=proposed,
        )
        self.policy.observe(times)
        stats.speculation_stopped = self.policy.stopped
        if self.watch is not None:
            self.watch(times)
        return shown

    def _most_drafted(self, left: int) -> int:
        """How many tokens the next round may draft; 0 means a plain step.

        A round emits up to one token more than it drafts, so `left` (which the context bounds too)
        allows left - 1; verification takes the last token along.
        """
        backend = self.backend
        positions = backend.n_ctx - backend.n_past
        return max(0, min(left - 1, positions - 1, backend.max_verify_tokens - 1))

    def _count_draft(self, drafted: int, verified: int, accepted: int, *, proposed: bool) -> None:
        stats = self.stats
        stats.draft_n += drafted
        stats.draft_n_accepted += accepted
        if proposed:
            stats.proposed_n += drafted
            stats.proposed_n_accepted += accepted
        stats.accepted_lengths[accepted] = stats.accepted_lengths.get(accepted, 0) + 1
        while len(stats.tried_at) < verified:
            stats.tried_at.append(0)
            stats.accepted_at.append(0)
        for i in range(min(accepted + 1, verified)):
            stats.tried_at[i] += 1
        for i in range(accepted):
            stats.accepted_at[i] += 1

    def _emit(self, pick: Pick, position: int, *, drafted: bool) -> TokenEvent:
        self.emitted.append(pick.token)
        self._kept = position
        self.stats.completion_tokens += 1
        self.stats.cut_n -= 1
        return TokenEvent(
            pick.token,
            position,
            pick.probability,
            drafted,
            self.stats.rounds,
            pick.margin,
            pick.logprob,
            pick.top,
        )
