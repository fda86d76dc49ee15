"""Ends in odd orders, several threads, nested guards: never a crash, always one clear error.

What used to be memory errors runs in a process of its own, so that a crash fails one test.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from knapspec_edge.errors import Interrupted, UsageError
from knapspec_edge.native import open_context, open_model
from knapspec_edge.records import Sampling

from .oracle import TOKENS

GREEDY = Sampling()


@pytest.fixture
def tiny(tiny_models: Path, patched_library: Path) -> Path:
    return tiny_models / "llama-dense.gguf"


def run(program: str, *arguments: object) -> str:
    """What the program prints; it has to end well."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_closed_context_refuses_every_call(tiny: Path) -> None:
    program = """
        import sys
        from knapspec_edge.native import open_context, open_model
        from knapspec_edge.records import Sampling

        model = open_model(sys.argv[1])
        context = open_context(model, ctx_tokens=256)
        context.prefill([1, 2, 3], Sampling())
        context.close()
        context.close()
        context.interrupt()
        for call in (
            lambda: context.truncate(1),
            lambda: context.truncate(0),
            lambda: context.prefill([1], Sampling()),
            lambda: context.decode(1, Sampling()),
            lambda: context.verify([1], Sampling()),
            lambda: context.evaluate([1]),
            lambda: context.logits(),
            lambda: context.graph_stats(),
        ):
            try:
                call()
            except ValueError as error:
                assert str(error) == "the context is closed", error
            else:
                raise AssertionError("a call on a closed context worked")
        print("refused")
    """
    assert run(program, tiny) == "refused\n"


def test_weights_live_as_long_as_a_context_needs_them(tiny: Path) -> None:
    program = """
        import sys
        from knapspec_edge.native import open_context, open_model
        from knapspec_edge.records import Sampling

        model = open_model(sys.argv[1])
        first, second = (open_context(model, ctx_tokens=256) for _ in range(2))
        before = first.prefill([1, 2, 3], Sampling())
        model.close()
        assert second.prefill([1, 2, 3], Sampling()) == before
        first.close()
        assert second.decode(4, Sampling()).token >= 0
        assert model._pointer
        second.close()
        assert not model._pointer
        for call in (
            lambda: model.tokenize("text", parse_special=False),
            lambda: model.token_bytes(1),
            lambda: model.is_end(1),
            lambda: model.bos_token,
            lambda: model.add_bos,
            lambda: model.n_layer,
            lambda: open_context(model, ctx_tokens=256),
        ):
            try:
                call()
            except ValueError as error:
                assert str(error) == "the model is closed", error
            else:
                raise AssertionError("a call on a closed model worked")
        print("refused")
    """
    assert run(program, tiny) == "refused\n"


def test_the_garbage_collector_may_finalize_in_any_order(tiny: Path) -> None:
    for model_first in (True, False):
        model = open_model(tiny)
        context = open_context(model, ctx_tokens=256)
        context.prefill(TOKENS, GREEDY)
        context.model = None  # type: ignore[assignment]
        cycle: list[object] = [model, context] if model_first else [context, model]
        cycle.append(cycle)
        context.model = model
        del model, context, cycle
        gc.collect()


@pytest.mark.parametrize("name", ["mamba-dense", "jamba-dense", "lfm2-dense"])
def test_an_interrupted_pass_of_a_recurrent_model_leaves_no_state_ahead(
    tiny_models: Path, patched_library: Path, name: str
) -> None:
    """The pass may have been computed when the interruption is noticed."""
    with (
        open_model(tiny_models / f"{name}.gguf") as model,
        open_context(model, ctx_tokens=256) as context,
    ):
        prefilled = context.prefill(TOKENS, GREEDY)
        expected = context.decode(7, GREEDY)
        context._empty()
        assert context.prefill(TOKENS, GREEDY) == prefilled
        evaluate = context._lib.knapspec_eval

        def interrupted(*arguments: Any) -> int:
            assert evaluate(*arguments) == 0
            return 2  # KNAPSPEC_ABORTED

        class Library:
            def __getattr__(self, name: str) -> Any:
                return interrupted if name == "knapspec_eval" else getattr(context_lib, name)

        context_lib = context._lib
        context._lib = Library()
        with pytest.raises(Interrupted):
            context.decode(7, GREEDY)
        context._lib = context_lib
        # emptied, or still what it was; either way it goes on rightly
        assert context.n_past in (0, len(TOKENS))
        last = context._llama.llama_memory_seq_pos_max(context._memory, 0)
        assert last == context.n_past - 1
        if not context.n_past:
            context.prefill(TOKENS, GREEDY)
        assert context.decode(7, GREEDY) == expected


