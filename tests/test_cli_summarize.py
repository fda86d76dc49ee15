"""`summarize` on the command line: records, resuming, exit codes, streams (cases 65 to 67)."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_vocabulary import FakeVocabulary
from fakes import interrupted
from scripted import fake_of, scripted_engine
from scripted_cli import MODEL_INFO

import knapspec_edge.engine
from knapspec_edge import cli_summarize, gguf_check, models
from knapspec_edge.apps import jsonl, memory, summarize_job
from knapspec_edge.apps.summarize_prompts import STYLES, Request
from knapspec_edge.cli import cli
from knapspec_edge.engine import Engine, Settings
from knapspec_edge.text.documents import Document

HERE = Path(__file__).parent
DEMO = models.default_model().name


def gist(question: str) -> str:
    """An answer that says which text it is about."""
    names = re.findall(r"\[\w+\]", question)
    return f"About {' '.join(dict.fromkeys(names))}." if names else "About nothing."


class Opened:
    """Stands in for Engine.open; keeps the engines that it made."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.engines: list[Engine] = []
        self.reply: Callable[[str], str] = gist
        self.prepare: Callable[[Engine], None] = lambda engine: None
        self.vocabulary: FakeVocabulary | None = None

    def __call__(self, path: Path, **options: Any) -> Engine:
        self.calls.append({"path": path, **options})
        engine = scripted_engine(self.reply, n_ctx=options["ctx"], vocabulary=self.vocabulary)
        if options["needs_template"]:
            engine.require_template()
        engine.set_speculation(options["spec"])
        self.prepare(engine)
        self.engines.append(engine)
        return engine


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Opened:
    fake = Opened()
    monkeypatch.setattr(knapspec_edge.engine.Engine, "open", fake)
    monkeypatch.setattr(models, "obtain", lambda name, **_: Path(f"obtained-{name}"))
    monkeypatch.setattr(gguf_check, "inspect", lambda path: MODEL_INFO)
    monkeypatch.setattr(gguf_check, "fingerprint", lambda info: "fingerprint")
    monkeypatch.setattr(summarize_job, "tokens_that_fit", lambda *_, **__: 0)
    monkeypatch.setenv("KNAPSPEC_EDGE_SPEC", "off")
    monkeypatch.chdir(tmp_path)
    return fake


def write(*names: str) -> None:
    for name in names:
        Path(name).write_text(f"A hare [{Path(name).stem}] hid.\n", encoding="utf-8")


def invoke(*arguments: str, pipe: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli, ["summarize", *arguments], input=pipe)


def records(path: str | Path = "out.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def by_input(path: str | Path = "out.jsonl") -> dict[str, dict[str, Any]]:
    found = records(path)
    assert len({record["input"] for record in found}) == len(found)
    return {record["input"]: record for record in found}


def error_line(result: Result) -> str:
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("knapspec-edge: error: ")
    return result.stderr


# -- records and streams


def test_records_on_standard_output_and_nothing_else(opened: Opened) -> None:
    write("a.txt", "b.txt")
    result = invoke("a.txt", "b.txt")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(r["input"], r["summary"]) for r in found] == [
        ("a.txt", "About [a]."),
        ("b.txt", "About [b]."),
    ]
    first = found[0]
    assert list(first)[0] == "input"
    assert first["error"] is None
    assert first["kind"] == "text"
    assert re.fullmatch("[0-9a-f]{64}", first["sha256"])
    assert first["tokens"]["completion"] > 0
    assert first["timings"]["total_ms"] > 0
    assert first["speculation"]["state"] == "off"
    assert first["speculation"]["drafted"] == first["speculation"]["accepted"] == 0
    assert first["settings"]["model"] == "fingerprint"
    assert first["settings"]["style"] == "paragraph"


def test_verbose_says_what_was_done_and_quiet_nothing(opened: Opened) -> None:
    write("a.txt")
    result = invoke("a.txt", "-o", "out.jsonl", "--verbose")
    assert result.stdout == ""
    said = result.stderr.splitlines()
    assert said[0].startswith("a.txt: ")
    assert "1 document summarized in" in said[-1]
    assert "speculation off: --spec off" in said[-1]
    Path("out.jsonl").unlink()
    write("b.txt")
    result = invoke("a.txt", "missing.txt", "-o", "out.jsonl", "--quiet")
    assert (result.stdout, result.stderr, result.exit_code) == ("", "", 1)


