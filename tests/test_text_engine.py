"""The engine on a scripted model: cases 20, 25, 28, 30, 32, 33, 40, 49, 56 and D9."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vocabulary import FakeVocabulary
from fakes import FakeBackend, interrupted
from scripted import CHATML, ScriptedModel, fake_of, scripted_engine
from stats_identity import check_stats

from knapspec_edge import gguf_check, native
from knapspec_edge.config import DEFAULTS
from knapspec_edge.decode.policy import FixedPolicy
from knapspec_edge.engine import Answer, Engine, Settings, Speculation
from knapspec_edge.errors import (
    ContextError,
    Interrupted,
    KnapspecError,
    ModelError,
    NativeError,
    PlanError,
    UsageError,
)
from knapspec_edge.latency import kept
from knapspec_edge.latency.store import Store
from knapspec_edge.records import Draft, Plan, RoundTimes
from knapspec_edge.search import plan_file

ASK = [{"role": "user", "content": "hello"}]


def force(engine: Engine, draft_tokens: int = 4) -> None:
    """Draft under a plan that skips one sublayer, whatever it costs."""
    plan = Plan.skipping(len(engine.backend.sublayers), [1])
    engine.speculation = Speculation(
        "on", "forced by the test", "file", Draft(plan, draft_tokens, 0.0)
    )
    engine._policy = FixedPolicy(engine.speculation.draft)


def read(answer: Answer) -> list[str]:
    return [event.text for event in answer]


@pytest.fixture(params=[False, True], ids=["plain", "speculative"])
def speculative(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("text", ["hello 日本 👋 🎉🎉 naïve", "a\n\n  b", "x" * 40])
def test_answer_is_streamed_whole(text: str, speculative: bool) -> None:
    engine = scripted_engine(lambda _: text, harm=0.3)
    if speculative:
        force(engine)
    answer = engine.chat(ASK)
    pieces = read(answer)
    assert "".join(pieces) == text == answer.text
    assert "\ufffd" not in "".join(pieces)
    assert answer.finish_reason == "stop"
    # The end token is counted and listed, its text is empty.
    assert answer.token_ids[-1] == fake_of(engine).model.vocabulary.special["<|im_end|>"]  # type: ignore[attr-defined]
    assert answer.stats.completion_tokens == len(answer.token_ids)
    assert (answer.stats.draft_n > 0) == speculative
    check_stats(answer.stats)


def test_speculation_changes_nothing_but_the_counters() -> None:
    long = "the user said hello in the " * 4
    plain = scripted_engine(lambda _: long)
    fast = scripted_engine(lambda _: long, harm=0.4)
    force(fast)
    a, b = plain.chat(ASK), fast.chat(ASK)
    assert read(a) == read(b)
    assert a.token_ids == b.token_ids
    assert 0 < b.stats.draft_n_accepted < b.stats.draft_n
    assert a.stats.draft_n == 0


ALPHABET = "A B C D E F G H I J K L M N O P Q R S T"


@pytest.mark.parametrize("draft_tokens", [1, 3, 8])
def test_stop_string_inside_an_accepted_block_cuts_everything_alike(draft_tokens: int) -> None:
    engine = scripted_engine(lambda _: ALPHABET, harm=0.0)
    force(engine, draft_tokens)
    answer = engine.chat(ASK, Settings(stop=("O P Q",)))
    shown = "".join(read(answer))
    assert shown == "A B C D E F G H I J K L M N " == answer.text
    assert answer.finish_reason == "stop"
    text = b"".join(engine.vocabulary.token_bytes(t) for t in answer.token_ids).decode()
    assert text == shown
    assert answer.stats.completion_tokens == len(answer.token_ids)
    assert answer.stats.draft_n_accepted > 0
    # the cache as well: nothing of the stop string is left in it
    assert engine.session.ids[answer.stats.prompt_tokens :] == tuple(answer.token_ids)
    assert fake_of(engine).n_past == len(engine.session.ids)
    check_stats(answer.stats)
    fake_of(engine).check_ledger()


def test_stop_string_that_never_comes_shows_all_text() -> None:
    engine = scripted_engine(lambda _: ALPHABET)
    answer = engine.chat(ASK, Settings(stop=("S T U",)))
    assert "".join(read(answer)) == ALPHABET


def test_limit_inside_a_possible_stop_string_shows_what_was_held_back() -> None:
    engine = scripted_engine(lambda _: "A B C D")
    answer = engine.chat(ASK, Settings(stop=("B C D",), max_tokens=4))
    assert "".join(read(answer)) == "A B " == answer.text
    assert answer.finish_reason == "length"
    assert len(answer.token_ids) == 4


def test_character_cut_by_the_limit_is_left_out() -> None:
    engine = scripted_engine(lambda _: "ok 🎉 done")
    answer = engine.chat(ASK, Settings(max_tokens=5))
    assert "".join(read(answer)) == "ok "
    assert len(answer.token_ids) == 5


def test_reader_that_leaves_early_keeps_what_it_read() -> None:
    engine = scripted_engine(lambda _: ALPHABET)
    with engine.chat(ASK) as answer:
        seen = [next(answer).text for _ in range(5)]
    assert answer.text == "".join(seen)
    assert answer.stats.completion_tokens == 5 == len(answer.token_ids)
    check_stats(answer.stats)
    assert read(engine.chat(ASK))[:5] == seen


@pytest.mark.parametrize("error", [interrupted(), KeyboardInterrupt()])
def test_interrupt_keeps_the_text_so_far(error: BaseException) -> None:
    engine = scripted_engine(lambda _: ALPHABET)
    answer = engine.chat(ASK, Settings(stop=("C D E F G",)))
    shown = []

    def interrupt_after(event_texts: Iterator[str]) -> None:
        for text in event_texts:
            shown.append(text)
            if len(shown) == 7:  # "A B C D": " C D" is held back by the stop string
                fake_of(engine).fail_at[fake_of(engine)._calls] = error

    with pytest.raises(type(error)):
        interrupt_after(event.text for event in answer)
    assert "".join(shown) == answer.text == "A B C D"
    assert answer.finish_reason == "interrupted"
    # The next answer is that of a fresh engine.
    assert "".join(read(engine.chat(ASK))) == ALPHABET
    fake_of(engine).check_ledger()


def test_second_turn_computes_only_what_is_new_and_says_the_same() -> None:
    engine = scripted_engine()
    first = engine.chat(ASK)
    text = "".join(read(first))
    talk = [*ASK, {"role": "assistant", "content": text}, {"role": "user", "content": "the user"}]
    fake_of(engine).log.clear()
    second = engine.chat(talk)
    again = "".join(read(second))
    computed = sum(len(tokens) for tokens in fake_of(engine).calls("prefill"))
    stats = second.stats
    assert stats.cached_tokens > first.stats.prompt_tokens
    assert computed == stats.prompt_tokens - stats.cached_tokens
    fresh = scripted_engine().chat(talk)
    assert "".join(read(fresh)) == again == "You said: the user"
    assert fresh.stats.cached_tokens == 0


def test_raw_completion_keeps_control_strings_as_text_unless_asked() -> None:
    engine = scripted_engine()
    assert "".join(read(engine.generate("once"))) == " there was a hare. The end."
    plain = engine.generate("<|im_end|>")
    special = engine.generate("<|im_end|>", parse_special=True)
    assert plain.stats.prompt_tokens > special.stats.prompt_tokens == 1
    ids = engine.vocabulary.tokenize("once", parse_special=False)
    assert "".join(read(engine.generate(ids))) == " there was a hare. The end."


def test_prompt_that_does_not_fit_names_both_numbers_and_the_flag() -> None:
    engine = scripted_engine(n_ctx=32)
    with pytest.raises(ContextError, match=r"prompt has \d+ tokens.* 32.*--ctx") as caught:
        engine.chat([{"role": "user", "content": "x" * 100}])
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="empty"):
        engine.generate("")


def test_end_of_the_context_is_told_apart_from_the_limit() -> None:
    engine = scripted_engine(lambda _: "x" * 500, n_ctx=64)
    answer = engine.chat(ASK)
    read(answer)
    assert answer.finish_reason == "length"
    assert answer.context_full
    short = engine.chat(ASK, Settings(max_tokens=3))
    read(short)
    assert not short.context_full


@pytest.mark.parametrize(
    "settings",
    [
        Settings(temperature=-1.0),
        Settings(temperature=float("nan")),
        Settings(min_p=1.5),
        Settings(seed=-2),
        Settings(seed=2**63),
        Settings(max_tokens=0),
        Settings(stop=("",)),
    ],
)
def test_settings_out_of_range_are_one_line(settings: Settings) -> None:
    with pytest.raises(UsageError) as caught:
        scripted_engine().chat(ASK, settings)
    assert "\n" not in str(caught.value)


def test_token_ids_outside_the_vocabulary_are_one_line() -> None:
    engine = scripted_engine()
    n_vocab = engine.backend.n_vocab
    # the last one would be token 1 in 32 bits
    for token in (-1, n_vocab, 2**32 + 1):
        with pytest.raises(UsageError, match=rf"token {token}; .* 0\.\.{n_vocab - 1}"):
            engine.generate([1, token])


def test_a_call_while_an_answer_is_computed_is_refused() -> None:
    engine = scripted_engine(lambda _: ALPHABET)
    refused = 0

    def during(stage: str, share: float | None) -> None:
        nonlocal refused
        for call in (answer.close, engine.close, lambda: engine.chat(ASK), lambda: next(answer)):
            with pytest.raises(UsageError, match="being computed right now"):
                call()
            refused += 1

    answer = engine.chat(ASK, progress=during)
    assert "".join(read(answer)) == ALPHABET
    assert refused >= 4


def test_random_seed_is_reported_and_reproduces() -> None:
    seeds = {Settings(temperature=1.0, seed=s).sampling().seed for s in (None, -1, None, -1)}
    assert len(seeds) == 4
    hot = Settings(temperature=9.0)
    first = scripted_engine().generate("once", Settings(temperature=9.0, max_tokens=30))
    text = "".join(read(first))
    repeated = scripted_engine().generate(
        "once", Settings(temperature=9.0, max_tokens=30, seed=first.sampling.seed)
    )
    other = scripted_engine().generate("once", Settings(temperature=9.0, max_tokens=30, seed=7))
    assert "".join(read(repeated)) == text
    assert repeated.token_ids == first.token_ids != (read(other), other.token_ids)[1]
    assert hot.seed is None
    assert Settings().sampling().seed == 0


def test_model_without_template_explains(tmp_path: Path) -> None:
    engine = scripted_engine(vocabulary=FakeVocabulary())
    with pytest.raises(ModelError, match="no chat template.*run.*--template") as caught:
        engine.chat(ASK)
    assert "\n" not in str(caught.value)
    assert "".join(read(engine.generate("once"))) == " there was a hare. The end."
    named = scripted_engine(vocabulary=FakeVocabulary(), template="chatml")
    assert "".join(read(named.chat(ASK))) == "You said: hello"


def test_broken_template_leaves_the_model_usable() -> None:
    broken = FakeVocabulary(chat_template="{% mystery %}")
    engine = scripted_engine(vocabulary=broken)
    with pytest.raises(ModelError, match="mystery"):
        engine.chat(ASK)
    assert "".join(read(engine.generate("once"))) == " there was a hare. The end."
    override = scripted_engine(vocabulary=broken, template="chatml")
    assert "".join(read(override.chat(ASK))) == "You said: hello"


def test_template_marker_that_the_vocabulary_lacks_ends_the_answer_as_text() -> None:
    vocab = FakeVocabulary(controls=("<s>", "</s>"))
    engine = scripted_engine(
        vocabulary=vocab, template="gemma", continuation="A hare.<end_of_turn>\nmore"
    )
    answer = engine.chat(ASK)
    assert "".join(read(answer)) == "A hare."
    assert answer.finish_reason == "stop"


# -- opening a file


class Opened(FakeVocabulary):
    """Stands in for native.Model."""

    n_ctx_train = 1000

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        closed.append("model")


class Context(FakeBackend):
    """Stands in for native.LlamaBackend."""

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        closed.append("context")

    def truncate(self, n_tokens: int) -> None:
        assert "context" not in closed
        super().truncate(n_tokens)


closed: list[str] = []


@pytest.fixture
def openable(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Engine.open without files and native code; what the context was asked for."""
    asked: dict[str, object] = {}
    vocab = Opened(chat_template=CHATML)

    def open_context(model: object, *, ctx_tokens: int, **settings: object) -> Context:
        asked.update(settings, ctx_tokens=ctx_tokens)
        return Context(ScriptedModel(vocabulary=vocab), n_layer=1, n_ctx=ctx_tokens)

    info = SimpleNamespace(path=Path("m.gguf"), name="M", context_length=1000, architecture="toy")
    monkeypatch.setattr(gguf_check, "inspect", lambda path: info)
    monkeypatch.setattr(gguf_check, "fingerprint", lambda info: "f" * 32)
    monkeypatch.setattr(native, "open_model", lambda path, **_: vocab)
    monkeypatch.setattr(native, "open_context", open_context)
    monkeypatch.setattr(native, "machine_key", lambda: {"library": "d"})
    monkeypatch.setattr(native, "describe_device", lambda backend: "CPU")
    closed.clear()
    return asked


