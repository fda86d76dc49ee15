"""Plans on the native backend: what a plan changes, and above all what it does not."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knapspec_edge.errors import (
    ContextError,
    Interrupted,
    ModelError,
    PlanError,
    RollbackError,
    UsageError,
)
from knapspec_edge.native import open_context, open_model
from knapspec_edge.records import SKIP, Kind, Plan, Sampling

from .oracle import STEPS, TOKENS, Worker

GREEDY = Sampling()


@pytest.fixture(params=["llama-dense", "gemma3-dense", "qwen3moe-moe", "phi2-dense"])
def tiny(request: pytest.FixtureRequest, tiny_models: Path) -> Path:
    return tiny_models / f"{request.param}.gguf"


@pytest.fixture
def backend(tiny: Path, patched_library: Path) -> Iterator[Any]:
    with open_model(tiny) as model, open_context(model, ctx_tokens=256) as context:
        yield context


@pytest.fixture
def fresh(tiny: Path, patched_library: Path) -> Callable[[Plan | None], np.ndarray]:
    """Logits of TOKENS decoded one by one under a plan in a context made for this alone."""

    def run(plan: Plan | None) -> np.ndarray:
        with open_model(tiny) as model, open_context(model, ctx_tokens=256) as context:
            return one_by_one(context, plan)

    return run


def one_by_one(context: Any, plan: Plan | None) -> np.ndarray:
    rows = []
    for token in TOKENS:
        context.decode(token, GREEDY, plan)
        rows.append(context.logits())
    context.truncate(0)
    return np.stack(rows)


def skip(context: Any, *indices: int) -> Plan:
    return Plan.skipping(len(context.sublayers), list(indices))


def test_every_layer_has_its_sublayers_in_order(backend: Any) -> None:
    layers = [s.layer for s in backend.sublayers]
    assert layers == sorted(layers)
    assert [s.index for s in backend.sublayers] == list(range(len(layers)))
    assert set(layers) == set(range(backend.model.n_layer))
    kinds = {s.kind for s in backend.sublayers}
    assert kinds in ({Kind.ATTENTION, Kind.MLP}, {Kind.BLOCK})
    assert backend.refusal is None


def test_an_all_full_plan_is_no_plan(backend: Any) -> None:
    full = one_by_one(backend, Plan.full(len(backend.sublayers)))
    assert np.array_equal(full, one_by_one(backend, None))


def test_a_plan_changes_the_logits_and_drops_nodes(backend: Any) -> None:
    plain = one_by_one(backend, None)
    nodes = backend.graph_stats()["n_nodes"]
    for sublayer in backend.sublayers:
        skipped = one_by_one(backend, skip(backend, sublayer.index))
        assert not np.array_equal(skipped, plain)
        assert backend.graph_stats()["n_nodes"] < nodes


def test_each_skip_drops_its_own_nodes(backend: Any) -> None:
    """The nodes of two skips together are those of each, so work is left out, not zeroed."""
    full = nodes_under(backend, None)
    first, second = 0, len(backend.sublayers) - 1
    dropped = [full - nodes_under(backend, skip(backend, i)) for i in (first, second)]
    both = full - nodes_under(backend, skip(backend, first, second))
    assert min(dropped) > 5
    # where the two together are all attention there is, a view is left for each input that nothing
    # reads any more: positions, mask, where keys go and where values go
    assert 0 <= sum(dropped) - both <= 4


def nodes_under(context: Any, plan: Plan | None) -> int:
    context.decode(TOKENS[0], GREEDY, plan)
    context.truncate(0)
    return int(context.graph_stats()["n_nodes"])


def test_alternated_plans_of_one_shape_equal_fresh_contexts(
    backend: Any, fresh: Callable[[Plan | None], np.ndarray]
) -> None:
    """The graph-reuse trap: same shape, same node count, another plan."""
    half = len(backend.sublayers) // 2
    plans = [skip(backend, 0), skip(backend, half), None]
    expected = [fresh(plan) for plan in plans]
    for _ in range(3):
        for plan, rows in zip(plans, expected, strict=True):
            assert np.array_equal(one_by_one(backend, plan), rows)


def test_alternating_within_one_sequence_uses_the_right_graph(
    backend: Any, tiny: Path, patched_library: Path
) -> None:
    plans = [skip(backend, 0), None, skip(backend, len(backend.sublayers) - 1)]
    with (
        open_model(tiny) as model,
        # no kept graphs: a graph is built for every change of plan
        open_context(model, ctx_tokens=256, kept_graphs=0) as rebuilt,
    ):
        for i, token in enumerate(TOKENS * 3):
            plan = plans[i % 3]
            assert backend.decode(token, GREEDY, plan) == rebuilt.decode(token, GREEDY, plan)
            assert np.array_equal(backend.logits(), rebuilt.logits())


def test_a_draft_leaves_the_full_model_unchanged(backend: Any) -> None:
    backend.prefill(TOKENS, GREEDY)
    backend.verify([1, 2, 3], GREEDY)
    expected = [backend.logits(i) for i in range(3)]
    backend.truncate(len(TOKENS))
    for plan in (skip(backend, 0), skip(backend, *range(len(backend.sublayers)))):
        for token in (9, 8, 7, 6):
            backend.decode(token, GREEDY, plan)
        backend.truncate(len(TOKENS))
        backend.verify([1, 2, 3], GREEDY)
        assert all(np.array_equal(backend.logits(i), expected[i]) for i in range(3))
        backend.truncate(len(TOKENS))


def test_prefill_after_a_draft_is_never_under_the_plan(backend: Any) -> None:
    expected = backend.prefill(TOKENS, GREEDY), backend.logits()
    backend.truncate(0)
    backend.decode(5, GREEDY, skip(backend, 0, 1))
    backend.truncate(0)
    got = backend.prefill(TOKENS, GREEDY), backend.logits()
    assert got[0] == expected[0]
    assert np.array_equal(got[1], expected[1])


def test_everything_skipped_still_computes(backend: Any) -> None:
    plan = skip(backend, *range(len(backend.sublayers)))
    one = backend.decode(7, GREEDY, plan)
    backend.decode(9, GREEDY, plan)
    again = backend.decode(7, GREEDY, plan)
    # nothing but the embedding and the head: the position does not matter
    assert one == again


def test_all_attention_skipped_still_computes(backend: Any) -> None:
    attention = [s.index for s in backend.sublayers if s.kind is not Kind.MLP]
    rows = one_by_one(backend, skip(backend, *attention))
    assert np.isfinite(rows).all()


def test_graphs_stay_alive(backend: Any) -> None:
    plan = skip(backend, 0)
    backend.prefill(TOKENS, GREEDY)

    def a_round() -> None:
        for token in (4, 5, 6):
            backend.decode(token, GREEDY, plan)
        backend.truncate(len(TOKENS))
        backend.verify([4, 5, 6, 7], GREEDY)
        backend.truncate(len(TOKENS))

    a_round()
    built = backend.graph_stats()["n_builds"]
    for _ in range(10):
        a_round()
    assert backend.graph_stats()["n_builds"] == built


def test_kept_graphs_are_bounded(tiny: Path, patched_library: Path) -> None:
    with (
        open_model(tiny) as model,
        open_context(model, ctx_tokens=256, kept_graphs=3) as context,
    ):
        for n in range(1, 9):
            context.verify(TOKENS[:n], GREEDY)
            context.truncate(0)
        stats = context.graph_stats()
        # a single token of the full model needs none: it stays with the context's own scheduler
        assert stats["n_kept"] == 3
        assert stats["n_evicted"] == 4


@pytest.mark.usefixtures("upstream_kernels")
def test_the_backend_equals_the_unpatched_library(
    tiny: Path, backend: Any, pristine: Worker
) -> None:
    expected = pristine.logits(tiny)
    row = 0
    for step in STEPS:
        part = TOKENS[row : row + step]
        backend.verify(part, GREEDY)
        for i in range(step):
            assert np.array_equal(backend.logits(i), expected[row + i])
        row += step


def test_picks_agree_with_the_logits(backend: Any) -> None:
    picks = backend.verify(TOKENS, GREEDY)
    for i, pick in enumerate(picks):
        logits = backend.logits(i).astype(np.float64)
        assert pick.token == int(np.argmax(logits))
        weights = np.exp(logits - logits.max())
        assert pick.probability == pytest.approx(weights.max() / weights.sum(), rel=1e-5)
        assert pick.margin == pytest.approx(np.diff(np.sort(logits)[-2:])[0], abs=1e-5)


def test_plans_of_the_wrong_length_are_refused(backend: Any) -> None:
    with pytest.raises(PlanError, match=r"the plan is for 3 sublayers, the model has"):
        backend.decode(1, GREEDY, Plan((SKIP,) * 3))
    assert backend.n_past == 0
    backend.decode(1, GREEDY)


def test_unknown_modes_are_refused_and_the_old_plan_stays(backend: Any) -> None:
    skipped = one_by_one(backend, skip(backend, 0))
    backend.decode(1, GREEDY, skip(backend, 0))
    backend.truncate(0)
    modes = (ctypes.c_int32 * len(backend.sublayers))(*([7] * len(backend.sublayers)))
    assert backend._lib.knapspec_set_plan(backend.pointer, modes, len(modes), None) == -10
    assert np.array_equal(one_by_one(backend, backend._plan), skipped)


def test_recurrent_models_are_refused_with_the_reason(
    tiny_models: Path, patched_library: Path
) -> None:
    with (
        open_model(tiny_models / "mamba-dense.gguf") as model,
        open_context(model, ctx_tokens=256) as context,
    ):
        assert "recurrent state" in context.refusal
        first = context.prefill(TOKENS, GREEDY)
        context.decode(first.token, GREEDY)
        with pytest.raises(RollbackError, match="could not be cut back"):
            context.truncate(len(TOKENS))
        # emptied, so that it can be filled again with the same result
        assert context.n_past == 0
        assert context.prefill(TOKENS, GREEDY) == first


def test_unrecognised_architectures_run_plainly(tiny_models: Path, patched_library: Path) -> None:
    with (
        open_model(tiny_models / "hrm_text-dense.gguf") as model,
        open_context(model, ctx_tokens=256) as context,
    ):
        assert "hrm_text" in context.refusal
        assert context.sublayers == ()
        context.prefill(TOKENS, GREEDY)
        with pytest.raises(PlanError, match="hrm_text"):
            context.decode(1, GREEDY, Plan((SKIP,)))


def test_a_sliding_window_notices_a_cut_beyond_it(tiny_models: Path, patched_library: Path) -> None:
    with (
        open_model(tiny_models / "gemma3-dense.gguf") as model,
        open_context(model, ctx_tokens=2048) as context,
    ):
        window = model.n_swa
        assert window > 0
        tokens = [i % 100 for i in range(2000)]
        context.prefill(tokens, GREEDY)
        # a draft's length is always possible
        context.truncate(1990)
        if context._llama.llama_memory_seq_pos_min(context._memory, 0) > 0:
            with pytest.raises(RollbackError, match="sliding-window"):
                context.truncate(window)
            assert context.n_past == 0


def test_the_context_ends_exactly(backend: Any) -> None:
    backend.prefill([1] * 255, GREEDY)
    backend.decode(1, GREEDY)
    assert backend.n_past == 256
    with pytest.raises(ContextError, match="raise --ctx"):
        backend.decode(1, GREEDY)
    with pytest.raises(ContextError, match="do not fit"):
        backend.verify([1, 2], GREEDY)
    assert backend.n_past == 256


def test_only_wanted_rows_have_logits(backend: Any) -> None:
    backend.prefill(TOKENS, GREEDY)
    assert backend.logits().shape == (backend.n_vocab,)
    with pytest.raises(IndexError):
        backend.logits(1)


def test_evaluate_equals_decoding_in_blocks(backend: Any) -> None:
    tokens = [i % 90 for i in range(100)]
    picked, probabilities = backend.evaluate(tokens)
    assert picked.shape == probabilities.shape == (100,)
    backend.truncate(0)
    again = [p for i in range(0, 100, 16) for p in backend.verify(tokens[i : i + 16], GREEDY)]
    agree = np.mean([p.token == t for p, t in zip(again, picked, strict=True)])
    assert agree > 0.95


def test_interrupt_from_another_thread(backend: Any) -> None:
    backend.prefill(TOKENS, GREEDY)
    before = backend.n_past
    backend.interrupt()
    with pytest.raises(Interrupted):
        backend.decode(1, GREEDY)
    assert backend.n_past == before
    # once: the next call works, on the same cache
    a = backend.decode(1, GREEDY)
    backend.truncate(before)
    assert backend.decode(1, GREEDY) == a


def prefill_until(context: Any, end: float) -> None:
    while time.monotonic() < end:
        context.prefill([i % 100 for i in range(16000)], GREEDY)
        context.truncate(0)


def test_interrupt_while_computing(patched_library: Path, tiny_models: Path) -> None:
    with (
        open_model(tiny_models / "llama-dense.gguf") as model,
        open_context(model, ctx_tokens=16384, threads=1) as context,
    ):
        timer = threading.Timer(0.2, context.interrupt)
        started = time.monotonic()
        timer.start()
        with pytest.raises(Interrupted):
            prefill_until(context, started + 60)
        timer.join()
        assert context.n_past % context._slice == 0
        assert context._llama.llama_memory_seq_pos_max(context._memory, 0) == context.n_past - 1
        context.truncate(0)
        context.prefill(TOKENS, GREEDY)


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_stops_native_code_and_not_the_program(
    patched_library: Path, tiny_models: Path
) -> None:
    program = textwrap.dedent(
        """
        import sys, time
        from knapspec_edge.errors import Interrupted
        from knapspec_edge.native import open_context, open_model
        from knapspec_edge.records import Sampling

        with open_model(sys.argv[1]) as model, open_context(model, ctx_tokens=16384) as context:
            try:
                with context.interruptible():
                    print("ready", flush=True)
                    while True:
                        context.prefill([i % 100 for i in range(16000)], Sampling())
                        context.truncate(0)
            except Interrupted:
                print("interrupted", flush=True)
            context.truncate(0)
            context.prefill([1, 2, 3], Sampling())
            print("went on", flush=True)
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                print("handler restored", flush=True)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tiny_models / "llama-dense.gguf")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert process.stdout.readline() == "went on\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "handler restored\n"
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