def test_a_second_thread_is_refused_while_one_computes(tiny: Path) -> None:
    program = """
        import sys, threading
        from knapspec_edge.errors import UsageError
        from knapspec_edge.native import open_context, open_model
        from knapspec_edge.records import Plan, Sampling

        with open_model(sys.argv[1]) as model, open_context(model, ctx_tokens=4096) as context:
            plan = Plan.skipping(len(context.sublayers), [1])
            failures = []

            def work():
                for _ in range(60):
                    try:
                        context.evaluate([1] * 40)
                        context.decode(3, Sampling(), plan)
                        context.truncate(0)
                    except (UsageError, ValueError) as error:
                        failures.append(str(error))

            threads = [threading.Thread(target=work) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            # ValueError: another thread had cut the cache in between
            assert all("another thread" in f or "cannot cut" in f for f in failures), failures
            context.truncate(0)
            context.prefill([1, 2, 3], Sampling())
            print("alive")
    """
    assert run(program, tiny) == "alive\n"


def test_close_ends_a_computation_in_another_thread(tiny: Path) -> None:
    program = """
        import sys, threading, time
        from knapspec_edge.errors import Interrupted
        from knapspec_edge.native import open_context, open_model
        from knapspec_edge.records import Sampling

        with open_model(sys.argv[1]) as model:
            context = open_context(model, ctx_tokens=16384)
            ends = []

            def work():
                try:
                    while True:
                        context.prefill([i % 100 for i in range(8000)], Sampling())
                        context.truncate(0)
                except (Interrupted, ValueError) as error:
                    ends.append(str(error))

            thread = threading.Thread(target=work)
            thread.start()
            time.sleep(0.3)
            context.close()
            thread.join()
            assert ends in (["interrupted"], ["the context is closed"]), ends
            print("ended")
    """
    assert run(program, tiny) == "ended\n"


@pytest.fixture
def contexts(tiny: Path) -> Iterator[tuple[Any, Any]]:
    with (
        open_model(tiny) as model,
        open_context(model, ctx_tokens=256) as first,
        open_context(model, ctx_tokens=256) as second,
    ):
        yield first, second


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(100):  # Python runs its handler between two of these
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
@pytest.mark.parametrize("same", [True, False])
def test_guards_may_be_nested(contexts: tuple[Any, Any], same: bool) -> None:
    outer = contexts[0]
    inner = outer if same else contexts[1]
    assert threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    with outer.interruptible():
        for _ in range(2):  # also after an inner guard has ended
            with inner.interruptible():
                press()
                with pytest.raises(Interrupted):
                    inner.decode(1, GREEDY)
                inner.decode(1, GREEDY)
            press()
            with pytest.raises(Interrupted):
                outer.decode(1, GREEDY)
            outer.decode(1, GREEDY)
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        press()


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_only_presses_that_nobody_noticed_add_up(contexts: tuple[Any, Any]) -> None:
    context = contexts[0]
    with context.interruptible():
        for _ in range(3):
            press()
            with pytest.raises(Interrupted):
                context.decode(1, GREEDY)
        press()
        with pytest.raises(KeyboardInterrupt):
            press()


def test_a_busy_context_says_so(contexts: tuple[Any, Any]) -> None:
    context = contexts[0]
    context.prefill(TOKENS, GREEDY)
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with context._alone():
            held.set()
            let_go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    try:
        for call in (
            lambda: context.decode(1, GREEDY),
            lambda: context.truncate(0),
            lambda: context.logits(),
        ):
            with pytest.raises(UsageError, match="another thread is computing"):
                call()
    finally:
        let_go.set()
        thread.join()
    assert context.n_past == len(TOKENS)
    context.decode(1, GREEDY)