def test_a_context_drafts_as_the_configuration_says(openable: dict[str, object]) -> None:
    config = replace(DEFAULTS, repair_interval=0, short_head=False)
    with Engine.open("m.gguf", spec="off", config=config):
        assert (openable["repair_interval"], openable["short_head"]) == (0, False)
    with Engine.open("m.gguf", spec="off"):
        assert (openable["repair_interval"], openable["short_head"]) == (1, True)


@pytest.mark.parametrize(
    ("ctx", "trained", "expected", "warned"),
    [
        (None, 1000, 1000, False),
        (None, 131072, DEFAULTS.ctx_tokens, False),
        (None, 0, 1000, False),  # the file's own figure is asked next
        (300, 1000, 300, False),
        (2000, 1000, 2000, True),
    ],
)
def test_context_size(
    openable: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    ctx: int | None,
    trained: int,
    expected: int,
    warned: bool,
) -> None:
    monkeypatch.setattr(Opened, "n_ctx_train", trained)
    with Engine.open("m.gguf", ctx=ctx, spec="off") as engine:
        assert engine.n_ctx == openable["ctx_tokens"] == expected
        warnings = engine.take_warnings()
        assert len(warnings) == warned
        if warned:
            assert "2000" in warnings[0]
            assert "1000" in warnings[0]
        assert engine.take_warnings() == []


