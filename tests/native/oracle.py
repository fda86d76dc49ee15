"""The oracle: leaving a sublayer out equals zeroing its output projection in the file.

For every sublayer that the patch recognises in a model, the unpatched library computes the logits
of a file in which that sublayer's output projection (bias, experts and shared expert too) is zero.
They must equal, bit for bit, what the patched library computes with the sublayer skipped: single
tokens and a batch, decoded under the plan from the first token on.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

KINDS = ("attention", "mlp", "block", "recurrent")
TOKENS = [3, 17, 42, 5, 99, 64, 23, 8, 110, 71, 12, 50]
STEPS = [1, 1, 1, 5, 1, 3]

# Names, behind blk.<layer>., of what ends a sublayer. A branch that is added to the residual stream
# after a norm with a bias ends with that bias.
_ATTENTION_OUTPUT = (
    r"attn_output\.(weight|bias)",
    r"attn_out\.(weight|bias)",
    r"attn_post_norm\.bias",
    r"post_attention_norm\.bias",
    r"ssm_out\.(weight|bias)",
    r"shortconv\.out_proj\.(weight|bias)",
    r"time_mix_output\.(weight|bias)",
    r"attn_o\.(weight|bias)",
)
_MLP_OUTPUT = (
    r"ffn_down\.(weight|bias)",
    r"ffn_down_(exps|shexp|chexps|exp)\.(weight|bias)",
    r"ffn_down\.\d+\.(weight|bias)",
    r"ffn_post_norm\.bias",
    r"post_ffw_norm\.bias",
    r"channel_mix_value\.(weight|bias)",
    r"ffn_latent_up\.(weight|bias)",
)
_OUTPUTS = {
    "attention": _ATTENTION_OUTPUT,
    "recurrent": _ATTENTION_OUTPUT,
    "mlp": _MLP_OUTPUT,
    "block": _ATTENTION_OUTPUT + _MLP_OUTPUT,
}


class WorkerDied(Exception):
    """The worker process ended in the middle of a request."""


class Worker:
    """One build of llama.cpp in a process of its own; restarted after a crash."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self.process: subprocess.Popen[bytes] | None = None

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "LLAMA_CPP_LIB_PATH": os.fspath(self.library),
            # builds are compared bit for bit, and kernels of ours round differently
            "KNAPSPEC_EDGE_KERNELS": "0",
        }
        script = Path(__file__).with_name("logits_worker.py")
        return subprocess.Popen(
            [sys.executable, os.fspath(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )

    def ask(self, **request: Any) -> tuple[dict[str, Any], np.ndarray | None]:
        if self.process is None or self.process.poll() is not None:
            self.process = self._start()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise WorkerDied(f"exit code {self.process.wait()}") from None
        line = self.process.stdout.readline()
        if not line:
            raise WorkerDied(f"exit code {self.process.wait()}")
        header = json.loads(line)
        rows = None
        if "shape" in header:
            size = 4 * int(np.prod(header["shape"]))
            raw = self.process.stdout.read(size)
            if len(raw) < size:
                raise WorkerDied(f"exit code {self.process.wait()}")
            rows = np.frombuffer(raw, dtype="<f4").reshape(header["shape"])
        return header, rows

    def logits(self, model: Path, **settings: Any) -> np.ndarray:
        request = {"tokens": TOKENS, "steps": STEPS, **settings}
        header, rows = self.ask(do="logits", model=os.fspath(model), **request)
        if rows is None:
            raise RuntimeError(header["error"])
        return rows

    def close(self) -> None:
        if self.process is not None:
            if self.process.stdin is not None:
                self.process.stdin.close()
            self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Verdict:
    """What the oracle says of one model."""

    name: str
    sublayers: list[tuple[int, str]] = field(default_factory=list)
    refusal: str = ""
    recurrent: bool = False
    wrong: list[str] = field(default_factory=list)  # items whose logits differ, with how much
    crashed: list[str] = field(default_factory=list)
    unproved: list[str] = field(default_factory=list)  # items the oracle cannot judge
    full_differs: str = ""  # an empty plan that is not the unpatched library's result

    @property
    def works(self) -> bool:
        faults = self.wrong or self.crashed or self.unproved or self.full_differs
        return bool(self.sublayers) and not faults


class ZeroedFile:
    """A copy of a GGUF file in which chosen tensors are zeroed for a while."""

    def __init__(self, source: Path, target: Path) -> None:
        shutil.copyfile(source, target)
        self.path = target
        reader = gguf.GGUFReader(target)
        self.tensors = {t.name: (int(t.data_offset), int(t.n_bytes)) for t in reader.tensors}
        del reader

    def outputs_of(self, layer: int, kind: str) -> list[str]:
        pattern = re.compile(rf"blk\.{layer}\.(?:{'|'.join(_OUTPUTS[kind])})")
        return [name for name in self.tensors if pattern.fullmatch(name)]

    def zeroed(self, names: list[str]) -> Iterator[Path]:
        saved = {}
        with open(self.path, "r+b") as file:
            for name in names:
                offset, size = self.tensors[name]
                file.seek(offset)
                saved[name] = file.read(size)
                file.seek(offset)
                file.write(bytes(size))
        yield self.path
        with open(self.path, "r+b") as file:
            for name, content in saved.items():
                file.seek(self.tensors[name][0])
                file.write(content)


def judge(model: Path, patched: Worker, pristine: Worker, scratch: Path) -> Verdict:
    """Run the oracle on every sublayer of one model."""
    verdict = Verdict(model.stem)
    try:
        header, _ = patched.ask(do="describe", model=os.fspath(model))
    except WorkerDied as death:
        verdict.crashed.append(f"recognition ({death})")
        return verdict
    if "error" in header:
        verdict.refusal = header["error"]
        return verdict
    verdict.recurrent = header["recurrent"]
    verdict.refusal = header["refusal"]
    if header["diffusion"]:
        verdict.refusal = "generates text in no fixed order"
    verdict.sublayers = [(layer, KINDS[kind]) for layer, kind in header["sublayers"]]
    if not verdict.sublayers:
        return verdict

    try:
        plain = pristine.logits(model)
    except (RuntimeError, WorkerDied) as error:
        verdict.refusal = f"upstream fails on it ({error})"
        verdict.sublayers = []
        return verdict
    try:
        full = patched.logits(model, plan=[0] * len(verdict.sublayers))
        if not np.array_equal(full, plain, equal_nan=True):
            verdict.full_differs = difference(full, plain)
    except (RuntimeError, WorkerDied) as error:
        verdict.crashed.append(f"empty plan ({error})")

    file = ZeroedFile(model, scratch / model.name)
    done: set[tuple[int, str]] = set()
    for index, (layer, kind) in enumerate(verdict.sublayers):
        label = f"{kind} {layer}"
        # two networks of one kind in a layer (dense and experts) are judged together
        together = [i for i, item in enumerate(verdict.sublayers) if item == (layer, kind)]
        if (layer, kind) in done:
            continue
        done.add((layer, kind))
        names = file.outputs_of(layer, kind)
        if not names:
            verdict.unproved.append(label)
            continue
        plan = [int(i in together) for i in range(len(verdict.sublayers))]
        try:
            pruned = patched.logits(model, plan=plan)
        except (RuntimeError, WorkerDied) as error:
            verdict.crashed.append(f"{label} (item {index}: {error})")
            continue
        for path in file.zeroed(names):
            expected = pristine.logits(path)
        if np.array_equal(expected, plain, equal_nan=True):
            verdict.unproved.append(f"{label} (zeroing {', '.join(names)} changes nothing)")
        elif not np.array_equal(pruned, expected, equal_nan=True):
            verdict.wrong.append(f"{label} ({difference(pruned, expected)})")
    file.path.unlink()
    return verdict


def difference(a: np.ndarray, b: np.ndarray) -> str:
    return f"largest difference {np.nanmax(np.abs(a - b)):.3g}"


def judge_folder(folder: Path, patched: Path, pristine: Path, scratch: Path) -> Iterator[Verdict]:
    """Verdicts for all GGUF files of a folder, in the order of their names."""
    with Worker(patched) as ours, Worker(pristine) as theirs:
        for model in sorted(folder.glob("*.gguf")):
            yield judge(model, ours, theirs, scratch)


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description="Judge every sublayer of every model of a folder.")
    parser.add_argument("models", type=Path)
    parser.add_argument("patched", type=Path)
    parser.add_argument("pristine", type=Path)
    parser.add_argument("--scratch", type=Path, default=Path("/tmp"))
    arguments = parser.parse_args()
    works = 0
    for v in judge_folder(
        arguments.models, arguments.patched, arguments.pristine, arguments.scratch
    ):
        works += v.works
        state = "ok" if v.works else "REFUSED" if not v.sublayers and not v.crashed else "FAULT"
        print(
            state,
            v.name,
            len(v.sublayers),
            v.refusal,
            *v.wrong,
            *v.crashed,
            *v.unproved,
            v.full_differs,
            flush=True,
        )
    print(works, "work")


if __name__ == "__main__":
    main()
