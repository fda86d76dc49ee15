"""A toy language model behind the Backend seam, with a ledger of keys and a clock of its own.

The model is a hash: the next token depends on the last few tokens only, so a naive twin can compute
the right answer without any cache (tests/naive.py). The backend keeps what a real one keeps, and
checks on every pass what a real one cannot: that each position a sublayer attends to holds keys of
the right token, written by the full model, or by the same plan within the same draft.

Nothing sleeps. Each call advances a virtual clock by what it would cost.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import naive_sampling
import numpy as np
import toy_grammar
from numpy.typing import NDArray

from knapspec_edge.backend import Beside
from knapspec_edge.errors import (
    ContextError,
    Interrupted,
    NoTokenError,
    PlanError,
    RollbackError,
    UsageError,
)
from knapspec_edge.records import (
    FULL,
    GREEDY,
    Grammar,
    Kind,
    ModeKind,
    Pick,
    Plan,
    Sampling,
    SubLayer,
    Traits,
)

TARGET = "target"
HOLLOW = -1  # token of a cell that was filled without computing


def chance(*parts: object) -> float:
    """A number in [0, 1) that depends on the parts only."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2.0**64


@lru_cache(maxsize=200_000)
def base_logits(seed: int, context: tuple[int, ...], n_vocab: int) -> tuple[float, ...]:
    """What the toy language is, before a plan or an end changes it."""
    return tuple(6.0 * chance("logit", seed, context, t) for t in range(n_vocab))


class LedgerError(AssertionError):
    """A pass attended to keys that are missing or are not its own."""


