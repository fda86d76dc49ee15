"""The one open model of a process that serves jobs: turns, stopping, idling."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted import fake_of, scripted_engine
from scripted_cli import MODEL_INFO
from test_summarize import document

from knapspec_edge import gguf_check, models
from knapspec_edge.apps import summarize_worker
from knapspec_edge.apps.summarize_prompts import Request
from knapspec_edge.apps.summarize_worker import Order
from knapspec_edge.config import DEFAULTS
from knapspec_edge.engine import Engine
from knapspec_edge.errors import Interrupted, KnapspecError


class Opened:
    """Stands in for Engine.open."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self.options: list[dict[str, Any]] = []
        self.files: list[dict[str, str]] = []
        self.closed: list[Engine] = []
        self.interrupted: set[int] = set()  # ids of engines
        self.on_call: Callable[[Engine], None] = lambda engine: None

    def __call__(self, path: Path, **options: Any) -> Engine:
        engine = scripted_engine(lambda question: "Done.", n_ctx=options.pop("ctx"))
        self.options.append(options)
        self.files.append(
            {name: Path(value).read_text() for name, value in options.items() if "/" in str(value)}
        )
        self.engines.append(engine)

        def on_call(call: str) -> None:
            self.on_call(engine)
            if id(engine) in self.interrupted:
                raise Interrupted("interrupted")

        fake_of(engine).on_call = on_call
        engine.backend.interrupt = lambda: self.interrupted.add(id(engine))  # type: ignore
        close = engine.close

        def closing() -> None:
            self.closed.append(engine)
            close()

        engine.close = closing  # type: ignore[method-assign]
        return engine


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    fake = Opened()
    monkeypatch.setattr(Engine, "open", fake)
    monkeypatch.setattr(models, "obtain", lambda name, **_: Path(name))
    monkeypatch.setattr(gguf_check, "inspect", lambda path: MODEL_INFO)
    monkeypatch.setattr(gguf_check, "fingerprint", lambda info: "fingerprint")
    monkeypatch.setattr(summarize_worker, "_holder", summarize_worker._Holder())
    return fake


def order(token: str = "job", **more: Any) -> Order:
    options = {"ctx": 512, **more.pop("options", {})}
    return Order(
        token, summarize_worker.versions(), "m.gguf", Request(words=10), options=options, **more
    )


def make(job: Order, name: str = "a") -> dict[str, Any]:
    return summarize_worker.record(job, document("A hare hid.", name))


def test_calls_of_several_threads_take_turns_with_one_model(opened: Opened) -> None:
    busy: list[int] = []
    together: list[int] = []

    def on_call(engine: Engine) -> None:
        busy.append(threading.get_ident())
        time.sleep(0.002)
        together.append(len(set(busy)))
        busy.pop()

    opened.on_call = on_call
    records: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=lambda n=n: records.append(make(order(), f"d{n}")))
        for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(record["input"] for record in records) == ["d0", "d1", "d2"]
    assert {record["summary"] for record in records} == {"Done."}
    assert len(opened.engines) == 1
    assert max(together) == 1


def test_another_job_gets_a_model_of_its_own(opened: Opened) -> None:
    assert make(order("one"))["error"] is None
    assert make(order("two", options={"ctx": 400}))["tokens"]["context"] == 400
    assert [len(opened.engines), opened.closed] == [2, opened.engines[:1]]


def test_stopping_interrupts_what_runs_and_frees_the_model(opened: Opened) -> None:
    stopping: list[threading.Thread] = []

    def on_call(engine: Engine) -> None:
        if not stopping:
            stopping.append(threading.Thread(target=summarize_worker.stop, args=("job",)))
            stopping[0].start()
            stopping[0].join()  # it returns although the model is in use

    opened.on_call = on_call
    with pytest.raises(Interrupted):
        make(order())
    assert opened.closed == opened.engines
    with pytest.raises(Interrupted, match="stopped"):
        make(order())  # a document that arrives late
    assert len(opened.engines) == 1
    assert make(order("another"))["summary"] == "Done."


def test_stopping_an_idle_job_frees_its_model_and_no_other(opened: Opened) -> None:
    summarize_worker.prepare(order())
    summarize_worker.stop("another")
    assert opened.closed == []
    summarize_worker.stop("job")
    assert opened.closed == opened.engines


def test_a_model_that_nobody_asks_is_closed_and_opened_again(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a client that was killed tells nobody
    monkeypatch.setattr(
        summarize_worker, "DEFAULTS", type("D", (), {"summarize_idle_seconds": 0.05})
    )
    assert make(order())["error"] is None
    deadline = time.monotonic() + 30.0
    while not opened.closed:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert make(order())["error"] is None
    assert len(opened.engines) == 2


def test_other_versions_and_other_files_are_refused(opened: Opened) -> None:
    ours = summarize_worker.versions()
    assert summarize_worker.examine(order()) == "fingerprint"
    for name in ours:
        other = Order("job", {**ours, name: "other"}, "m.gguf", Request())
        for call in (summarize_worker.examine, summarize_worker.prepare):
            with pytest.raises(KnapspecError, match=f"{name} .* other here: install the same"):
                call(other)
    with pytest.raises(KnapspecError, match="not the file that the other workers have"):
        summarize_worker.prepare(order(fingerprint="other"))
    assert opened.engines == []


def test_files_of_the_client_are_there_while_the_model_is_opened(opened: Opened) -> None:
    summarize_worker.prepare(
        order(options={"spec": "/far/away/plan.json"}, files={"spec": b"the plan"})
    )
    assert opened.files == [{"spec": "the plan"}]
    assert opened.options[0]["spec"].endswith("plan.json")
    assert not Path(opened.options[0]["spec"]).exists()
    assert opened.options[0]["needs_template"] is True


def test_what_fits_no_document_is_said_when_the_model_is_opened(opened: Opened) -> None:
    with pytest.raises(KnapspecError, match="raise --ctx"):
        summarize_worker.prepare(order(options={"ctx": 64}))


def test_the_context_is_chosen_for_the_machine_that_computes(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    from knapspec_edge.apps import summarize_job

    monkeypatch.setattr(summarize_job, "tokens_that_fit", lambda *_, **__: 0)
    job = order(options={"kv_type": "f16", "gpu_layers": None})
    assert summarize_worker.context(job, 10) == summarize_worker.context(job, 20)
    monkeypatch.setattr(summarize_job, "tokens_that_fit", lambda *_, **__: 1024)
    assert summarize_worker.context(job, 10**6) == 1024 < DEFAULTS.summarize_ctx_tokens
