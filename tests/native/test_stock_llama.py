"""A plan on the context of a stock llama_cpp.Llama object (the example of native/plans.py)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from .oracle import TOKENS, Worker


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_plan_on_a_llama_object(tiny_models: Path, patched: Worker) -> None:
    model = tiny_models / "qwen3-dense.gguf"
    program = """
        import json, sys
        from knapspec_edge.native import plans
        from llama_cpp import Llama

        tokens = json.loads(sys.argv[2])
        llama = Llama(sys.argv[1], n_ctx=256, n_threads=1, logits_all=True, verbose=False)
        found = plans.sublayers(llama)
        rows = []
        for skipped in ([], [found[1].index], []):
            llama.reset()
            with plans.plan(llama, skipped):
                llama.eval(tokens)
            rows.append(llama.scores[len(tokens) - 1].tolist())
        print(json.dumps([[s.kind.value for s in found], rows]))
    """
    done = run(program, str(model), json.dumps(TOKENS))
    assert done.returncode == 0, done.stderr
    kinds, rows = json.loads(done.stdout)
    assert kinds == ["attention", "mlp"] * 2
    as_llama = {"steps": [len(TOKENS)], "flash_attn": 0}  # its default
    full = patched.logits(model, plan=[0] * 4, **as_llama)[-1]
    skipped = patched.logits(model, plan=[0, 1, 0, 0], **as_llama)[-1]
    assert not np.array_equal(full, skipped)
    assert np.array_equal(np.float32(rows[0]), full)
    assert np.array_equal(np.float32(rows[1]), skipped)
    assert np.array_equal(np.float32(rows[2]), full)


def test_what_a_plan_computed_is_not_continued_without_it(
    tiny_models: Path, patched_library: Path
) -> None:
    """A Llama object keeps the keys of a common prefix; a skipped attention left holes in them."""
    program = """
        import json, sys
        import numpy as np
        from knapspec_edge.native import plans
        from llama_cpp import Llama

        tokens = json.loads(sys.argv[2])

        def after_prompt(llama):
            next(llama.generate(tokens, temp=0.0))
            return llama.scores[len(tokens) - 1].copy()

        def new():
            return Llama(sys.argv[1], n_ctx=256, n_threads=1, logits_all=True, verbose=False)

        expected = after_prompt(new())
        llama = new()
        with plans.plan(llama, [0, 2]):
            skipped = after_prompt(llama)
        assert not np.array_equal(skipped, expected)
        assert np.array_equal(after_prompt(llama), expected)
        # a caller who drafts says which tokens the full model had computed
        kept = len(tokens)
        with plans.plan(llama, [0, 2]):
            llama.eval([5, 6])
        llama.n_tokens = kept
        llama.eval([7])
        fresh = new()
        fresh.eval(tokens)
        fresh.eval([7])
        assert np.array_equal(llama.scores[kept], fresh.scores[kept])
        print("equal")
    """
    done = run(program, str(tiny_models / "llama-dense.gguf"), json.dumps(TOKENS))
    assert done.stdout == "equal\n", done.stderr


def test_plans_end_in_any_way(tiny_models: Path, patched_library: Path) -> None:
    program = """
        import json, sys
        import numpy as np
        from knapspec_edge.errors import PlanError
        from knapspec_edge.native import plans
        from llama_cpp import Llama

        tokens = json.loads(sys.argv[2])
        llama = Llama(sys.argv[1], n_ctx=256, n_threads=1, logits_all=True, verbose=False)

        def row():
            llama.reset()
            llama.eval(tokens)
            return llama.scores[len(tokens) - 1].copy()

        full = row()
        with plans.plan(llama, [0]):
            outer = row()
        with plans.plan(llama, [0]):
            with plans.plan(llama, [1]):
                inner = row()
            assert np.array_equal(row(), outer)  # the outer plan holds again
            try:
                with plans.plan(llama, []):
                    assert np.array_equal(row(), full)
                    raise KeyError
            except KeyError:
                pass
            assert np.array_equal(row(), outer)
        assert np.array_equal(row(), full)
        assert not np.array_equal(inner, outer)
        first, second = plans.plan(llama, [0]), plans.plan(llama, [1])
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert np.array_equal(row(), inner)
        second.__exit__(None, None, None)
        assert np.array_equal(row(), full)
        assert not plans._in_force
        with plans.plan(llama, [0]):
            llama.close()
        assert not plans._in_force
        try:
            plans.sublayers(llama)
        except PlanError as error:
            print(error)
    """
    done = run(program, str(tiny_models / "llama-dense.gguf"), json.dumps(TOKENS))
    assert done.stdout == "this Llama object is closed\n", done.stderr


def test_bad_plans_are_refused(tiny_models: Path, patched_library: Path) -> None:
    program = """
        import sys
        from knapspec_edge.errors import PlanError
        from knapspec_edge.native import plans
        from knapspec_edge.records import Plan
        from llama_cpp import Llama

        llama = Llama(sys.argv[1], n_ctx=256, verbose=False)
        for bad in ([9], [-1], Plan.full(3)):
            try:
                with plans.plan(llama, bad):
                    pass
            except PlanError as error:
                print(error)
    """
    done = run(program, str(tiny_models / "qwen3-dense.gguf"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "sublayer index 9 is outside 0..3",
        "sublayer index -1 is outside 0..3",
        "the plan is for 3 sublayers, the model has 4",
    ]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/maps")
def test_each_library_is_mapped_once(tiny_models: Path, patched_library: Path) -> None:
    program = """
        import os, sys
        from knapspec_edge.native import open_context, open_model

        with open_model(sys.argv[1]) as model, open_context(model, ctx_tokens=256) as context:
            context.evaluate([1, 2, 3])
            files = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
        ours = sorted(os.path.basename(f) for f in files if "libllama" in f or "libggml" in f)
        stems = [name.split(".so")[0] for name in ours]
        assert len(stems) == len(set(stems)) >= 4, ours
        assert not {f for f in files if "llama_cpp/lib" in f}
        print("once")
    """
    done = run(program, str(tiny_models / "llama-dense.gguf"))
    assert done.stdout == "once\n", done.stderr


def test_backends_for_other_processors_are_passed_over(
    tiny_models: Path, patched_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 73: of a build with a module for each kind of CPU, only what this one runs is used."""
    folder = tmp_path / "libraries"
    shutil.copytree(patched_library, folder)
    for name in ("libggml-cpu-haswell.so", "libggml-cpu-armv9.so"):
        (folder / name).write_bytes(b"\x7fELF of another processor")
    monkeypatch.setenv("KNAPSPEC_EDGE_LIBRARY", str(folder))
    program = """
        import os, sys
        from knapspec_edge.native import library, open_context, open_model

        assert library._has_loadable_backends(library.library_folder())
        with open_model(sys.argv[1]) as model, open_context(model, ctx_tokens=256) as context:
            context.evaluate([1, 2, 3])
            files = {line.split()[-1] for line in open("/proc/self/maps") if "/libggml" in line}
        assert {os.path.dirname(file) for file in files} == {sys.argv[2]}, files
        print("runs")
    """
    done = run(program, str(tiny_models / "llama-dense.gguf"), str(folder))
    assert (done.returncode, done.stdout) == (0, "runs\n"), done.stderr