def sublayers_of(n_layer: int, *, parallel: bool = False) -> tuple[SubLayer, ...]:
    """Attention and MLP alternating, or one block per layer."""
    if parallel:
        return tuple(SubLayer(i, i, Kind.BLOCK) for i in range(n_layer))
    kinds = (Kind.ATTENTION, Kind.MLP)
    return tuple(SubLayer(i, i // 2, kinds[i % 2]) for i in range(2 * n_layer))


@dataclass
class ToyModel:
    """Next-token distributions as a function of the tokens alone."""

    n_vocab: int = 23
    order: int = 3  # tokens the next one depends on
    seed: int = 0
    end_tokens: frozenset[int] = frozenset({0})
    end_at: int | None = None  # at this position the target's pick is an end token
    # chance that leaving out sublayer i changes a pick; independent from item to item
    harm: dict[int, float] = field(default_factory=dict)
    default_harm: float = 0.05
    head_sizes: tuple[int, ...] = ()

    def logits(self, tokens: Sequence[int], plan: Plan | None) -> NDArray[np.float32]:
        """Logits f32 [n_vocab] for the token after `tokens`."""
        context = tuple(tokens[-self.order :])
        position = len(tokens)
        values = list(base_logits(self.seed, context, self.n_vocab))
        if self.end_tokens and self.end_at is not None:
            for t in self.end_tokens:
                values[t] = -5.0
            if position == self.end_at:
                values[min(self.end_tokens)] = 20.0
        if plan is not None and plan.head_rows:
            values[plan.head_rows :] = [-np.inf] * (len(values) - plan.head_rows)
        if plan is not None:
            for i, mode in enumerate(plan.modes):
                if mode.kind is ModeKind.FULL:
                    continue
                harm = self.harm.get(i, self.default_harm)
                if chance("harm", self.seed, context, position, i, str(mode)) < harm:
                    best = int(np.argmax(values))
                    values[best] -= 6.0 * (0.3 + chance("depth", self.seed, context, i))
        return np.array(values, dtype=np.float32)

    def pick(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        plan: Plan | None,
        answer_start: int = 0,
        history: Sequence[int] | None = None,
    ) -> Pick:
        """The pick for the position after `tokens`, whose answer begins at `answer_start`.

        `history` is the text that penalties and grammar look at: the tokens, unless a test wants to
        see a mistake.
        """
        logits = self.logits(tokens, plan)
        history = tokens if history is None else history
        allowed = self.allowed(history, sampling, answer_start)
        try:
            picked = naive_sampling.pick(logits, sampling, len(tokens), history, allowed)
        except naive_sampling.DeadEndError:
            raise NoTokenError("the grammar allows no token here") from None
        logprob, top = None, ()
        if sampling.n_probs is not None and plan is None:
            logprob, top = naive_sampling.log_probabilities(logits, picked.token, sampling.n_probs)
        return Pick(picked.token, picked.probability, picked.margin, logprob, top)

    def check_grammar(self, grammar: Grammar) -> None:
        """Raises UsageError, one line, for a grammar that cannot be read."""
        toy_grammar.of(grammar, self.n_vocab)

    def allowed(
        self, tokens: Sequence[int], sampling: Sampling, answer_start: int
    ) -> NDArray[np.bool_] | None:
        """bool [n_vocab]: what the grammar lets pass after `tokens`; None where none holds."""
        grammar = sampling.grammar
        if grammar is None or len(tokens) < answer_start:
            return None
        ends = self.end_tokens | grammar.ends
        answer = tokens[answer_start:]
        return toy_grammar.of(grammar, self.n_vocab).allowed(answer, ends, self.n_vocab)


@dataclass
class Costs:
    """Milliseconds. A pass of b tokens costs `1 + per_token * (b - 1)` steps."""

    fixed_ms: float = 1.0
    head_ms: float = 2.0
    attention_ms: float = 0.5
    attention_ms_per_1k: float = 0.2
    mlp_ms: float = 0.7
    per_token: float = 0.1

    n_vocab: int = 0  # that the head's time is for; only needed with short heads

    def step_ms(self, sublayers: Sequence[SubLayer], n_past: int, plan: Plan | None) -> float:
        total = self.fixed_ms + self.head_ms
        if plan is not None and plan.head_rows:
            total -= self.head_ms * (1.0 - plan.head_rows / self.n_vocab)
        for i, sublayer in enumerate(sublayers):
            mode = FULL if plan is None else plan.modes[i]
            if mode.kind is ModeKind.SKIP:
                continue
            if sublayer.kind is not Kind.MLP:
                read = n_past
                if mode.kind is ModeKind.WINDOW:
                    read = min(n_past, mode.sink_tokens + mode.window_tokens)
                total += self.attention_ms + self.attention_ms_per_1k * read / 1000.0
            if sublayer.kind is not Kind.ATTENTION:
                total += self.mlp_ms
        return total


def traits_of(
    sublayers: Sequence[SubLayer], n_ctx: int, *, can_window: bool = False
) -> tuple[Traits, ...]:
    """Attention reads the whole cache, an MLP none of it."""
    attention = Traits(1, 1000, cell_bytes=64, n_cells=n_ctx, can_window=can_window)
    return tuple(Traits(2, 2000) if s.kind is Kind.MLP else attention for s in sublayers)


@dataclass(frozen=True)
class Key:
    """What a sublayer stored at one position."""

    token: int
    writer: str  # TARGET, or the draft's plan
    epoch: int  # number of the draft it was written in


class FakeBackend:
    """Implements knapspec_edge.backend.Backend.

    Failure injection: `fail_at[k] = exception` raises at the k-th call that computes (0-based),
    leaving half of its tokens in the cache as an aborted native call does; `deaf_truncations` holds
    the numbers of truncate calls that have no effect.
    """

    def __init__(
        self,
        model: ToyModel | None = None,
        *,
        n_layer: int = 4,
        n_ctx: int = 256,
        max_verify_tokens: int = 16,
        costs: Costs | None = None,
        refusal: str | None = None,
        parallel: bool = False,
        can_cut: bool = True,
        slice_tokens: int = 8,
        beside_tokens: int = 32,
        can_window: bool = False,
    ) -> None:
        self.model = model or ToyModel()
        self.n_ctx = n_ctx
        self.n_vocab = self.model.n_vocab
        self.max_verify_tokens = max_verify_tokens
        self.sublayers = () if refusal else sublayers_of(n_layer, parallel=parallel)
        self.traits = traits_of(self.sublayers, n_ctx, can_window=can_window)
        self.refusal = self.cut_refusal = refusal
        self.costs = costs or Costs()
        self.can_cut = can_cut
        self.slice_tokens = slice_tokens
        self.beside_tokens = beside_tokens
        self.settings: dict[str, Any] = {"threads": 2, "kv_type": "f16", "devices": ["toy"]}
        self.now_ms = 0.0
        self.log: list[tuple[str, Any]] = []  # (call, argument)
        self.fail_at: dict[int, BaseException] = {}
        self.deaf_truncations: set[int] = set()
        self.on_call: Callable[[str], None] | None = None
        self.branching = False  # inside `branches`
        self._calls = 0
        self._truncations = 0
        self._answer_start = 0  # position of the first token that a grammar is about
        self._tokens: list[int] = []
        # keys[sublayer][position]; MLPs store nothing, their entries only mark that they ran
        self._keys: list[dict[int, Key]] = [{} for _ in range(max(1, len(self.sublayers)))]
        # the target's own keys were found at all positions below: need not be looked at again
        self._sound = [0] * len(self._keys)
        self._epoch = 0
        # of the latest pass: what was in the cache after it, its number of tokens, its plan
        self._latest: tuple[tuple[int, ...], int, Plan | None] = ((), 0, None)

    # -- what the tests look at --------------------------------------------------------------------

    def clock(self) -> float:
        """Seconds of virtual time."""
        return self.now_ms / 1000.0

    @property
    def tokens(self) -> tuple[int, ...]:
        """What the cache holds."""
        return tuple(self._tokens)

    @property
    def n_computed(self) -> int:
        """Calls so far that compute, as `fail_at` counts them."""
        return self._calls

    def calls(self, name: str) -> list[Any]:
        return [argument for call, argument in self.log if call == name]

    def check_ledger(self) -> None:
        """Every cached position has the target's keys of its own token in every sublayer."""
        for sublayer, keys in enumerate(self._keys):
            if set(keys) != set(range(len(self._tokens))):
                raise LedgerError(f"sublayer {sublayer} holds positions {sorted(keys)}")
            for position, token in enumerate(self._tokens):
                key = keys[position]
                if key.writer != TARGET or key.token != token:
                    raise LedgerError(f"sublayer {sublayer}, position {position}: {key}")

    # -- Backend -----------------------------------------------------------------------------------

    @property
    def n_past(self) -> int:
        return len(self._tokens)

    @property
    def head_sizes(self) -> tuple[int, ...]:
        return self.model.head_sizes

    def suggest_head(self, tokens: Sequence[int]) -> None:
        self.suggested = tuple(tokens)

    def prepare_head(self, n_rows: int) -> None:
        assert n_rows <= self.n_vocab

    def lacked(
        self, tokens: Sequence[int], position: int, plan: Plan | None = None
    ) -> NDArray[np.bool_]:
        """A short head of the toy has the lower token ids, whatever the text."""
        rows = plan.head_rows if plan is not None and plan.head_rows else self.n_vocab
        return np.array([t >= rows for t in tokens], dtype=np.bool_)

    def is_end(self, token: int) -> bool:
        return token in self.model.end_tokens

    def check_sampling(self, sampling: Sampling) -> None:
        for token, _ in sampling.logit_bias:
            if not 0 <= token < self.n_vocab:
                raise UsageError(f"a bias on token {token}; the model has {self.n_vocab}")
        if sampling.grammar is not None:
            self.model.check_grammar(sampling.grammar)

    def prefill(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        progress: Callable[[int, int], None] | None = None,
    ) -> Pick:
        assert tokens
        if self.n_past + len(tokens) > self.n_ctx:
            raise ContextError("the prompt does not fit")
        for start in range(0, len(tokens), self.slice_tokens):
            piece = tokens[start : start + self.slice_tokens]
            self._compute("prefill", piece, None)
            if progress is not None:
                progress(start + len(piece), len(tokens))
        self._answer_start = self.n_past
        return self._pick(self._tokens, sampling, None)

    def decode(self, token: int, sampling: Sampling, plan: Plan | None = None) -> Pick:
        self._compute("decode", [token], plan)
        return self._pick(self._tokens, sampling, plan)

    def verify(self, tokens: Sequence[int], sampling: Sampling) -> list[Pick]:
        assert 1 <= len(tokens) <= self.max_verify_tokens
        start = self.n_past
        self._compute("verify", tokens, None)
        ends = range(start + 1, start + len(tokens) + 1)
        picks = [self._pick(self._tokens[: start + 1], sampling, None)]
        for end in ends[1:]:
            try:
                picks.append(self._pick(self._tokens[:end], sampling, None))
            except NoTokenError:  # behind tokens that may never belong to the text
                picks.append(Pick(-1, 0.0, 0.0))
        return picks

    def evaluate(
        self, tokens: Sequence[int], plan: Plan | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        start = self.n_past
        self._compute("evaluate", tokens, plan)
        ends = range(start + 1, start + len(tokens) + 1)
        picks = [self.model.pick(self._tokens[:end], Sampling(), plan) for end in ends]
        return (
            np.array([p.token for p in picks], dtype=np.int32),
            np.array([p.probability for p in picks], dtype=np.float32),
        )

    def final_states(
        self, tokens: Sequence[int], plan: Plan | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """The logits are the states: its head is the unit matrix."""
        if self.refusal is not None:
            raise PlanError(self.refusal)
        start = self.n_past
        picks, _ = self.evaluate(tokens, plan)
        ends = range(start + 1, start + len(tokens) + 1)
        rows = [self.model.logits(self._tokens[:end], plan) for end in ends]
        return np.array(rows, dtype=np.float32).reshape(len(rows), self.n_vocab), picks

    @property
    def max_beside_tokens(self) -> int:
        return self.beside_tokens if self.sublayers else 0

    def evaluate_beside(
        self,
        blocks: Sequence[tuple[int, Sequence[int]]],
        plan: Plan | None = None,
        sampling: Sampling = GREEDY,
        expected: Sequence[Sequence[int]] | None = None,
    ) -> list[Beside]:
        total = sum(len(tokens) for _, tokens in blocks)
        assert 1 <= total <= self.max_beside_tokens
        if self.on_call is not None:
            self.on_call("beside")
        self.log.append(("beside", plan))
        number = self._calls
        self._calls += 1
        longest = max(start for start, _ in blocks)
        step = self.costs.step_ms(self.sublayers, longest, plan)
        self.now_ms += step * (1.0 + self.costs.per_token * (total - 1))
        if (failure := self.fail_at.pop(number, None)) is not None:
            raise failure
        found = []
        for block, (start, tokens) in enumerate(blocks):
            assert 0 <= start <= self.n_past
            assert tokens
            assert start + len(tokens) <= self.n_ctx
            text = [*self._tokens[:start], *tokens]
            ends = range(start + 1, len(text) + 1)
            picks = [self._pick(text[:end], sampling, plan) for end in ends]
            margins = [p.margin for p in picks]
            if expected is not None:
                for i, (end, token) in enumerate(zip(ends, expected[block], strict=True)):
                    values = self.model.logits(text[:end], plan)
                    margins[i] = float(values[token] - np.delete(values, token).max())
            found.append(
                Beside(
                    np.array([p.token for p in picks], dtype=np.int32),
                    np.array([p.probability for p in picks], dtype=np.float32),
                    np.array(margins, dtype=np.float32),
                )
            )
        return found

    def hidden_states(self, tokens: Sequence[int], plan: Plan | None = None) -> NDArray[np.float32]:
        if not self.sublayers:
            raise PlanError("no hidden states")
        start = self.n_past
        self._compute("hidden_states", tokens, plan)
        modes = plan.modes if plan is not None else Plan.full(len(self.sublayers)).modes
        states = self._stream(start, len(tokens))
        rows = []
        for i, mode in enumerate(modes):
            if mode.kind is not ModeKind.SKIP:
                states = self._add(i, states)
            rows.append(states)
        return np.stack(rows)

    branch_refusal: str | None = None

    @contextlib.contextmanager
    def branches(
        self, start: int, tokens: Sequence[int], n_branches: int
    ) -> Iterator[FakeBranches]:
        if self.branch_refusal is not None or not self.sublayers:
            raise PlanError(f"no branches: {self.branch_refusal}")
        assert 0 <= start <= self.n_past
        assert tokens
        assert n_branches >= 1
        assert start + len(tokens) <= self.n_ctx
        self.log.append(("branches", (start, tuple(tokens))))
        self.branching = True
        try:
            yield FakeBranches(self, start, tokens)
        finally:
            self.branching = False

    # A state tells which sublayers it went through: entry i is what sublayer i has added, larger
    # where its absence does more harm; the last entry is the embedding. So branches and judged
    # plans agree, and the head of a state knows its plan.

    def _stream(self, start: int, n: int) -> NDArray[np.float32]:
        """f32 [n, sublayers + 1] before the first sublayer."""
        states = np.zeros((n, len(self.sublayers) + 1), dtype=np.float32)
        states[:, -1] = 1.0 + 0.01 * (np.arange(start, start + n) % 7)
        return states

    def _add(self, i: int, states: NDArray[np.float32]) -> NDArray[np.float32]:
        added = states.copy()
        added[..., i] += math.sqrt(self.model.harm.get(i, self.model.default_harm)) + 0.01
        return added

    def append(self, tokens: Sequence[int], plan: Plan | None = None) -> None:
        before = self.now_ms
        self._compute("append", tokens, plan)
        # without logits: no head, and no rows for the last MLP
        last = self.costs.mlp_ms if self.sublayers and self.sublayers[-1].kind is Kind.MLP else 0.0
        full = self.now_ms - before
        step = self.costs.step_ms(self.sublayers, self.n_past - len(tokens), plan)
        self.now_ms = before + full * (1.0 - (self.costs.head_ms + last) / step)

    def fill(self, n_tokens: int) -> None:
        assert self.n_past <= n_tokens <= self.n_ctx
        self.log.append(("fill", n_tokens))
        for position in range(self.n_past, n_tokens):
            self._tokens.append(HOLLOW)
            for keys in self._keys:
                keys[position] = Key(HOLLOW, TARGET, self._epoch)

    def set_threads(self, threads: int, threads_batch: int | None = None) -> None:
        self.log.append(("set_threads", (threads, threads_batch or threads)))
        self.settings.update(threads=threads, threads_batch=threads_batch or threads)

    def truncate(self, n_tokens: int) -> None:
        call = self._truncations
        self._truncations += 1
        self.log.append(("truncate", n_tokens))
        if call in self.deaf_truncations:
            return
        if not self.can_cut and 0 < n_tokens < self.n_past:
            raise RollbackError("this state cannot be cut")
        del self._tokens[n_tokens:]
        for keys in self._keys:
            for position in [p for p in keys if p >= n_tokens]:
                del keys[position]
        self._sound = [min(n, n_tokens) for n in self._sound]
        self._epoch += 1

    def logits(self, row: int = -1) -> NDArray[np.float32]:
        tokens, n, plan = self._latest
        end = len(tokens) - n + 1 + range(n)[row]
        return self.model.logits(tokens[:end], plan)

    # -- inside ------------------------------------------------------------------------------------

    def _pick(self, text: Sequence[int], sampling: Sampling, plan: Plan | None) -> Pick:
        return self.model.pick(text, sampling, plan, self._answer_start, self.history_of(text))

    def history_of(self, text: Sequence[int]) -> Sequence[int]:
        """What penalties and grammar see of a text. Backends with a mistake see something else."""
        return text

    def _compute(self, call: str, tokens: Sequence[int], plan: Plan | None) -> None:
        assert not self.branching, f"{call} while branches are open"
        if self.on_call is not None:
            self.on_call(call)
        self.log.append((call, plan if call in ("decode", "evaluate") else tuple(tokens)))
        if self.n_past + len(tokens) > self.n_ctx:
            raise AssertionError(f"{call} beyond the context")
        number = self._calls
        self._calls += 1
        step = self.costs.step_ms(self.sublayers, self.n_past, plan)
        self.now_ms += step * (1.0 + self.costs.per_token * (len(tokens) - 1))
        failure = self.fail_at.pop(number, None)
        if failure is not None:
            tokens = tokens[: len(tokens) // 2]
        writer = TARGET if plan is None else repr(plan)
        for token in tokens:
            self._write(token, plan, writer)
        self._latest = (tuple(self._tokens), len(tokens), plan)
        if failure is not None:
            raise failure

    def _write(self, token: int, plan: Plan | None, writer: str) -> None:
        position = len(self._tokens)
        self._tokens.append(token)
        for i, keys in enumerate(self._keys):
            if plan is not None and plan.modes[i].kind is ModeKind.SKIP:
                continue
            keys[position] = Key(token, writer, self._epoch)
            for attended in range(self._sound[i], position):
                key = keys.get(attended)
                if key is None:
                    raise LedgerError(f"sublayer {i} attends to {attended}, which has no keys")
                if key.token != self._tokens[attended]:
                    raise LedgerError(f"sublayer {i}: stale keys at {attended}")
                own = key.writer == writer and key.epoch == self._epoch
                if key.writer != TARGET and not own:
                    raise LedgerError(f"sublayer {i} attends to leftovers at {attended}: {key}")
                if key.writer == TARGET and attended == self._sound[i]:
                    self._sound[i] += 1  # stays so until it is cut


class FakeBranches:
    """Implements knapspec_edge.backend.Branches on the states of FakeBackend."""

    def __init__(self, backend: FakeBackend, start: int, tokens: Sequence[int]) -> None:
        self._backend = backend
        self._start = start
        self._tokens = tokens

    def embed(self, last: int) -> NDArray[np.float32]:
        self._count("embed", last + 1, 1)
        states = self._backend._stream(self._start, len(self._tokens))
        for i in range(last + 1):
            states = self._backend._add(i, states)
        return states

    def apply(self, sublayer: int, states: NDArray[np.float32]) -> NDArray[np.float32]:
        sublayers = self._backend.sublayers
        if sublayers[sublayer].layer == sublayers[0].layer:
            raise PlanError("the first layer")
        assert states.shape[1:] == (len(self._tokens), len(sublayers) + 1)
        self._count("apply", 1, len(states))
        return self._backend._add(sublayer, states)

    def head(self, states: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        self._count("head", 1, len(states))
        backend = self._backend
        n = len(backend.sublayers)
        picks = []
        for branch in states:
            plan = Plan.skipping(n, [i for i in range(n) if not branch[:, i].any()])
            for k in range(len(self._tokens)):
                text = [*backend.tokens[: self._start], *self._tokens[: k + 1]]
                picks.append(backend.model.pick(text, Sampling(), plan))
        shape = states.shape[:2]
        return (
            np.array([p.token for p in picks], dtype=np.int32).reshape(shape),
            np.array([p.probability for p in picks], dtype=np.float32).reshape(shape),
        )

    def _count(self, call: str, n_sublayers: int, n_branches: int) -> None:
        """One computing call, in the log, on the clock, and where it may fail."""
        backend = self._backend
        assert backend.branching, f"{call} on closed branches"
        if backend.on_call is not None:
            backend.on_call(call)
        backend.log.append((call, n_branches))
        number = backend._calls
        backend._calls += 1
        tokens = n_branches * len(self._tokens)
        step = backend.costs.step_ms(backend.sublayers, self._start, None)
        share = n_sublayers / len(backend.sublayers)
        backend.now_ms += share * step * (1.0 + backend.costs.per_token * (tokens - 1))
        if (failure := backend.fail_at.pop(number, None)) is not None:
            raise failure


def interrupted() -> Interrupted:
    return Interrupted("stopped by the user")