def test_closing_ends_an_answer_and_frees_in_order(openable: dict[str, object]) -> None:
    with Engine.open("m.gguf", spec="off") as engine:
        answer = engine.chat(ASK)
        next(answer)
    assert closed == ["context", "model"]
    del answer
    gc.collect()  # nothing is left that would touch the closed context


def test_refusal_while_opening_frees_everything(openable: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Engine.open("m.gguf", spec="off", template="nonsense")
    assert closed == ["context", "model"]


@pytest.mark.parametrize("wrong", [{"ctx": 0}, {"threads": 0}, {"spec": "maybe"}])
def test_bad_requests_are_refused_before_loading(
    openable: dict[str, object], wrong: dict[str, Any]
) -> None:
    with pytest.raises(UsageError):
        Engine.open("m.gguf", **wrong)
    assert openable == {}


# -- speculation


def test_off_does_no_draft_work() -> None:
    engine = scripted_engine()
    assert engine.set_speculation("off").state == "off"
    fake_of(engine).log.clear()
    answer = engine.chat(ASK)
    read(answer)
    assert answer.stats.draft_n == 0
    assert all(plan is None for plan in fake_of(engine).calls("decode"))
    assert fake_of(engine).calls("verify") == []


def test_auto_measures_decides_and_says_why() -> None:
    engine = scripted_engine(n_ctx=2048)
    shares: list[float | None] = []
    chosen = engine.set_speculation("auto", progress=lambda stage, share: shares.append(share))
    assert chosen.state in ("on", "off")
    assert chosen.reason
    assert "\n" not in chosen.reason
    assert shares
    assert "".join(read(engine.chat(ASK))) == "You said: hello"


def test_refused_model_is_plain_under_auto_and_an_error_under_on() -> None:
    engine = scripted_engine(refusal="architecture toy keeps a recurrent state")
    chosen = engine.set_speculation("auto")
    assert chosen.state == "off"
    assert "recurrent" in chosen.reason
    with pytest.raises(PlanError, match="recurrent"):
        engine.set_speculation("on")
    assert engine.speculation is chosen
    assert "".join(read(engine.chat(ASK))) == "You said: hello"


def test_plan_file_is_used_or_refused(tmp_path: Path) -> None:
    engine = scripted_engine()
    sublayers = engine.backend.sublayers
    good, other = tmp_path / "good.json", tmp_path / "other.json"
    draft = Draft(Plan.skipping(len(sublayers), [1]), 3, 0.0)
    plan_file.save(good, draft, sublayers, "")
    plan_file.save(other, draft, sublayers, "0" * 32)
    assert engine.set_speculation(good).policy == "file"
    answer = engine.chat(ASK)
    assert "".join(read(answer)) == "You said: hello"
    assert answer.stats.draft_n > 0
    with pytest.raises(PlanError):
        engine.set_speculation(other)
    assert engine.speculation.policy == "file"
    for wrong in ("maybe", str(tmp_path / "missing.json")):
        with pytest.raises(UsageError, match="auto, on, lookup, off"):
            engine.set_speculation(wrong)
    with pytest.raises(KnapspecError):
        scripted_engine(refusal="no").set_speculation(good)


def test_measuring_can_be_interrupted_and_repeated() -> None:
    engine = scripted_engine(n_ctx=2048)
    fake_of(engine).fail_at[5] = interrupted()
    with pytest.raises(Interrupted):
        engine.set_speculation("auto")
    assert engine.speculation.state == "off"
    assert "".join(read(engine.chat(ASK))) == "You said: hello"
    assert engine.set_speculation("auto").reason


def test_changing_speculation_in_a_conversation_keeps_answers_right() -> None:
    engine = scripted_engine(n_ctx=2048)
    read(engine.chat(ASK))
    engine.set_speculation("auto")
    talk = [*ASK, {"role": "assistant", "content": "You said: hello"}, *ASK]
    assert "".join(read(engine.chat(talk))) == "You said: hello"
    fake_of(engine).check_ledger()


def test_system_prompt_notice_reaches_the_answer() -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    engine = scripted_engine(vocabulary=FakeVocabulary(chat_template=refuses))
    answer = engine.chat([{"role": "system", "content": "brief"}, *ASK])
    assert len(answer.notices) == 1
    assert "brief\n\nhello" in "".join(read(answer))


# -- a machine that is not as it was measured


def test_drift_has_a_profile_measured_again_once_it_is_old_enough(
    user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = scripted_engine(n_ctx=2048)
    engine.set_speculation("auto")
    tracker, decision = engine._drift, engine._decision
    assert tracker is not None
    assert decision is not None
    assert decision.measured is not None
    store, key = Store(), kept.latency_key(engine.backend, engine._model_key())
    step_ms = decision.measured.costs.step_ms(100)
    for _ in range(DEFAULTS.drift_min_rounds):
        tracker.observe(RoundTimes(100, 0, 0.0, 3.0 * step_ms), None)
    read(engine.chat(ASK))
    assert kept.load_latency(store, key, engine.backend) is not None, "measured a moment ago"
    later = time.time() + DEFAULTS.measure_retry_seconds + 60.0
    monkeypatch.setattr(time, "time", lambda: later)
    engine.close()
    assert kept.load_latency(store, key, engine.backend) is None


def test_a_model_file_that_is_gone_does_not_keep_an_engine_open(
    openable: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.open("m.gguf", ctx=512, spec="auto") as engine:

        def gone(info: object) -> str:
            raise ModelError("the file is gone")

        monkeypatch.setattr(gguf_check, "fingerprint", gone)
        assert engine.fingerprint() == "f" * 32
    assert closed == ["context", "model"]


def test_a_plan_at_a_context_leaves_the_answers_alone() -> None:
    engine = scripted_engine(n_ctx=256)
    shares: list[float | None] = []
    outlook = engine.plan(100, budget_seconds=0.5, progress=lambda _, share: shares.append(share))
    assert outlook.context_tokens == 100
    assert outlook.sublayers == engine.backend.sublayers
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    assert engine.speculation.state == "off"
    assert engine.backend.n_past == 0
    answer = engine.chat([{"role": "user", "content": "Hello"}])
    assert "".join(event.text for event in answer) == "You said: Hello"


def test_a_plan_that_cannot_be_made_is_one_line() -> None:
    refused = scripted_engine(refusal="its layers are recurrent")
    with pytest.raises(PlanError, match=r"^the model cannot be planned for: its layers are rec"):
        refused.plan(100)
    engine = scripted_engine(n_ctx=256)
    fake_of(engine).fail_at[3] = NativeError("graph allocation failed")
    with pytest.raises(PlanError, match="the measurement failed: graph allocation failed"):
        engine.plan(100, budget_seconds=0.5)
    for n in (0, 1, -7):
        with pytest.raises(UsageError, match="at least 2"):
            engine.plan(n)
    with pytest.raises(UsageError, match="takes a context of 1074, .*; this one has 256; raise"):
        engine.plan()  # config.expected_context_tokens


def test_a_plan_can_be_interrupted_and_made_again() -> None:
    engine = scripted_engine(n_ctx=256)
    fake_of(engine).fail_at[5] = interrupted()
    with pytest.raises(Interrupted):
        engine.plan(100, budget_seconds=0.5)
    assert engine.plan(100, budget_seconds=0.5).context_tokens == 100