def test_standard_input_is_a_document(opened: Opened) -> None:
    for arguments in ((), ("-",), ("model.gguf",), ("model.gguf", "-")):
        result = invoke(*arguments, pipe="A hare [pipe] hid.\n")
        assert result.exit_code == 0, result.stderr
        (found,) = [json.loads(line) for line in result.stdout.splitlines()]
        assert found["input"] == "-"
        assert found["summary"] == "About [pipe]."
    assert [call["path"].name for call in opened.calls] == [
        f"obtained-{DEMO}",
        f"obtained-{DEMO}",
        "obtained-model.gguf",
        "obtained-model.gguf",
    ]


def test_the_first_argument_may_be_a_model(opened: Opened) -> None:
    write("a.txt", "demo")
    invoke("a.txt")
    invoke("M.GGUF", "a.txt")
    invoke("demo", "a.txt")
    invoke("./demo", "a.txt")
    assert [call["path"].name for call in opened.calls] == [
        f"obtained-{DEMO}",
        "obtained-M.GGUF",
        "obtained-demo",
        f"obtained-{DEMO}",
    ]


def test_a_folder_and_a_pattern(opened: Opened) -> None:
    Path("notes/deep").mkdir(parents=True)
    write("notes/a.txt", "notes/deep/b.md", "c.txt", "d.txt")
    result = invoke("notes", "?.txt", "-o", "out.jsonl")
    assert result.exit_code == 0, result.stderr
    assert [record["input"] for record in records()] == [
        "notes/a.txt",
        "notes/deep/b.md",
        "c.txt",
        "d.txt",
    ]


def test_options_reach_the_prompt(opened: Opened) -> None:
    asked: list[str] = []
    opened.reply = lambda question: asked.append(question) or "Good."  # type: ignore[func-returns-value]
    write("a.txt")
    Path("prompt.txt").write_text("\ufeffList the hares.\n", encoding="utf-8")
    invoke("a.txt", "--style", "bullets", "--words", "17", "--language", "Welsh")
    assert "list of short points" in asked[-1]
    assert "about 17 words" in asked[-1]
    assert asked[-1].endswith("Write in Welsh.")
    invoke("a.txt", "--prompt-file", "prompt.txt")
    assert asked[-1].startswith("List the hares.\n\nText:\n\nA hare")


def test_the_styles_of_the_command_are_those_that_exist() -> None:
    assert tuple(cli_summarize._STYLES) == tuple(STYLES)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_named_pipe_is_read_once(opened: Opened) -> None:
    os.mkfifo("pipe")
    for _ in range(2):
        writer = threading.Thread(target=Path("pipe").write_text, args=("A hare [fifo].",))
        writer.start()
        result = invoke("pipe", "-o", "out.jsonl")
        writer.join(timeout=60)
        assert result.exit_code == 0, result.stderr
    (found,) = records()
    assert found["summary"] == "About [fifo]."
    assert fake_of(opened.engines[1]).calls("prefill") == []  # known by its contents


def test_own_encoding(opened: Opened) -> None:
    Path("a.txt").write_bytes("A hare [h\u00e4schen] hid.".encode("cp437"))
    result = invoke("a.txt", "--encoding", "cp437")
    assert json.loads(result.stdout)["summary"] == "About [h\u00e4schen]."
    assert "no encoding klingon" in error_line(invoke("a.txt", "--encoding", "klingon"))


# -- context


def test_the_context_follows_the_longest_document(opened: Opened) -> None:
    write("short.txt")
    Path("long.txt").write_text("hare " * 1500, encoding="utf-8")
    invoke("short.txt")
    invoke("short.txt", "long.txt")
    invoke("short.txt", "--ctx", "777")
    short, long, asked = [call["ctx"] for call in opened.calls]
    assert short < 2048 < long <= 8192
    assert asked == 777
    assert [call["expected_tokens"] <= call["ctx"] for call in opened.calls] == [True] * 3
    assert opened.calls[0]["expected_tokens"] < opened.calls[1]["expected_tokens"]


