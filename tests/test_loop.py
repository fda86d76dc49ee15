"""The draft-verify loop and the session, on a toy model that can be computed without a cache."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import naive
import pytest
from fakes import FakeBackend, ToyModel, chance, interrupted
from hypothesis import given, settings
from hypothesis import strategies as st
from stats_identity import check_stats

from knapspec_edge.decode.session import Session
from knapspec_edge.decode.stats import acceptance_by_place, timings
from knapspec_edge.errors import (
    ContextError,
    Interrupted,
    NativeError,
    PlanError,
    RollbackError,
    UsageError,
)
from knapspec_edge.records import FULL, SKIP, Draft, Mode, ModeKind, Plan, Sampling, Stats

N_LAYER = 4
N_SUBLAYERS = 2 * N_LAYER
GREEDY = Sampling()
PROMPT = [3, 1, 4, 1, 5]


def draft_of(*skipped: int, gamma: int = 4, threshold: float = 0.0) -> Draft:
    return Draft(Plan.skipping(N_SUBLAYERS, list(skipped)), gamma, threshold)


def read(session: Session, prompt: list[int], **options: object) -> tuple[list[int], Stats]:
    """All tokens of one generation, after checking everything that must always hold."""
    generation = session.generate(prompt, **options)  # type: ignore[arg-type]
    backend: FakeBackend = session._backend  # type: ignore[assignment]
    tokens = []
    for event in generation:
        tokens.append(event.token)
        assert event.position == len(prompt) + len(tokens) - 1
        check_stats(generation.stats)
    stats = generation.stats
    check_stats(stats)
    backend.check_ledger()
    assert stats.completion_tokens == len(tokens)
    assert session.ids == backend.tokens == tuple([*prompt, *tokens][:-1])
    return tokens, stats


modes = st.one_of(
    st.just(FULL),
    st.just(SKIP),
    st.builds(Mode, st.just(ModeKind.WINDOW), st.integers(0, 4), st.integers(1, 8)),
)
plans = st.lists(modes, min_size=N_SUBLAYERS, max_size=N_SUBLAYERS).map(lambda m: Plan(tuple(m)))
drafts = st.builds(Draft, plans, st.integers(1, 12), st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]))
samplings = st.one_of(
    st.just(GREEDY),
    st.builds(Sampling, temperature=st.sampled_from([0.3, 0.8, 1.5]), seed=st.integers(0, 3)),
)


class TestIdentity:
    """Text with speculation equals text without it."""

    coverage: Counter[str] = Counter()

    @settings(max_examples=300, deadline=None)
    @given(
        draft=drafts,
        sampling=samplings,
        seed=st.integers(0, 10**6),
        harm=st.sampled_from([0.0, 0.02, 0.1, 0.3]),
        prompt=st.lists(st.integers(0, 22), min_size=1, max_size=20),
        max_tokens=st.one_of(st.none(), st.integers(1, 70)),
        n_ctx=st.integers(21, 80),
        end_after=st.one_of(st.none(), st.integers(0, 40)),
        ends=st.booleans(),
        max_verify=st.integers(1, 16),
    )
    def test_any_plan_gives_the_plain_text(
        self, draft, sampling, seed, harm, prompt, max_tokens, n_ctx, end_after, ends, max_verify
    ) -> None:
        model = ToyModel(
            seed=seed,
            default_harm=harm,
            end_tokens=frozenset({0, 7}) if ends else frozenset(),
            end_at=None if end_after is None else len(prompt) + end_after,
        )
        backend = FakeBackend(model, n_layer=N_LAYER, n_ctx=n_ctx, max_verify_tokens=max_verify)
        limit = min(max_tokens or n_ctx, n_ctx - len(prompt))
        expected, finish = naive.plain(model, prompt, limit, sampling)
        twin = naive.speculative(model, prompt, limit, sampling, draft, max_verify)
        assert twin.tokens == expected

        tokens, stats = read(
            Session(backend), prompt, sampling=sampling, draft=draft, max_tokens=max_tokens
        )
        assert tokens == expected
        assert stats.finish_reason == finish == twin.finish
        assert stats.rounds == len(twin.drafted)
        assert stats.draft_n == sum(twin.drafted)
        assert stats.draft_n_accepted == sum(twin.accepted)
        assert stats.accepted_lengths == Counter(
            a for d, a in zip(twin.drafted, twin.accepted, strict=True) if d
        )
        # A plan is constant from the first drafted token of a round to the last.
        assert {p for p in backend.calls("decode") if p is not None} <= {draft.plan}

        self.coverage["drafted"] += stats.draft_n > 0
        self.coverage["accepted"] += stats.draft_n_accepted > 0
        for drafted, accepted in zip(twin.drafted, twin.accepted, strict=True):
            self.coverage["rejected"] += accepted < drafted
            self.coverage["fully accepted"] += 1 < drafted == accepted
        self.coverage["context end"] += len(prompt) + len(tokens) == n_ctx
        self.coverage["cut"] += stats.cut_n > 0
        self.coverage[finish] += 1

    def test_all_of_that_really_happened(self) -> None:
        if not self.coverage:
            pytest.skip("the property test was deselected")
        for case in (
            "drafted", "accepted", "rejected", "fully accepted", "context end", "cut",
            "stop", "length",
        ):  # fmt: skip
            assert self.coverage[case] > 0, case

    def test_plain_equals_the_naive_twin_and_drafts_nothing(self) -> None:
        backend = FakeBackend()
        tokens, stats = read(Session(backend), PROMPT, max_tokens=40)
        assert (tokens, stats.finish_reason) == naive.plain(backend.model, PROMPT, 40, GREEDY)
        assert backend.calls("verify") == []
        assert set(backend.calls("decode")) <= {None}
        assert (stats.draft_n, stats.draft_ms, stats.acceptance) == (0, 0.0, None)
        assert stats.accepted_lengths == {}

    def test_a_draft_of_zero_tokens_is_plain(self) -> None:
        backend = FakeBackend(ToyModel(end_tokens=frozenset()))
        read(Session(backend), PROMPT, draft=draft_of(1, gamma=0), max_tokens=10)
        assert set(backend.calls("decode")) == {None}

    def test_the_whole_network_as_its_own_draft_is_always_right(self) -> None:
        backend = FakeBackend(ToyModel(end_tokens=frozenset()))
        _, stats = read(Session(backend), PROMPT, draft=draft_of(gamma=4), max_tokens=100)
        assert stats.draft_n > 50
        assert stats.acceptance == 1.0

    def test_a_useless_draft_still_gives_one_token_per_round(self) -> None:
        backend = FakeBackend(ToyModel(end_tokens=frozenset(), default_harm=1.0))
        _, stats = read(Session(backend), PROMPT, draft=draft_of(1, 3, 5), max_tokens=30)
        assert stats.acceptance is not None
        assert stats.acceptance < 0.5
        assert stats.accepted_lengths[0] > 5

    def test_sampling_does_not_depend_on_the_draft(self) -> None:
        sampling = Sampling(temperature=0.9, seed=11)
        texts = set()
        for draft in (None, draft_of(), draft_of(2), draft_of(1, 2, 3, 4, 5)):
            backend = FakeBackend(ToyModel(end_tokens=frozenset()))
            tokens, _ = read(
                Session(backend), PROMPT, sampling=sampling, draft=draft, max_tokens=50
            )
            texts.add(tuple(tokens))
        assert len(texts) == 1

    def test_the_prompt_is_never_computed_under_a_plan(self) -> None:
        backend = FakeBackend()
        read(Session(backend), list(range(1, 20)), draft=draft_of(0, 1, 2, 3), max_tokens=1)
        assert backend.calls("decode") == backend.calls("verify") == []


class TestLimits:
    @pytest.mark.parametrize("gamma", [1, 4, 7])
    @pytest.mark.parametrize("extra", ["1", "2", "gamma", "gamma+1", "64"])
    def test_exactly_as_many_as_asked(self, gamma: int, extra: str) -> None:
        wanted = {"gamma": gamma, "gamma+1": gamma + 1}.get(extra) or int(extra)
        backend = FakeBackend(ToyModel(end_tokens=frozenset()))
        tokens, stats = read(
            Session(backend), PROMPT, draft=draft_of(1, gamma=gamma), max_tokens=wanted
        )
        assert len(tokens) == wanted
        assert stats.finish_reason == "length"

    def test_every_context_position_is_used(self) -> None:
        for draft in (None, draft_of(gamma=8)):
            backend = FakeBackend(ToyModel(end_tokens=frozenset()), n_ctx=32)
            tokens, stats = read(Session(backend), PROMPT, draft=draft)
            assert len(PROMPT) + len(tokens) == 32
            assert stats.finish_reason == "length"

    def test_no_pass_is_wider_than_the_backend_allows(self) -> None:
        backend = FakeBackend(ToyModel(end_tokens=frozenset()), max_verify_tokens=3)
        read(Session(backend), PROMPT, draft=draft_of(gamma=12), max_tokens=40)
        assert max(len(tokens) for tokens in backend.calls("verify")) == 3

    def test_the_end_token_inside_a_block_is_the_last(self) -> None:
        for end_after in range(1, 12):
            model = ToyModel(end_at=len(PROMPT) + end_after)
            backend = FakeBackend(model)
            tokens, stats = read(Session(backend), PROMPT, draft=draft_of(gamma=5), max_tokens=60)
            assert len(tokens) == end_after + 1
            assert tokens[-1] == 0
            assert stats.finish_reason == "stop"

    def test_end_and_limit_in_the_same_token_is_stop(self) -> None:
        model = ToyModel(end_at=len(PROMPT) + 6)
        for draft in (None, draft_of(gamma=9)):
            tokens, stats = read(Session(FakeBackend(model)), PROMPT, draft=draft, max_tokens=7)
            assert len(tokens) == 7
            assert stats.finish_reason == "stop"

    def test_drafting_stops_after_a_doubtful_token_that_is_still_verified(self) -> None:
        backend = FakeBackend(ToyModel(end_tokens=frozenset()))
        _, stats = read(
            Session(backend), PROMPT, draft=draft_of(gamma=8, threshold=1.0), max_tokens=20
        )
        # No pick is certain, so each round drafts one token; the full plan is always right.
        assert {len(tokens) for tokens in backend.calls("verify")} == {2}
        assert stats.draft_n_accepted == stats.draft_n > 0


class TestEndings:
    """Cache, ids and counters after everything that can end a generation."""

    def test_closing_early_leaves_exactly_what_was_read(self) -> None:
        wanted = naive.plain(ToyModel(end_tokens=frozenset()), PROMPT, 40, GREEDY)[0]
        seen_inside_a_block = 0
        for n in range(1, 40):
            backend = FakeBackend(ToyModel(end_tokens=frozenset()))
            session = Session(backend)
            generation = session.generate(PROMPT, draft=draft_of(1, gamma=5), max_tokens=40)
            tokens = [next(generation).token for _ in range(n)]
            seen_inside_a_block += generation.stats.cut_n > 0
            generation.close("stop")
            assert tokens == wanted[:n]
            assert generation.stats.completion_tokens == n
            assert generation.stats.finish_reason == "stop"
            check_stats(generation.stats)
            backend.check_ledger()
            assert session.ids == backend.tokens == tuple(PROMPT + tokens[:-1])
            assert list(generation) == []
        assert seen_inside_a_block > 5

    def test_closing_before_reading_does_nothing(self) -> None:
        backend = FakeBackend()
        session = Session(backend)
        session.generate(PROMPT).close()
        assert session.ids == backend.tokens == ()

    @pytest.mark.parametrize("call", range(1, 40))
    @pytest.mark.parametrize("error", [interrupted(), KeyboardInterrupt(), NativeError("broken")])
    def test_a_failure_at_any_call_keeps_what_was_said(
        self, call: int, error: BaseException
    ) -> None:
        model = ToyModel(end_tokens=frozenset())
        wanted = naive.plain(model, PROMPT, 60, GREEDY)[0]
        backend = FakeBackend(model)
        backend.fail_at[call] = error
        session = Session(backend)
        generation = session.generate(PROMPT, draft=draft_of(1, gamma=4), max_tokens=60)
        tokens: list[int] = []
        with pytest.raises(type(error)):
            tokens.extend(event.token for event in generation)
        # list.extend from a generator keeps what came before the error
        assert tokens == wanted[: len(tokens)]
        stats = generation.stats
        check_stats(stats)
        assert stats.completion_tokens == len(tokens) >= 1
        interrupt = isinstance(error, (Interrupted, KeyboardInterrupt))
        assert stats.finish_reason == ("interrupted" if interrupt else None)
        backend.check_ledger()
        assert session.ids == backend.tokens == tuple(PROMPT + tokens[:-1])

        # The next turn is as if nothing had happened.
        again, _ = read(session, PROMPT + tokens, draft=draft_of(1), max_tokens=10)
        assert again == naive.plain(model, PROMPT + tokens, 10, GREEDY)[0]

    def test_an_interrupted_prompt_keeps_its_finished_slices(self) -> None:
        backend = FakeBackend(slice_tokens=4)
        backend.fail_at[2] = interrupted()
        session = Session(backend)
        prompt = list(range(1, 20))
        generation = session.generate(prompt, max_tokens=5)
        with pytest.raises(Interrupted):
            next(generation)
        assert generation.stats.finish_reason == "interrupted"
        assert generation.stats.completion_tokens == 0
        check_stats(generation.stats)
        assert session.ids == backend.tokens == tuple(prompt[:8])
        backend.check_ledger()
        tokens, stats = read(session, prompt, max_tokens=5)
        assert stats.cached_tokens == 8
        assert tokens == naive.plain(backend.model, prompt, 5, GREEDY)[0]

    @pytest.mark.parametrize("deaf", range(6))
    def test_a_cut_without_effect_is_noticed_and_nothing_wrong_is_said(self, deaf: int) -> None:
        model = ToyModel(end_tokens=frozenset())
        backend = FakeBackend(model)
        backend.deaf_truncations = {deaf}
        session = Session(backend)
        tokens: list[int] = []
        with pytest.raises(RollbackError, match="KV cache"):
            tokens.extend(
                e.token for e in session.generate(PROMPT, draft=draft_of(1, 2, 3), max_tokens=60)
            )
        assert tokens == naive.plain(model, PROMPT, 60, GREEDY)[0][: len(tokens)]
        # The session starts afresh rather than trusting the cache.
        assert session.ids == backend.tokens == ()
        assert read(session, PROMPT, max_tokens=8)[1].cached_tokens == 0

    def test_a_cache_that_never_cuts_is_refused_from_then_on(self) -> None:
        backend = FakeBackend()
        session = Session(backend)
        backend.deaf_truncations = set(range(1000))
        with pytest.raises(RollbackError):
            list(session.generate(PROMPT, draft=draft_of(1), max_tokens=60))
        with pytest.raises(RollbackError, match="open the model again"):
            session.generate(PROMPT)

    def test_starting_the_next_ends_the_one_before(self) -> None:
        backend = FakeBackend(ToyModel(end_tokens=frozenset()))
        session = Session(backend)
        first = session.generate(PROMPT, draft=draft_of(), max_tokens=30)
        said = [next(first).token for _ in range(3)]
        second, stats = read(session, PROMPT + said, max_tokens=5)
        assert stats.cached_tokens == len(PROMPT) + 2
        assert list(first) == []
        assert second == naive.plain(backend.model, PROMPT + said, 5, GREEDY)[0]


class TestSession:
    def test_a_conversation_computes_only_what_is_new(self) -> None:
        backend = FakeBackend(ToyModel(end_tokens=frozenset()))
        session = Session(backend)
        history = list(PROMPT)
        for turn in range(4):
            before = len(session.ids)
            tokens, stats = read(session, history, draft=draft_of(1), max_tokens=9)
            assert stats.cached_tokens == before
            assert stats.prompt_tokens == len(history)
            assert tokens == naive.plain(backend.model, history, 9, GREEDY)[0]
            history += [*tokens, 20 + turn % 3, 5]

    def test_another_branch_keeps_the_common_part(self) -> None:
        backend = FakeBackend()
        session = Session(backend)
        read(session, [1, 2, 3, 4, 5, 6], max_tokens=5)
        tokens, stats = read(session, [1, 2, 3, 9, 9], max_tokens=5)
        assert stats.cached_tokens == 3
        assert tokens == naive.plain(backend.model, [1, 2, 3, 9, 9], 5, GREEDY)[0]

    def test_the_same_prompt_again_recomputes_its_last_token(self) -> None:
        backend = FakeBackend()
        session = Session(backend)
        first, _ = read(session, PROMPT, max_tokens=8)
        second, stats = read(session, PROMPT, max_tokens=8)
        assert stats.cached_tokens == len(PROMPT) - 1
        assert first == second

    def test_reuse_can_be_switched_off(self) -> None:
        session = Session(FakeBackend())
        read(session, PROMPT, max_tokens=8)
        assert read(session, PROMPT, max_tokens=8, reuse=False)[1].cached_tokens == 0

    def test_a_state_that_cannot_be_cut_is_started_afresh(self) -> None:
        backend = FakeBackend(refusal="its state cannot be rolled back", can_cut=False)
        session = Session(backend)
        tokens, _ = read(session, PROMPT, max_tokens=6)
        _, stats = read(session, [*PROMPT, *tokens, 4], max_tokens=6)
        assert stats.cached_tokens == len(PROMPT) + len(tokens) - 1
        again, stats = read(session, PROMPT, max_tokens=6)
        assert stats.cached_tokens == 0
        assert again == tokens

    def test_progress_counts_new_tokens(self) -> None:
        session = Session(FakeBackend(slice_tokens=4))
        read(session, PROMPT, max_tokens=1)
        seen: list[tuple[int, int]] = []
        read(
            session,
            [*PROMPT, *range(1, 11)],
            max_tokens=1,
            progress=lambda done, total: seen.append((done, total)),
        )
        assert seen == [(0, 10), (4, 10), (8, 10), (10, 10)]

    def test_reset_forgets(self) -> None:
        backend = FakeBackend()
        session = Session(backend)
        read(session, PROMPT, max_tokens=3)
        session.reset()
        assert session.ids == backend.tokens == ()

    def test_an_older_answer_that_ends_late_leaves_the_newer_one_alone(self) -> None:
        backend = FakeBackend(ToyModel(end_tokens=frozenset()))
        session = Session(backend)
        older = session.generate(PROMPT, max_tokens=9)
        for _ in range(6):
            next(older)
        newer = session.generate([*PROMPT, 7, 7], draft=draft_of(1), max_tokens=9)
        tokens = [next(newer).token]
        older.close("stop", unread=3)
        assert older.stats.completion_tokens == 3
        tokens += [event.token for event in newer]
        assert tokens == naive.plain(backend.model, [*PROMPT, 7, 7], 9, GREEDY)[0]
        older.close("stop", unread=2)
        assert session.ids == backend.tokens == tuple([*PROMPT, 7, 7, *tokens][:-1])

    def test_a_call_while_another_computes_is_refused(self) -> None:
        """From another thread, or from a function that the computation itself calls."""
        backend = FakeBackend(ToyModel(end_tokens=frozenset()))
        session = Session(backend)
        refused: list[str] = []

        def attempt(call: Callable[[], object]) -> None:
            with pytest.raises(UsageError, match="being computed right now") as caught:
                call()
            refused.append(str(caught.value))

        def during(done: int, total: int) -> None:
            calls = (
                lambda: next(running),
                running.close,
                session.reset,
                lambda: session.generate(PROMPT),
            )
            for call in calls:
                attempt(call)
                thread = threading.Thread(target=attempt, args=(call,))
                thread.start()
                thread.join()

        running = session.generate(PROMPT, max_tokens=5, progress=during)
        tokens = [event.token for event in running]
        assert len(refused) == 16
        assert tokens == naive.plain(backend.model, PROMPT, 5, GREEDY)[0]
        assert session.ids == backend.tokens == tuple([*PROMPT, *tokens][:-1])

    def test_what_cannot_be_done_is_refused_at_once(self) -> None:
        session = Session(FakeBackend(n_ctx=16))
        with pytest.raises(UsageError, match="empty"):
            session.generate([])
        with pytest.raises(UsageError, match="at least 1"):
            session.generate(PROMPT, max_tokens=0)
        with pytest.raises(ContextError, match=r"16 tokens .* context of 16; raise --ctx"):
            session.generate([1] * 16)
        with pytest.raises(PlanError, match="3 sublayers, the model has 8"):
            session.generate(PROMPT, draft=Draft(Plan.full(3), 4, 0.5))
        with pytest.raises(UsageError, match="threshold"):
            session.generate(PROMPT, draft=draft_of(threshold=1.5))
        refusing = Session(FakeBackend(refusal="mamba cannot roll back"))
        with pytest.raises(PlanError, match="mamba cannot roll back"):
            refusing.generate(PROMPT, draft=draft_of(1))


class TestStatistics:
    def test_times_are_split_and_add_up(self) -> None:
        backend = FakeBackend(ToyModel(end_tokens=frozenset()))
        session = Session(backend, clock=backend.clock)
        _, stats = read(session, PROMPT, draft=draft_of(1, 2, gamma=3), max_tokens=40)
        assert stats.prompt_ms > 0
        assert stats.draft_ms > 0
        assert stats.verify_ms > 0
        # The virtual clock advances in backend calls only.
        assert stats.predicted_ms == pytest.approx(stats.draft_ms + stats.verify_ms)
        assert stats.overhead_ms == pytest.approx(0.0, abs=1e-9)
        assert stats.prompt_ms + stats.predicted_ms == pytest.approx(backend.now_ms)

    def test_time_between_two_tokens_belongs_to_the_reader(self) -> None:
        backend = FakeBackend(ToyModel(end_tokens=frozenset()))
        session = Session(backend, clock=backend.clock)
        generation = session.generate(PROMPT, draft=draft_of(1), max_tokens=20)
        for _ in generation:
            backend.now_ms += 1e6
        assert generation.stats.predicted_ms < 1e6

    def test_json_form(self) -> None:
        backend = FakeBackend(ToyModel(end_tokens=frozenset()))
        session = Session(backend, clock=backend.clock)
        _, stats = read(session, PROMPT, draft=draft_of(1), max_tokens=20)
        result = timings(stats, 123.4567)
        assert result["prompt_n"] == len(PROMPT)
        assert result["predicted_n"] == 20
        assert result["draft_n"] == stats.draft_n > 0
        assert result["draft_n_accepted"] == stats.draft_n_accepted
        assert result["baseline_per_second"] == 123.457
        assert result["predicted_per_second"] == pytest.approx(
            1000 * 20 / stats.predicted_ms, abs=1e-3
        )
        assert "baseline_per_second" not in timings(stats)
        lengths = {int(k): n for k, n in result["accepted_lengths"].items()}
        assert lengths == stats.accepted_lengths
        for i, share in enumerate(result["acceptance_by_place"]):
            longer = sum(n for k, n in lengths.items() if k > i)
            assert share == pytest.approx(longer / stats.tried_at[i], abs=1e-4)
        assert len(result["acceptance_by_place"]) >= max(lengths)

    def test_nothing_divides_by_zero(self) -> None:
        result = timings(Stats())
        assert result["predicted_per_second"] == result["prompt_per_second"] == 0.0
        assert result["draft_n"] == result["draft_n_accepted"] == 0
        assert acceptance_by_place(Stats()) == result["acceptance_by_place"] == []
        assert result["accepted_lengths"] == {}

    def test_acceptance_by_place_is_conditional(self) -> None:
        backend = FakeBackend(ToyModel(end_tokens=frozenset()))
        _, stats = read(Session(backend), PROMPT, draft=draft_of(1, 2, 3), max_tokens=200)
        places = acceptance_by_place(stats)
        assert len(places) == 4
        assert places[0] == stats.accepted_at[0] / stats.tried_at[0]
        assert stats.tried_at[1] <= stats.accepted_at[0]


def test_the_fake_notices_a_loop_that_forgets_to_cut() -> None:
    """The ledger is only worth something if it fails."""
    backend = FakeBackend()
    backend.prefill(PROMPT, GREEDY)
    backend.decode(3, GREEDY, Plan.skipping(N_SUBLAYERS, [0]))
    with pytest.raises(AssertionError, match="attends"):
        backend.verify([3, 4], GREEDY)


def test_the_fake_notices_a_plan_that_changes_within_a_round() -> None:
    backend = FakeBackend()
    backend.prefill(PROMPT, GREEDY)
    backend.decode(3, GREEDY, Plan.skipping(N_SUBLAYERS, [0]))
    with pytest.raises(AssertionError, match="no keys"):
        backend.decode(4, GREEDY, Plan.skipping(N_SUBLAYERS, [2]))


def test_chance_is_uniform_enough_to_stand_for_agreement() -> None:
    values = [chance("x", i) for i in range(4000)]
    assert sum(v < 0.1 for v in values) / 4000 == pytest.approx(0.1, abs=0.02)