def test_settings_are_checked(tiny: Path, patched_library: Path) -> None:
    with open_model(tiny) as model:
        for bad, message in (
            ({"kv_type": "f8"}, "--kv-type f8"),
            ({"flash_attn": "maybe"}, "--flash-attn maybe"),
            ({"ctx_tokens": 0}, "--ctx"),
            ({"threads": 0}, "--threads"),
        ):
            with pytest.raises(UsageError, match=message):
                open_context(model, **bad)
    with pytest.raises(UsageError, match="--gpu-layers"):
        open_model(tiny, gpu_layers=-1)


def test_a_broken_file_gives_llama_cpps_reason(tmp_path: Path, patched_library: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ModelError, match=r"llama\.cpp cannot load .*broken\.gguf: .+"):
        open_model(file)


def test_a_cancelled_load_frees_everything(tiny: Path, patched_library: Path) -> None:
    with pytest.raises(Interrupted, match="cancelled"):
        open_model(tiny, progress=lambda fraction: False)

    def fail(fraction: float) -> bool:
        raise RuntimeError("in the callback")

    with pytest.raises(RuntimeError, match="in the callback"):
        open_model(tiny, progress=fail)


def test_tokens_outside_the_vocabulary_do_not_crash(backend: Any) -> None:
    from knapspec_edge.errors import NativeError

    with pytest.raises(NativeError):
        backend.decode(backend.n_vocab + 5, GREEDY)
    assert backend.n_past == 0
    with pytest.raises(ValueError, match="outside"):
        backend.model.token_bytes(-1)


def test_a_plan_without_any_attention_outlives_a_growing_cache(
    patched_library: Path, tiny_models: Path
) -> None:
    """Nothing reads the mask then, and it grows with the cache: the kept graph has to notice."""
    with (
        open_model(tiny_models / "llama-dense.gguf") as model,
        open_context(model, ctx_tokens=4096, kv_type="f32", flash_attn="off") as context,
        open_context(model, ctx_tokens=4096, kv_type="f32", flash_attn="off") as fresh,
    ):
        attention = [s.index for s in context.sublayers if s.kind is Kind.ATTENTION]
        plan = Plan.skipping(len(context.sublayers), attention)
        for n_tokens in (100, 600, 4000):
            context.fill(n_tokens)
            context.decode(TOKENS[0], GREEDY, plan)
            rows = context.logits()
            context.truncate(0)
        fresh.fill(4000)
        fresh.decode(TOKENS[0], GREEDY, plan)
        assert np.array_equal(rows, fresh.logits()), "no attention, so no undefined cell is read"