@pytest.mark.parametrize(
    ("trained", "fits", "at_most"),
    [(0, 0, 8192), (2048, 0, 2048), (131072, 0, 8192), (0, 3000, 3000)],
)
def test_the_context_that_nobody_asked_for_has_limits(
    monkeypatch: pytest.MonkeyPatch, trained: int, fits: int, at_most: int
) -> None:
    from dataclasses import replace

    monkeypatch.setattr(summarize_job, "tokens_that_fit", lambda *_, **__: fits)
    info = replace(MODEL_INFO, context_length=trained)
    assert summarize_job.choose_context(10**8, Request(), info) == at_most
    assert summarize_job.choose_context(100, Request(), info) < 2048


def test_memory_for_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    from knapspec_edge.native import library

    gib = 1 << 30
    ram = {"type": "CPU", "total_bytes": 16 * gib, "free_bytes": 10 * gib}
    gpu = {"type": "GPU", "total_bytes": 8 * gib, "free_bytes": 6 * gib}
    monkeypatch.setattr(library, "devices", lambda: [ram, gpu])
    shape = {
        "llama.block_count": "32",
        "llama.attention.head_count": "32",
        "llama.attention.head_count_kv": "8",
        "llama.embedding_length": "4096",
    }
    token_bytes = 128 << 10
    on_cpu = memory.tokens_that_fit(shape, "llama", "f16", on_gpu=False)
    assert on_cpu == pytest.approx(4 * gib / token_bytes, rel=0.01)  # a quarter of all
    on_gpu = memory.tokens_that_fit(shape, "llama", "f16", on_gpu=True)
    assert on_gpu == pytest.approx(2 * gib / token_bytes, rel=0.01)
    loaded = memory.tokens_that_fit(shape, "llama", "f16", on_gpu=True, weight_bytes=5 * gib)
    assert loaded == pytest.approx(0.5 * gib / token_bytes, rel=0.01)  # half of what is left


def test_case_67_a_document_longer_than_the_context(opened: Opened) -> None:
    text = "\n\n".join(f"The hare [h{n}] hid behind the inn for a long time." for n in range(60))
    Path("long.txt").write_text(text, encoding="utf-8")
    result = invoke("long.txt", "--ctx", "1000", "--words", "20", "--system", "You are brief.")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["tokens"]["chunks"] > 3
    assert found["tokens"]["depth"] >= 1
    assert found["tokens"]["document"] > 1000
    summary = re.findall(r"\[h(\d+)\]", found["summary"])
    assert summary[0] == "0"  # what was at the start
    (engine,) = opened.engines
    fake_of(engine).check_ledger()
    small = invoke("long.txt", "--ctx", "200")
    assert small.exit_code == 1
    assert "raise --ctx" in error_line(small)


# -- failures of single documents


def test_case_65_the_second_of_three_cannot_be_read(opened: Opened) -> None:
    write("one.txt", "three.txt")
    Path("two.txt").write_bytes(bytes(range(256)) * 8)
    result = invoke("one.txt", "two.txt", "three.txt", "-o", "out.jsonl")
    assert result.exit_code == 1
    found = by_input()
    assert list(found) == ["one.txt", "two.txt", "three.txt"]
    assert found["one.txt"]["summary"] == "About [one]."
    assert found["three.txt"]["summary"] == "About [three]."
    assert found["two.txt"]["summary"] is None
    assert "two.txt" in found["two.txt"]["error"]
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("knapspec-edge: warning: two.txt ")


@pytest.mark.parametrize("what", ["empty", "blank", "binary", "missing", "unreadable"])
def test_inputs_that_fail_have_a_record(opened: Opened, what: str) -> None:
    write("good.txt")
    bad = Path("bad.txt")
    if what == "empty":
        bad.touch()
    elif what == "blank":
        bad.write_text(" \n\n", encoding="utf-8")
    elif what == "binary":
        bad.write_bytes(bytes(range(256)) * 8)
    elif what == "unreadable":
        if os.geteuid() == 0:
            pytest.skip("this user may read everything")
        write("bad.txt")
        bad.chmod(0)
    result = invoke("bad.txt", "good.txt", "-o", "out.jsonl")
    assert result.exit_code == 1
    found = by_input()
    assert found["good.txt"]["error"] is None
    assert found["bad.txt"]["error"]
    assert "\n" not in found["bad.txt"]["error"]
    assert found["bad.txt"]["settings"] == found["good.txt"]["settings"]
    assert list(found["bad.txt"]) == list(found["good.txt"])  # a table of them has no holes


