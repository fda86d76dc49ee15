"""One engine, several threads, forks, forgotten engines: one typed error each, never a crash.

Each program runs in a process of its own, so that a crash or a hang fails one test.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .test_lifetime import run

BEGIN = """
import os, sys, threading, time
from knapspec_edge import BusyError, ClosedError, Engine, Interrupted, Settings

PROMPT = [1, 2, 3]
LONG = Settings(max_tokens=4000)

def open_engine():
    return Engine.open(sys.argv[1], spec="off", ctx=8192, threads=1)

def in_thread(work):
    results = []
    def body():
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)
    thread = threading.Thread(target=body)
    thread.start()
    thread.results = results
    return thread

def result(thread):
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    (found,) = thread.results
    return found

def begin_long(engine):
    "An answer that another thread is reading; it and the thread once three tokens are there."
    found, started = [], threading.Event()
    def work():
        answer = engine.generate(PROMPT, LONG)
        found.append(answer)
        n = 0
        for event in answer:
            n += 1
            if n == 3:
                started.set()
        return n
    thread = in_thread(work)
    assert started.wait(60)
    return found[0], thread
"""


def program(tiny_models: Path, body: str) -> str:
    import textwrap

    return run(BEGIN + textwrap.dedent(body), tiny_models / "llama-dense.gguf")


def test_a_second_thread_is_told_at_once_and_harms_nothing(
    tiny_models: Path, patched_library: Path
) -> None:
    body = """
        with open_engine() as engine:
            expected = [e.token.token for e in engine.generate(PROMPT, Settings(max_tokens=600))]
            answer, thread = begin_long(engine)
            for call in (
                lambda: engine.generate([5, 6]),
                lambda: engine.set_speculation("off"),
                lambda: engine.plan(100),
                lambda: engine.profile(1.0),
            ):
                try:
                    call()
                except BusyError as error:
                    assert "\\n" not in str(error)
                else:
                    raise AssertionError("two threads at once")
                assert thread.is_alive()  # at once: the other one goes on
            assert result(thread) >= 600
            assert answer.token_ids[:600] == expected
            # read to its end: the next thread may begin
            assert len(list(engine.generate(PROMPT, Settings(max_tokens=5)))) == 5
            print("told")
    """
    assert program(tiny_models, body) == "told\n"


def test_many_threads_at_once_give_whole_answers_or_errors(
    tiny_models: Path, patched_library: Path
) -> None:
    body = """
        with open_engine() as engine:
            expected = [e.token.token for e in engine.generate(PROMPT, Settings(max_tokens=40))]
            def work():
                whole = busy = 0
                for _ in range(30):
                    try:
                        with engine.generate(PROMPT, Settings(max_tokens=40)) as answer:
                            for _ in answer:
                                pass
                        assert answer.token_ids == expected, answer.token_ids
                        whole += 1
                    except BusyError:
                        busy += 1
                        time.sleep(0.002)
                return whole, busy
            found = [result(t) for t in [in_thread(work) for _ in range(4)]]
            assert all(isinstance(f, tuple) for f in found), found
            assert sum(f[0] for f in found) > 0
            print("whole")
    """
    assert program(tiny_models, body) == "whole\n"


def test_interrupt_from_another_thread(tiny_models: Path, patched_library: Path) -> None:
    body = """
        with open_engine() as engine:
            engine.interrupt()  # nothing to end: no effect on what comes
            answer, thread = begin_long(engine)
            engine.interrupt()
            ended = result(thread)
            assert isinstance(ended, Interrupted), ended
            assert answer.finish_reason == "interrupted" and len(answer.tokens) >= 3
            assert answer.ended and list(answer) == []
            engine.interrupt()
            again = engine.generate(PROMPT, Settings(max_tokens=5))
            assert len(list(again)) == 5 and again.finish_reason == "length"
            # between two tokens: the next one is not computed
            half = engine.generate(PROMPT, LONG)
            next(half)
            engine.interrupt()
            try:
                for _ in half:
                    pass
            except Interrupted:
                print("interrupted", len(half.tokens) < 5)
            # taken back with the answer that it was meant for
            half = engine.generate(PROMPT, LONG)
            next(half)
            engine.interrupt()
            half.close()
            assert len(list(engine.generate(PROMPT, Settings(max_tokens=5)))) == 5
    """
    assert program(tiny_models, body) == "interrupted True\n"


def test_interrupt_ends_an_answer_that_nobody_reads(
    tiny_models: Path, patched_library: Path
) -> None:
    body = """
        with open_engine() as engine:
            begun, leave = threading.Event(), threading.Event()
            left = []
            def begin():
                left.append(engine.generate(PROMPT, LONG))
                next(left[0])
                begun.set()
                assert leave.wait(60)
                return next(left[0], None)
            thread = in_thread(begin)
            assert begun.wait(60)
            try:
                engine.generate(PROMPT)
            except BusyError as error:
                assert "interrupt() it" in str(error)
            engine.interrupt()
            again = engine.generate(PROMPT, Settings(max_tokens=5))
            assert len(list(again)) == 5 and again.finish_reason == "length"
            leave.set()
            ended = result(thread)
            assert isinstance(ended, Interrupted), ended
            print(left[0].finish_reason, ended)
    """
    assert program(tiny_models, body) == "interrupted interrupted\n"


def test_a_closed_engine_does_not_enter_a_block(tiny_models: Path, patched_library: Path) -> None:
    body = """
        engine = open_engine()
        engine.close()
        try:
            with engine:
                print("inside")
        except ClosedError as error:
            print(error)
    """
    assert program(tiny_models, body) == "the engine is closed; open the model again\n"


def test_close_during_an_answer_ends_it(tiny_models: Path, patched_library: Path) -> None:
    body = """
        engine = open_engine()
        answer, thread = begin_long(engine)
        engine.close()
        ended = result(thread)
        assert isinstance(ended, Interrupted), ended
        assert answer.finish_reason == "interrupted" and len(answer.tokens) >= 3
        engine.close()
        assert engine.closed
        for call in (
            lambda: engine.generate(PROMPT),
            lambda: engine.chat([{"role": "user", "content": "x"}]),
            lambda: engine.plan(100),
            lambda: engine.profile(1.0),
            lambda: engine.set_speculation("off"),
        ):
            try:
                call()
            except ClosedError as error:
                assert str(error) == "the engine is closed; open the model again", error
            else:
                raise AssertionError("a call on a closed engine worked")
        # an answer that was between two tokens says so, too
        engine = open_engine()
        answer = engine.generate(PROMPT, LONG)
        next(answer)
        engine.close()
        answer.close()
        try:
            next(answer)
        except Interrupted as error:
            print(error)
    """
    assert program(tiny_models, body) == "the engine was closed\n"


def test_close_from_several_threads(tiny_models: Path, patched_library: Path) -> None:
    body = """
        for _ in range(5):
            engine = open_engine()
            answer, thread = begin_long(engine)
            closing = [in_thread(engine.close) for _ in range(3)]
            assert [result(t) for t in closing] == [None] * 3
            assert isinstance(result(thread), Interrupted)
        print("closed")
    """
    assert program(tiny_models, body) == "closed\n"


def test_an_abandoned_answer(tiny_models: Path, patched_library: Path) -> None:
    """Of a thread that ended, it gives way; of a living one, it has to be closed."""
    body = """
        with open_engine() as engine:
            def abandon():
                answer = engine.generate(PROMPT, LONG)
                next(answer)
                return answer
            left = result(in_thread(abandon))
            assert len(list(engine.generate(PROMPT, Settings(max_tokens=5)))) == 5
            assert left.ended and list(left) == []

            let_go = threading.Event()
            kept = []
            def keep():
                kept.append(abandon())
                let_go.wait(60)
            thread = in_thread(keep)
            while not kept:
                time.sleep(0.01)
            try:
                engine.generate(PROMPT)
            except BusyError as error:
                assert "neither read to its end nor closed" in str(error), error
            else:
                raise AssertionError("its reader would have lost it silently")
            kept[0].close()
            assert len(list(engine.generate(PROMPT, Settings(max_tokens=5)))) == 5
            let_go.set()
            result(thread)
            # another thread may go on reading
            handed = result(in_thread(abandon))
            assert len(handed.tokens) == 1
            next(handed)
            assert len(handed.tokens) == 2
            print("given way")
    """
    assert program(tiny_models, body) == "given way\n"


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_is_told_and_ends_well(tiny_models: Path, patched_library: Path) -> None:
    body = """
        import gc, multiprocessing, warnings
        warnings.simplefilter("ignore")
        with open_engine() as engine:
            answer = engine.generate(PROMPT, LONG)
            next(answer)

            def child(queue):
                global engine, answer
                for call in (
                    lambda: next(answer),
                    lambda: engine.generate(PROMPT),
                    lambda: engine.backend.evaluate([1]),
                ):
                    try:
                        call()
                    except ClosedError as error:
                        queue.put("in another process" in str(error))
                    except BaseException as error:
                        queue.put(repr(error))
                engine.interrupt()
                answer.close()
                engine.close()
                del engine, answer
                gc.collect()
                queue.put("ended")

            context = multiprocessing.get_context("fork")
            queue = context.Queue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            said = [queue.get(timeout=60) for _ in range(4)]
            process.join(60)
            assert process.exitcode == 0, process.exitcode
            assert said == [True, True, True, "ended"], said
            # an ordinary exit, finalizers and all
            pid = os.fork()
            if pid == 0:
                del engine, answer
                gc.collect()
                sys.exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            # the parent goes on
            next(answer)
            answer.close()
            assert len(list(engine.generate(PROMPT, Settings(max_tokens=5)))) == 5
            print("forked")
    """
    assert program(tiny_models, body) == "forked\n"


def test_a_forgotten_engine_is_closed_with_a_warning(
    tiny_models: Path, patched_library: Path
) -> None:
    body = """
        import gc, warnings
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine = open_engine()
            model = engine.vocabulary
            # the answer alone keeps its engine alive
            texts = list(open_engine().generate(PROMPT, Settings(max_tokens=5)))
            assert len(texts) == 5
            answer = engine.generate(PROMPT, LONG)
            next(answer)
            del engine
            gc.collect()
            next(answer)
            assert not model._closed
            del answer
            gc.collect()
            assert model._closed
            assert [w.category for w in caught] == [ResourceWarning] * 2, caught
            assert "unclosed <Engine" in str(caught[0].message)
            del caught[:]
            with open_engine():
                pass
            open_engine().close()
            gc.collect()
            assert not caught, caught
        print("closed")
    """
    assert program(tiny_models, body) == "closed\n"


def test_an_exit_with_an_answer_under_way_ends(tiny_models: Path, patched_library: Path) -> None:
    body = """
        engine = open_engine()
        answer = engine.generate(PROMPT, LONG)
        next(answer)
        print("end")
    """
    assert program(tiny_models, body) == "end\n"
