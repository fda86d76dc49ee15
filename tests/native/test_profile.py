"""The `profile` command's phases on tiny models, and what the loader makes of what they keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from knapspec_edge import native
from knapspec_edge.apps import profile
from knapspec_edge.apps.profile import Options
from knapspec_edge.config import Config
from knapspec_edge.engine import Engine, Settings
from knapspec_edge.errors import Interrupted, UsageError
from knapspec_edge.records import Sampling

TOKENS = [3 + (7 * i * i) % 90 for i in range(60)]


def test_what_is_kept_is_used_and_changes_no_logits(
    patched_library: Path, tiny_models: Path, user_cache: Path
) -> None:
    model = tiny_models / "llama-dense.gguf"
    report = profile.run(model, Options(ctx=250, budget_seconds=2.0))
    assert {r.flash_attn for r in report.results} == {"on", "off"}
    assert report.warnings == ()
    assert [p for r in report.results for p in r.best_for if p == "plain"] == ["plain"]
    assert report.fidelity.runs >= 1
    best = next(r for r in report.results if "plain" in r.best_for)
    with Engine.open(model, ctx=250, spec="off") as engine:
        used = engine.backend.settings  # type: ignore[attr-defined]
        assert (used["flash_attn"], used["threads"], used["threads_batch"]) == (
            best.flash_attn, best.threads, best.threads_batch,
        )  # fmt: skip
        assert engine.settings_reason is not None
        backend = engine.backend

        def logits() -> list[float]:
            backend.prefill(TOKENS, Sampling())
            found = backend.logits().tolist()
            backend.truncate(0)
            return list(found)

        before, settings = logits(), dict(used)
        engine.profile(0.5)
        assert logits() == before, "cells that were only marked as filled, or another setting"
        assert engine.backend.settings == settings  # type: ignore[attr-defined]


def test_a_number_of_threads_that_was_asked_for_is_no_default(
    patched_library: Path, tiny_models: Path, user_cache: Path
) -> None:
    model = tiny_models / "llama-dense.gguf"
    report = profile.run(model, Options(ctx=100, budget_seconds=1.0, threads=3))
    assert {(r.threads, r.threads_batch) for r in report.results} == {(3, 3)}
    assert report.threads_ms == {}
    with Engine.open(model, ctx=100, spec="off") as engine:
        assert engine.settings_reason is None
    with Engine.open(model, ctx=100, spec="off", threads=3) as engine:
        assert engine.settings_reason is not None


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("llama-moe.gguf", {"attention", "mlp"}),
        ("gemma3-dense.gguf", {"attention", "mlp"}),  # sliding windows
        ("phi2-dense.gguf", {"block"}),  # parallel residuals
        ("gpt2-dense.gguf", {"attention", "mlp"}),  # learned positions
    ],
)
def test_architectures(
    patched_library: Path, tiny_models: Path, user_cache: Path, name: str, kinds: set[str]
) -> None:
    report = profile.run(tiny_models / name, Options(ctx=256, budget_seconds=2.0))
    assert report.results
    assert {c.kind.value for c in report.results[0].profile.classes} == kinds
    counted = {c.index for c in report.fidelity.counts}
    assert counted <= set(range(len(report.sublayers)))
    assert counted
    moe = any(c.n_experts for c in report.results[0].profile.classes)
    assert moe == ("moe" in name)


@pytest.mark.parametrize("ctx", [1, 4, 15])
@pytest.mark.parametrize("budget", [None, 1.0])
def test_a_context_that_is_too_small_is_one_line(
    patched_library: Path, tiny_models: Path, user_cache: Path, ctx: int, budget: float | None
) -> None:
    line = rf"^--ctx is {ctx}; measuring takes at least 16 tokens$"
    with pytest.raises(UsageError, match=line):
        profile.run(
            tiny_models / "llama-dense.gguf",
            Options(ctx=ctx, budget_seconds=budget, flash_attn="off"),
        )


def test_interrupted_what_there_is_is_kept(
    patched_library: Path, tiny_models: Path, user_cache: Path
) -> None:
    model = tiny_models / "llama-dense.gguf"

    def stop(stage: str, share: float | None) -> None:
        if stage == "fidelity":
            raise Interrupted("interrupted")

    report = profile.run(model, Options(ctx=100, budget_seconds=1.0), stop)
    assert report.interrupted
    assert len(report.results) == 2
    kept = [json.loads(file.read_text()) for file in user_cache.glob("measurements/*.json")]
    assert sum("profile" in record["content"] for record in kept) == 2
    with Engine.open(model, ctx=100, spec="off") as engine:
        assert engine.settings_reason is None, "settings were not compared to the end"
        assert engine.generate(TOKENS, Settings(max_tokens=2))

    def at_once(stage: str, share: float | None) -> None:
        if stage == "profile":
            raise Interrupted("interrupted")

    with pytest.raises(Interrupted):
        profile.run(model, Options(ctx=100, budget_seconds=1.0), at_once)


def test_settings_compared_at_once_share_the_memory_of_one(
    patched_library: Path,
    tiny_models: Path,
    user_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[int] = []
    original = native.open_context

    def open_context(model: Any, **settings: Any) -> Any:
        opened.append(settings["ctx_tokens"])
        return original(model, **settings)

    monkeypatch.setattr(native, "open_context", open_context)
    monkeypatch.setattr(profile._Run, "_tokens_that_fit", lambda *_: 4000)
    small = Config(expected_context_tokens=100)
    options = Options(ctx=4000, budget_seconds=2.0)
    report = profile.run(tiny_models / "llama-dense.gguf", options, config=small)
    assert len(report.results) == 2
    assert opened == [4000, 4000, 2000, 2000, 4000], "profiles, the comparison, fidelity"