def test_another_openmp_in_the_process(tiny_models: Path, patched_library: Path) -> None:
    """Case 78: an OpenMP runtime that was loaded before, visible to all, ends nothing."""
    program = """
        import ctypes, ctypes.util, sys
        name = ctypes.util.find_library("iomp5") or ctypes.util.find_library("omp")
        name = name or ctypes.util.find_library("gomp")
        if name is None:
            print("none")
            sys.exit()
        other = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        assert other.omp_get_max_threads() >= 1  # it has begun
        from knapspec_edge.native import open_context, open_model

        with open_model(sys.argv[1]) as model:
            with open_context(model, ctx_tokens=256, threads=2) as context:
                context.evaluate(list(range(1, 60)))
        assert other.omp_get_max_threads() >= 1
        print("went on")
    """
    done = run(program, str(tiny_models / "llama-dense.gguf"))
    if done.stdout == "none\n":
        pytest.skip("no OpenMP runtime on this machine")
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


def test_another_llama_cpp_in_the_process_is_refused(
    tiny_models: Path, patched_library: Path, pristine_library: Path
) -> None:
    program = """
        import ctypes, glob, sys
        library = glob.glob(sys.argv[2] + "/libllama.*")[0]
        ctypes.CDLL(library)
        from knapspec_edge.errors import LibraryError
        from knapspec_edge.native import open_model
        try:
            open_model(sys.argv[1])
        except LibraryError as error:
            print(error)
    """
    done = run(program, str(tiny_models / "llama-dense.gguf"), str(pristine_library))
    assert "another llama.cpp is already loaded in this process" in done.stdout, done.stderr
    assert "import knapspec_edge before llama_cpp" in done.stdout


def test_native_logs_stay_hidden(tiny_models: Path, patched_library: Path) -> None:
    program = """
        import os, sys
        from knapspec_edge.native import open_context, open_model

        if len(sys.argv) > 2:
            os.environ["KNAPSPEC_EDGE_NATIVE_LOG"] = sys.argv[2]
        with open_model(sys.argv[1]) as model, open_context(model, ctx_tokens=256) as context:
            context.evaluate([1, 2, 3])
            print("text", file=sys.stderr)
    """
    model = str(tiny_models / "llama-dense.gguf")
    quiet = run(program, model)
    assert quiet.stderr == "text\n"
    loud = run(program, model, "info")
    assert "llama_context" in loud.stderr
    assert "text\n" in loud.stderr