def test_nothing_to_summarize_opens_no_model(opened: Opened) -> None:
    result = invoke("missing.txt", "-o", "out.jsonl")
    assert result.exit_code == 1
    assert opened.calls == []
    assert "missing.txt" in by_input()["missing.txt"]["error"]


def test_an_error_while_answering_is_one_documents(opened: Opened) -> None:
    write("a.txt", "b.txt", "c.txt")

    def prepare(engine: Engine) -> None:
        fake = fake_of(engine)

        def on_call(call: str) -> None:
            if len(fake.calls("prefill")) == 1 and not fake.fail_at:
                from knapspec_edge.errors import NativeError

                fake.fail_at[fake.n_computed + 2] = NativeError("the device is lost")

        fake.on_call = on_call

    opened.prepare = prepare
    result = invoke("a.txt", "b.txt", "c.txt", "-o", "out.jsonl")
    assert result.exit_code == 1
    found = by_input()
    assert [record["error"] for record in found.values()] == ["the device is lost", None, None]
    # the failed one is tried again, and its record gives way
    opened.prepare = lambda engine: None
    assert invoke("a.txt", "b.txt", "c.txt", "-o", "out.jsonl").exit_code == 0
    found = by_input()
    assert [found[name]["error"] for name in ("a.txt", "b.txt", "c.txt")] == [None] * 3


# -- requests that cannot be met: one line, no model opened


@pytest.mark.parametrize(
    ("arguments", "exit_code", "part"),
    [
        (["--words", "0", "a.txt"], 2, "--words"),
        (["--style", "haiku", "a.txt"], 2, "haiku"),
        (["--prompt-file", "none.txt", "a.txt"], 2, "cannot read none.txt"),
        (["--prompt-file", "empty.txt", "a.txt"], 2, "empty.txt is empty"),
        (["--prompt-file", "binary.bin", "a.txt"], 2, "binary.bin is not UTF-8 text"),
        (["--prompt-file", "nul.bin", "a.txt"], 2, "nul.bin is not text"),
        (["--encoding", "hex", "a.txt"], 2, "there is no encoding hex"),
        (["--encoding", "undefined", "a.txt"], 2, "there is no encoding undefined"),
        (["--prompt-file", "a.txt", "--style", "bullets", "a.txt"], 2, "exclude each other"),
        (["--min-p", "2", "a.txt"], 2, "min-p"),
        (["-o", "no/out.jsonl", "a.txt"], 2, "cannot write"),
        (["-o", "/dev/full", "a.txt"], 2, "it is not a file"),
        (["-o", "a.txt", "a.txt"], 2, "line 1 of a.txt is no record"),
    ],
)
def test_a_request_that_makes_no_sense_is_one_line(
    opened: Opened, arguments: list[str], exit_code: int, part: str
) -> None:
    write("a.txt")
    Path("empty.txt").touch()
    Path("binary.bin").write_bytes(b"\xff\xfe\xfd")
    Path("nul.bin").write_bytes(bytes(9))
    result = invoke(*arguments)
    assert result.exit_code == exit_code
    assert part in error_line(result)
    assert opened.calls == []
    assert Path("a.txt").read_text(encoding="utf-8") == "A hare [a] hid.\n"


