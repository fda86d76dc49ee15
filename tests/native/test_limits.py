"""What llama.cpp cannot be asked for is refused before it is asked (cases 13, 23, 59, 79)."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path

import pytest

from knapspec_edge.errors import ContextError, ModelError, UsageError
from knapspec_edge.native.context import LlamaBackend, kv_bytes_per_token
from knapspec_edge.native.model import Model, hold_interrupts
from knapspec_edge.records import Sampling


@pytest.fixture
def tiny(patched_library: Path, tiny_models: Path) -> Path:
    return tiny_models / "llama-dense.gguf"


def test_sizes_that_wrap_around_or_crash(tiny: Path) -> None:
    with pytest.raises(UsageError, match="--gpu-layers"):
        Model(tiny, gpu_layers=2**32)
    with Model(tiny) as model:
        for ctx_tokens in (0, 2**31, 2**32 + 64):
            with pytest.raises(UsageError, match="--ctx must be in"):
                LlamaBackend(model, ctx_tokens=ctx_tokens)
        for threads in (0, 513, 100_000, 2**32 + 1):
            with pytest.raises(UsageError, match="--threads must be in"):
                LlamaBackend(model, ctx_tokens=64, threads=threads)
            with pytest.raises(UsageError, match="--threads must be in"):
                LlamaBackend(model, ctx_tokens=64, threads_batch=threads)


def test_a_context_larger_than_the_memory_names_both_and_a_smaller_one(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_gigabyte = [{"name": "CPU", "total_bytes": 10**9}]
    monkeypatch.setattr("knapspec_edge.native.library.devices", lambda: one_gigabyte)
    with Model(tiny) as model:
        message = r"10000000 tokens takes at least \d+ GB .* has 1 GB of memory; .* such as \d+$"
        with pytest.raises(ContextError, match=message):
            LlamaBackend(model, ctx_tokens=10_000_000)
        LlamaBackend(model, ctx_tokens=64).close()


def test_rows_of_logits_do_not_grow_with_the_context(tiny: Path) -> None:
    """Case 79: room for the tokens of one verification, not for context × vocabulary."""
    rows = []
    with Model(tiny) as model:
        for ctx_tokens in (512, 32_768):
            with LlamaBackend(model, ctx_tokens=ctx_tokens) as backend:
                rows.append(backend.settings["max_rows"])
                backend.prefill(list(range(1, 100)), Sampling())
                with pytest.raises(IndexError, match="the 1 rows"):
                    backend.logits(1)  # of 99 positions, the last alone has any
                with pytest.raises(ValueError, match="the widest verification"):
                    backend.verify([1] * (rows[-1] + 1), Sampling())
    assert rows[0] == rows[1] <= 64


def test_bytes_per_token_of_a_context() -> None:
    plain = {
        "llama.block_count": "30",
        "llama.embedding_length": "576",
        "llama.attention.head_count": "9",
        "llama.attention.head_count_kv": "3",
    }
    cell = kv_bytes_per_token({}, "llama", "f16")
    # 30 layers, 3 heads, 64 numbers of a key and 64 of a value
    assert kv_bytes_per_token(plain, "llama", "f16") == cell + 30 * 3 * 128 * 2
    assert kv_bytes_per_token(plain, "llama", "f32") == cell + 30 * 3 * 128 * 4
    assert kv_bytes_per_token(plain, "llama", "q8_0") == cell + 30 * 3 * 128 * 34 // 32
    wide = {**plain, "llama.attention.key_length": "256", "llama.attention.value_length": "128"}
    assert kv_bytes_per_token(wide, "llama", "f16") == cell + 30 * 3 * 384 * 2
    one_head_each = {k: v for k, v in plain.items() if not k.endswith("kv")}
    assert kv_bytes_per_token(one_head_each, "llama", "f16") == cell + 30 * 9 * 128 * 2
    # by layer, compressed or windowed: only what is certain
    for key, value in (
        ("head_count_kv", "[3, 0]"),
        ("kv_lora_rank", "512"),
        ("sliding_window", "9"),
    ):
        assert (
            kv_bytes_per_token({**plain, f"llama.attention.{key}": value}, "llama", "f16") == cell
        )


@pytest.mark.skipif(os.name != "posix", reason="sends signals")
def test_interrupts_are_held_and_told() -> None:
    before = signal.getsignal(signal.SIGINT)
    with hold_interrupts() as pressed:
        assert not pressed()
        os.kill(os.getpid(), signal.SIGINT)
        assert pressed()
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    found: list[bool] = []

    def elsewhere() -> None:
        with hold_interrupts() as pressed:
            found.append(pressed())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [False]


@pytest.mark.skipif(os.name != "posix", reason="sends signals")
@pytest.mark.parametrize("watched", [True, False])
def test_ctrl_c_while_a_model_loads_is_not_lost(
    tiny: Path, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    unraisable: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", unraisable.append)

    def report(_: float) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        return True

    load = Model.__init__
    if not watched:
        llama = __import__("knapspec_edge.native.library", fromlist=["load"]).load()
        real = llama.llama_model_load_from_file

        def pressed_meanwhile(*arguments: object) -> object:
            os.kill(os.getpid(), signal.SIGINT)
            return real(*arguments)

        monkeypatch.setattr(llama, "llama_model_load_from_file", pressed_meanwhile)
    with pytest.raises(KeyboardInterrupt):
        load(Model.__new__(Model), tiny, progress=report if watched else None)
    assert not unraisable


def test_quantised_values_need_flash_attention(tiny: Path) -> None:
    with Model(tiny) as model:
        with pytest.raises(UsageError, match="--kv-type q8_0 needs flash attention"):
            LlamaBackend(model, ctx_tokens=64, kv_type="q8_0", flash_attn="off")
        LlamaBackend(model, ctx_tokens=64, kv_type="bf16", flash_attn="off").close()


def test_a_failed_load_names_its_cause(tiny: Path, tmp_path: Path) -> None:
    data = tiny.read_bytes()
    for old, new, cause in (
        (b"llama", b"lxama", "unknown model architecture: 'lxama'"),
        (b"blk.1.attn_q.weight", b"blk.1.attn_x.weight", "tensor 'blk.1.attn_q.weight' not found"),
    ):
        path = tmp_path / "model.gguf"
        path.write_bytes(data.replace(old, new))
        for _ in range(2):
            with pytest.raises(ModelError, match=re.escape(cause)):
                Model(path)