def test_no_path_and_no_pipe_is_a_usage_error(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    from knapspec_edge import terminal

    monkeypatch.setattr(terminal, "is_terminal", lambda stream: True)
    result = CliRunner().invoke(cli, ["summarize", "model.gguf", "--quiet"])
    assert result.exit_code == 2
    assert "nothing to summarize" in result.stderr


def test_a_base_model_is_refused(opened: Opened) -> None:
    opened.vocabulary = FakeVocabulary()
    write("a.txt")
    result = invoke("a.txt", "-o", "out.jsonl")
    assert result.exit_code == 1
    assert "--template" in error_line(result)
    assert not Path("out.jsonl").exists()


# -- resuming


def test_finished_documents_are_skipped_and_no_model_is_opened(opened: Opened) -> None:
    write("a.txt", "b.txt")
    assert invoke("a.txt", "b.txt", "-o", "out.jsonl").exit_code == 0
    before = Path("out.jsonl").read_bytes()
    result = invoke("a.txt", "b.txt", "-o", "out.jsonl", "--verbose")
    assert result.exit_code == 0
    assert "2 finished before" in result.stderr
    assert len(opened.calls) == 1
    assert Path("out.jsonl").read_bytes() == before
    write("c.txt")
    assert invoke("a.txt", "b.txt", "c.txt", "-o", "out.jsonl").exit_code == 0
    assert list(by_input()) == ["a.txt", "b.txt", "c.txt"]
    assert fake_of(opened.engines[-1]).calls("prefill")


def test_a_changed_document_is_summarized_again_and_replaces_its_record(opened: Opened) -> None:
    write("a.txt", "b.txt")
    invoke("a.txt", "b.txt", "-o", "out.jsonl")
    Path("a.txt").write_text("A fox [fox] came.", encoding="utf-8")
    assert invoke("a.txt", "b.txt", "-o", "out.jsonl").exit_code == 0
    found = by_input()
    assert found["a.txt"]["summary"] == "About [fox]."
    assert len(found) == 2


def test_standard_input_is_known_again_by_its_contents(opened: Opened) -> None:
    for text in ("A hare [one].", "A hare [one].", "A hare [two]."):
        assert invoke("-", "-o", "out.jsonl", pipe=text).exit_code == 0
    (found,) = records()
    assert found["summary"] == "About [two]."
    assert [len(fake_of(e).calls("prefill")) > 0 for e in opened.engines] == [True, False, True]


@pytest.mark.parametrize(
    "other", [["--words", "9"], ["--style", "bullets"], ["--temp", "0.5", "--seed", "3"]]
)
def test_other_settings_add_records_and_keep_the_old_ones(opened: Opened, other: list[str]) -> None:
    write("a.txt", "b.txt")
    invoke("a.txt", "b.txt", "-o", "out.jsonl")
    before = Path("out.jsonl").read_bytes()
    result = invoke("a.txt", "b.txt", "-o", "out.jsonl", *other)
    assert result.exit_code == 0
    assert "made with another model or other settings; they stay" in result.stderr
    assert Path("out.jsonl").read_bytes().startswith(before)
    assert len(records()) == 4
    n_opened = len(opened.calls)
    again = invoke("a.txt", "b.txt", "-o", "out.jsonl", *other)
    assert (again.exit_code, again.stderr) == (0, "")
    assert len(opened.calls) == n_opened


def test_another_model_is_other_settings(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    write("a.txt")
    invoke("a.txt", "-o", "out.jsonl")
    monkeypatch.setattr(gguf_check, "fingerprint", lambda info: "another")
    assert "another model" in invoke("a.txt", "-o", "out.jsonl").stderr
    assert [record["settings"]["model"] for record in records()] == ["fingerprint", "another"]


def test_context_and_machine_are_not_settings(opened: Opened) -> None:
    write("a.txt")
    invoke("a.txt", "-o", "out.jsonl")
    invoke("a.txt", "-o", "out.jsonl", "--ctx", "1500", "--threads", "1", "--verbose")
    assert len(opened.calls) == len(records()) == 1


@pytest.mark.parametrize("other", [["--template", "chatml"], ["--encoding", "latin-1"]])
def test_how_the_text_is_read_and_put_are_settings(opened: Opened, other: list[str]) -> None:
    write("a.txt")
    assert invoke("a.txt", "-o", "out.jsonl").exit_code == 0
    for n in (2, 2):  # the second time it is known
        assert invoke("a.txt", "-o", "out.jsonl", *other).exit_code == 0
        assert len(records()) == n
    assert "template" not in records()[0]["settings"]
    assert "encoding" not in records()[0]["settings"]


def test_an_own_template_is_known_by_what_it_says(opened: Opened) -> None:
    write("a.txt")
    template = Path("t.jinja")
    for text, n in (("{{ messages }}", 1), ("{{ messages }}!", 2), ("{{ messages }}", 2)):
        template.write_text(text)
        assert invoke("a.txt", "-o", "out.jsonl", "--template", "t.jinja").exit_code == 0
        assert len(records()) == n


@pytest.mark.parametrize("inputs", [["."], ["*"], ["a.txt", "out.txt"]])
def test_the_output_is_no_input_of_the_next_run(opened: Opened, inputs: list[str]) -> None:
    write("a.txt")
    for _ in range(2):
        result = invoke(*inputs[:1], "-o", "out.txt")
        assert result.exit_code == 0, result.stderr
    result = invoke(*inputs, "-o", "out.txt", "-v")
    assert "out.txt, where the records go" in result.stderr
    assert list(by_input("out.txt")) == ["a.txt"]
    assert len(opened.engines) == 1


def test_nothing_but_the_output_is_nothing_to_summarize(opened: Opened) -> None:
    Path("out.txt").touch()
    result = invoke("out.txt", "-o", "out.txt")
    assert result.exit_code == 2
    assert "nothing to summarize: left out: out.txt" in error_line(result)


def test_a_torn_last_line_is_made_again(opened: Opened) -> None:
    write("a.txt", "b.txt")
    invoke("a.txt", "b.txt", "-o", "out.jsonl")
    whole = Path("out.jsonl").read_bytes()
    first = whole.index(b"\n") + 1
    for n in range(first + 1, len(whole) - 1, 97):
        Path("out.jsonl").write_bytes(whole[:n])
        result = invoke("a.txt", "b.txt", "-o", "out.jsonl")
        assert result.exit_code == 0
        assert "was cut off while it was being written" in result.stderr
        assert [r["summary"] for r in by_input().values()] == ["About [a].", "About [b]."]
    # a record that misses only its line end is finished
    Path("out.jsonl").write_bytes(whole[:-1])
    n_opened = len(opened.calls)
    assert invoke("a.txt", "b.txt", "-o", "out.jsonl").stderr == ""
    assert len(opened.calls) == n_opened
    assert Path("out.jsonl").read_bytes() == whole


def test_records_of_other_documents_stay(opened: Opened) -> None:
    write("a.txt", "b.txt")
    invoke("a.txt", "missing.txt", "-o", "out.jsonl")
    invoke("b.txt", "-o", "out.jsonl")
    assert set(by_input()) == {"a.txt", "missing.txt", "b.txt"}


@pytest.mark.parametrize(
    ("index", "kept"),
    [
        ([], set()),
        ([("a", "s"), ("b", "s")], {0, 1}),
        ([("a", None), ("a", "s")], {1}),  # a failure that was made good
        ([("a", "s"), ("a", None)], {0, 1}),  # an older version, and that it failed since
        ([("a", None), ("a", None)], {1}),
        ([("a", "s"), ("a", "s")], {1}),  # the document changed
        ([("a", "s"), ("a", "t")], {0, 1}),  # other settings
        ([("a", "s"), ("a", None), ("b", "s"), ("a", "s")], {2, 3}),
        ([("a", None), ("b", "s"), ("a", "t"), ("a", None)], {1, 2, 3}),
    ],
)
def test_which_records_stay(index: list[tuple[str, str | None]], kept: set[int]) -> None:
    assert summarize_job.kept(index) == kept


# -- interruption, full disks


@pytest.mark.parametrize("error", [interrupted(), KeyboardInterrupt()])
def test_case_66_an_interruption_keeps_what_is_finished(
    opened: Opened, error: BaseException
) -> None:
    write("a.txt", "b.txt", "c.txt")

    def prepare(engine: Engine) -> None:
        fake = fake_of(engine)

        def on_call(call: str) -> None:
            if Path("out.jsonl").exists() and len(records()) == 2 and not fake.fail_at:
                fake.fail_at[fake.n_computed + 1] = error

        fake.on_call = on_call

    opened.prepare = prepare
    result = invoke("a.txt", "b.txt", "c.txt", "-o", "out.jsonl", "--verbose")
    assert result.exit_code == 130
    assert "Traceback" not in result.stderr
    assert "interrupted, 1 left" in result.stderr
    assert list(by_input()) == ["a.txt", "b.txt"]
    opened.prepare = lambda engine: None
    assert invoke("a.txt", "b.txt", "c.txt", "-o", "out.jsonl").exit_code == 0
    assert list(by_input()) == ["a.txt", "b.txt", "c.txt"]


def test_only_computations_hold_ctrl_c_back(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long texts take seconds to be read and split, in Python, which has to end at once then."""
    from knapspec_edge.apps import summarize

    Path("a.txt").write_text("A hare [a] hid. " * 500, encoding="utf-8")
    guarded: list[bool] = []  # per use, whether it is over
    seen: dict[str, set[bool]] = {"read": set(), "split": set(), "answer": set()}

    @contextlib.contextmanager
    def interruptible() -> Iterator[None]:
        guarded.append(True)
        yield
        guarded.pop()

    def watched(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            seen[what].add(bool(guarded))
            return function(*arguments, **options)

        return call

    def prepare(engine: Engine) -> None:
        engine.backend.interruptible = interruptible  # type: ignore[attr-defined]
        engine.backend.decode = watched("answer", engine.backend.decode)  # type: ignore[method-assign]

    opened.prepare = prepare
    monkeypatch.setattr(summarize_job, "read", watched("read", summarize_job.read))
    monkeypatch.setattr(summarize, "split", watched("split", summarize.split))
    assert invoke("a.txt", "--ctx", "1000").exit_code == 0
    assert seen == {"read": {False}, "split": {False}, "answer": {True}}


def test_a_late_ctrl_c_is_not_lost(opened: Opened) -> None:
    write("a.txt", "b.txt")

    def prepare(engine: Engine) -> None:
        def check() -> None:
            raise interrupted()

        engine.backend.check_interrupted = check  # type: ignore[attr-defined]

    opened.prepare = prepare
    result = invoke("a.txt", "b.txt", "-v")
    assert result.exit_code == 130
    assert "interrupted, 2 left" in result.stderr


def test_interrupted_right_after_a_record_the_record_stays(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("a.txt")
    assert invoke("a.txt", "-o", "out.jsonl").exit_code == 0
    Path("a.txt").write_text("Another hare [b] hid.", encoding="utf-8")

    def pressed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(summarize_job.Outcome, "add", pressed)
    assert invoke("a.txt", "-o", "out.jsonl").exit_code == 130
    assert by_input()["a.txt"]["summary"] == "About [b]."


def test_a_full_disk_ends_it_with_one_line_and_a_rerun_goes_on(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("a.txt", "b.txt", "c.txt")
    real_write = os.write

    def full(number: int, data: Any) -> int:
        if Path("out.jsonl").exists() and len(records()) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(number, data)

    with monkeypatch.context() as patch:
        patch.setattr(jsonl.os, "write", full)
        result = invoke("a.txt", "b.txt", "c.txt", "-o", "out.jsonl")
    assert result.exit_code == 1
    line = error_line(result)
    assert "No space left on device; it holds 1 whole record" in line
    assert list(by_input()) == ["a.txt"]
    assert invoke("a.txt", "b.txt", "c.txt", "-o", "out.jsonl").exit_code == 0
    assert list(by_input()) == ["a.txt", "b.txt", "c.txt"]


# -- as a process of its own


def start(*arguments: str, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(HERE / "scripted_cli.py"), "summarize", *arguments],
        cwd=cwd,
        env={**os.environ, "KNAPSPEC_EDGE_SPEC": "off", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


def n_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_ended_in_the_middle_it_goes_on(tmp_path: Path, how: signal.Signals) -> None:
    names = [f"{n}.txt" for n in range(6)]
    for name in names:
        (tmp_path / name).write_text(f"A hare [{name[0]}] hid.", encoding="utf-8")
    out = tmp_path / "out.jsonl"
    with start(*names, "-o", "out.jsonl", cwd=tmp_path, SCRIPTED_STEP_SECONDS="0.002") as process:
        wait_for(lambda: n_lines(out) >= 2, process)
        process.send_signal(how)
        _, said = process.communicate(timeout=60)
    assert process.returncode == (130 if how is signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in said
    done = n_lines(out)
    assert 2 <= done < 6
    first = out.read_bytes()[: out.read_bytes().rindex(b"\n") + 1]
    with start(*names, "-o", "out.jsonl", cwd=tmp_path) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert out.read_bytes().startswith(first)  # nothing was done twice
    found = by_input(out)
    assert list(found) == names
    assert all(record["error"] is None for record in found.values())


def test_a_second_process_on_the_same_file_is_refused(tmp_path: Path) -> None:
    for n in range(6):
        (tmp_path / f"{n}.txt").write_text(f"A hare [{n}] hid.", encoding="utf-8")
    out = tmp_path / "out.jsonl"
    slow = {"SCRIPTED_STEP_SECONDS": "0.01"}
    with start("0.txt", "1.txt", "2.txt", "-o", "out.jsonl", cwd=tmp_path, **slow) as first:
        wait_for(lambda: n_lines(out) >= 1, first)
        with start("3.txt", "-o", "out.jsonl", cwd=tmp_path) as second:
            shown, said = second.communicate(timeout=60)
        first.kill()
        first.communicate(timeout=60)
    assert second.returncode == 2
    assert shown == ""
    assert "being written by another process" in said
    assert said.count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_standard_output_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A hare hid.", encoding="utf-8")
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [sys.executable, str(HERE / "scripted_cli.py"), "summarize", "a.txt"],
            cwd=tmp_path,
            env={**os.environ, "KNAPSPEC_EDGE_SPEC": "off"},
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "No space left on device" in result.stderr


def test_progress_at_a_terminal(tmp_path: Path) -> None:
    """Which document, which part, how many a minute, how long still; then one line of summary."""
    pexpect = pytest.importorskip("pexpect", reason="pseudo-terminals need a POSIX system")
    names = ["[red]a.txt", "b.txt"]
    for name in names:
        (tmp_path / name).write_text("A hare hid. " * 40, encoding="utf-8")
    process = pexpect.spawn(
        sys.executable,
        [
            str(HERE / "scripted_cli.py"),
            "summarize",
            *names,
            "missing",
            "--ctx",
            "800",
            "--words",
            "20",
        ]
        + ["-o", "out.jsonl"],
        cwd=str(tmp_path),
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONUTF8": "1",
            "TERM": "xterm",
            "COLUMNS": "120",
            "KNAPSPEC_EDGE_SPEC": "off",
            "SCRIPTED_STEP_SECONDS": "0.01",
        },
        encoding="utf-8",
        dimensions=(40, 120),
        timeout=60,
    )
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", process.read())
    process.close()
    assert process.exitstatus == 1
    assert "1 of 2 · [red]a.txt · part 1 of 2 " in shown
    assert re.search(r"2 of 2 · [\d.]+/min · b\.txt · .* left", shown)
    last = shown.rstrip().replace("\r", "\n").splitlines()[-1]
    assert "2 documents summarized in " in last
    assert "1 failed" in last
    assert not any("summarized" in line for line in shown.splitlines()[:-1])


# -- the seam: who makes the records does not matter


def test_records_in_any_order_from_work_that_reads_ahead(opened: Opened) -> None:
    from knapspec_edge.apps import summarize
    from knapspec_edge.text.documents import find

    names = ["a.txt", "b.txt", "c.txt", "d.txt"]
    write(*names)
    Path("b.txt").write_bytes(b"")
    engine = scripted_engine(gist, n_ctx=1500)
    request = Request(settings=Settings(max_tokens=60))

    def backwards(documents: Any) -> Any:
        waiting: list[Document] = list(documents)
        for document in reversed(waiting):
            yield summarize.record(engine, document, request)

    with jsonl.RecordFile(Path("out.jsonl"), summarize_job.FIRST_KEY) as output:
        settings = summarize_job.job_settings(request, "fingerprint")
        job = summarize_job.Job(find(names), settings, output)
        outcome = job.run(backwards)
        assert job.tidy()
    assert (outcome.n_done, outcome.n_failed) == (3, 1)
    assert list(by_input()) == ["b.txt", "d.txt", "c.txt", "a.txt"]
    assert by_input()["b.txt"]["error"] == "b.txt is empty"


def test_how_far_the_job_is(opened: Opened) -> None:
    now = [0.0]
    write("a.txt", "b.txt")
    Path("b.txt").write_text("hare " * 100, encoding="utf-8")
    from knapspec_edge.text.documents import find

    job = summarize_job.Job(find(["a.txt", "b.txt"]), {}, Nowhere(), clock=lambda: now[0])
    steps: list[summarize_job.Step] = []

    def work(documents: Any) -> Any:
        for document in documents:
            steps.append(job.step(document.name, 0.5, "half"))
            now[0] += 30.0
            yield {"input": document.name, "error": None, "summary": "x"}
        steps.append(job.step("b.txt", 0.0, "end"))

    job.run(work)
    assert [step.n_done for step in steps] == [0, 1, 2]
    assert [step.per_minute for step in steps] == [None, 2.0, 2.0]
    assert steps[0].share < 0.05 < 0.5 < steps[1].share < 0.6 < steps[2].share == 1.0
    assert all(step.n_total == 2 for step in steps)


class Nowhere:
    def append(self, record: dict[str, Any]) -> None:
        pass
