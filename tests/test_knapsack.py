"""The exact knapsack: against exhaustive search, a naive twin, and between its implementations."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import naive_knapsack as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knapspec_edge.search import kernels
from knapspec_edge.search.kernels import loops, vectorised
from knapspec_edge.search.knapsack import Option, Sweep, solve, sweep

ROOT = Path(__file__).resolve().parent.parent

# Sums of these are exact, so that ties are ties in any order of summing.
EXACT_LOSSES = [0.0, 0.125, 0.25, 0.5, 1.0, 2.5, math.inf]

small_items = st.lists(
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from(EXACT_LOSSES)), min_size=1, max_size=4),
    max_size=6,
)


load = kernels.kernels  # tests put others in its place


def compiled() -> kernels.Kernels:
    found = load()
    if found.implementation.name != "numba":
        pytest.skip(f"numba cannot be used here: {found.implementation.reason}")
    return found


IMPLEMENTATIONS = ("compiled", "loops", "vectorised")


@pytest.fixture(scope="module", autouse=True)
def numba_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled once for the whole file. The setting of the shell must not decide what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KNAPSPEC_EDGE_CACHE", str(tmp_path_factory.mktemp("numba")))
        patch.delenv(kernels.SWITCH, raising=False)
        kernels.kernels()
        yield


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """`sweep` runs on it; "loops" is what Numba compiles, interpreted."""
    use(request.param, monkeypatch)
    return str(request.param)


def use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "compiled":
        found = compiled()
    elif name == "loops":
        found = kernels.Kernels(
            kernels.Implementation("interpreted", ""), loops.fill, loops.backtrack
        )
    else:
        found = kernels.interpreted("the test says so")
    assert (found.fill is vectorised.fill) == (name == "vectorised")
    monkeypatch.setattr(kernels, "kernels", lambda *, load=True: found)


def arrays(items: list[list[tuple[int, float]]]) -> tuple[np.ndarray, np.ndarray]:
    """Padded as `sweep` documents; the padding's saving is nonsense on purpose."""
    width = max((len(item) for item in items), default=1)
    units = np.full((len(items), width), -7, dtype=np.int64)
    losses = np.full((len(items), width), np.inf)
    for i, item in enumerate(items):
        for k, (saving, loss) in enumerate(item):
            units[i, k], losses[i, k] = saving, loss
    return units, losses


def check_options(found: Sweep, units: np.ndarray, losses: np.ndarray) -> None:
    """Each row's options add up to what the row says."""
    rows = np.arange(len(units))
    for r in range(len(found)):
        chosen = found.options[r]
        assert int(units[rows, chosen].sum()) == found.saving_units[r]
        total = 0.0
        for loss in losses[rows, chosen]:
            total += float(loss)
        assert total == found.losses[r]


def random_instance(
    seed: int, n_items: int, n_options: int, *, ties: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Sublayers of a few cost classes; some options forbidden, some free, some useless."""
    rng = np.random.default_rng(seed)
    classes = rng.integers(0, 40, size=(3, n_options))
    units = classes[rng.integers(0, 3, size=n_items)]
    losses = rng.integers(0, 5, size=units.shape) / 8 if ties else rng.exponential(size=units.shape)
    losses[rng.random(units.shape) < 0.1] = np.inf
    losses[:, 0], units[:, 0] = 0.0, 0
    return units, losses


class TestAgainstExhaustiveSearch:
    # monkeypatch is safe to share between examples: each sets the same thing
    @pytest.mark.parametrize("name", IMPLEMENTATIONS)
    @settings(max_examples=150)
    @given(items=small_items)
    def test_every_saving(self, name: str, items: list[list[tuple[int, float]]]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            use(name, patch)
            units, losses = arrays(items)
            found = sweep(units, losses)
            expected = naive.exhaustive(items)
            expected = {s: x for s, x in expected.items() if x < math.inf}
            assert dict(zip(found.saving_units.tolist(), found.losses.tolist(), strict=True)) == (
                expected
            )
            assert found.saving_units.tolist() == sorted(expected)
            check_options(found, units, losses)
            undominated = sweep(units, losses, front=True)
            assert undominated.saving_units.tolist() == naive.front(expected)
            check_options(undominated, units, losses)
            for limit in (0, 3, 11):
                capped = sweep(units, losses, most_units=limit)
                assert capped.saving_units.tolist() == sorted(s for s in expected if s <= limit)
                n = len(capped)
                assert (capped.options == found.options[:n]).all()

    @settings(max_examples=150)
    @given(items=small_items)
    def test_list_form(self, items: list[list[tuple[int, float]]]) -> None:
        units, losses = arrays(items)
        found = sweep(units, losses)
        listed = solve([[Option(s, x) for s, x in item] for item in items])
        assert [s.saving_units for s in listed] == found.saving_units.tolist()
        assert [s.loss for s in listed] == found.losses.tolist()
        assert [s.options for s in listed] == [tuple(row) for row in found.options.tolist()]

    @settings(max_examples=100)
    @given(items=small_items, budget=st.integers(0, 20))
    def test_budget(self, items: list[list[tuple[int, float]]], budget: int) -> None:
        found = sweep(*arrays(items))
        row = found.within(budget)
        enough = {s: x for s, x in naive.exhaustive(items).items() if s >= budget and x < math.inf}
        if row is None:
            assert not enough
            return
        least = min(enough.values())
        assert found.losses[row] == least
        assert found.saving_units[row] == max(s for s, x in enough.items() if x == least)


class TestAgainstTheTwin:
    @pytest.mark.parametrize("ties", [False, True])
    @pytest.mark.parametrize("seed", range(3))
    def test_equal_to_the_last_bit(self, implementation: str, seed: int, ties: bool) -> None:
        units, losses = random_instance(seed, 40, 2 + seed, ties=ties)
        found = sweep(units, losses)
        expected = naive.recurrence(
            [
                list(zip(u, x, strict=True))
                for u, x in zip(units.tolist(), losses.tolist(), strict=True)
            ]
        )
        assert found.saving_units.tolist() == sorted(expected)
        for r, saving in enumerate(found.saving_units.tolist()):
            loss, options = expected[saving]
            assert found.losses[r] == loss
            assert tuple(found.options[r]) == options

    def test_every_prefix_is_optimal(self, implementation: str) -> None:
        """Bellman: what a best choice does to the first i items is a best choice for those."""
        units, losses = random_instance(7, 24, 3, ties=True)
        found = sweep(units, losses)
        for i in range(1, 24):
            prefix = sweep(units[:i], losses[:i])
            best = dict(zip(prefix.saving_units.tolist(), prefix.losses.tolist(), strict=True))
            rows = np.arange(i)
            for r in range(len(found)):
                chosen = found.options[r, :i]
                saving = int(units[rows, chosen].sum())
                assert losses[rows, chosen].sum() == best[saving]

    def test_implementations_agree_on_large_instances(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compiled()
        for seed, n_items, n_options in ((1, 60, 2), (2, 60, 4), (3, 160, 3)):
            units, losses = random_instance(seed, n_items, n_options, ties=seed == 2)
            results = []
            for name in ("compiled", "vectorised"):
                use(name, monkeypatch)
                results.append(sweep(units, losses, front=seed == 3))
            one, other = results
            assert len(one) > 500 or seed == 3
            assert (one.saving_units == other.saving_units).all()
            assert (one.losses == other.losses).all()
            assert (one.options == other.options).all()


class TestTies:
    def test_the_last_item_takes_its_first_option(self, implementation: str) -> None:
        # saving 1 at the same loss by either item: the last one stays at its first option
        found = sweep([[0, 1], [0, 1]], [[0.0, 0.5], [0.0, 0.5]])
        assert found.options.tolist() == [[0, 0], [1, 0], [1, 1]]

    def test_equal_options_give_the_first(self, implementation: str) -> None:
        found = sweep([[2, 2, 2]], [[1.0, 0.5, 0.5]])
        assert found.options.tolist() == [[1]]

    def test_common_divisors_change_nothing(self, implementation: str) -> None:
        units, losses = random_instance(5, 20, 3, ties=True)
        one, other = sweep(units, losses), sweep(units * 12, losses)
        assert (one.saving_units * 12 == other.saving_units).all()
        assert (one.options == other.options).all()


class TestEdges:
    def test_nothing_to_choose(self, implementation: str) -> None:
        found = sweep(np.empty((0, 0), dtype=np.int64), np.empty((0, 0)))
        assert found.saving_units.tolist() == [0]
        assert found.losses.tolist() == [0.0]
        assert found.options.shape == (1, 0)
        assert solve([])[0].options == ()

    def test_one_item_without_a_permitted_option(self, implementation: str) -> None:
        found = sweep([[0, 1], [0, 1]], [[0.0, 0.5], [math.inf, math.inf]])
        assert len(found) == 0
        assert found.options.shape == (0, 2)
        assert found.within(0) is None

    def test_no_saving_anywhere(self, implementation: str) -> None:
        found = sweep([[0, 0], [0, 0]], [[0.5, 0.25], [0.0, 1.0]])
        assert found.saving_units.tolist() == [0]
        assert found.losses.tolist() == [0.25]
        assert found.options.tolist() == [[1, 0]]

    def test_a_full_option_that_is_not_free(self, implementation: str) -> None:
        found = sweep([[5, 3]], [[0.0, 0.0]])
        assert found.saving_units.tolist() == [3, 5]
        assert sweep([[5, 3]], [[0.0, 0.0]], front=True).saving_units.tolist() == [5]

    @pytest.mark.parametrize(
        ("units", "losses", "message"),
        [
            ([[0, -1]], [[0.0, 0.5]], "0 or more"),
            ([[0, 1]], [[0.0, -0.5]], "0 or more"),
            ([[0, 1]], [[0.0, math.nan]], "0 or more"),
            ([[0.0, 1.5]], [[0.0, 0.5]], "whole units"),
            ([[0, 1]], [[0.0]], "items, options"),
            ([0, 1], [0.0, 0.5], "items, options"),
            (np.empty((2, 0), dtype=int), np.empty((2, 0)), "1 to 127 options, not 0"),
            (np.zeros((1, 128), dtype=int), np.zeros((1, 128)), "1 to 127 options, not 128"),
            ([[0, 1], [0, 2**40 + 1]], [[0.0, 0.5], [0.0, 0.5]], "too much memory"),
        ],
    )
    def test_nonsense_is_refused(self, units: object, losses: object, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            sweep(units, losses)  # type: ignore[arg-type]

    def test_127_options_are_told_apart(self, implementation: str) -> None:
        found = sweep([list(range(127))] * 2, [[float(i % 7) for i in range(127)]] * 2)
        expected = naive.recurrence([[(i, float(i % 7)) for i in range(127)]] * 2)
        assert [tuple(row) for row in found.options.tolist()] == [
            expected[s][1] for s in sorted(expected)
        ]

    def test_arguments_are_left_alone(self, implementation: str) -> None:
        units, losses = random_instance(1, 6, 3, ties=False)
        before = units.copy(), losses.copy()
        sweep(units, losses)
        assert (units == before[0]).all()
        assert (losses == before[1]).all()


# What a process of its own says: which kernels, what it mapped, what it printed.
PROGRAM = """
import json, sys
import numpy
def mapped():
    try:
        with open("/proc/self/maps") as file:
            return sorted({line.split()[-1] for line in file if ".so" in line})
    except OSError:
        return []
before = mapped()
from knapspec_edge.search import kernels, knapsack
assert "numba" not in sys.modules
lazy = knapsack.sweep([[0, 3], [0, 2]], [[0.0, 0.5], [0.0, 0.25]], load=False)
assert "numba" not in sys.modules
found = knapsack.sweep([[0, 3], [0, 2]], [[0.0, 0.5], [0.0, 0.25]])
assert found.options.tolist() == lazy.options.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
chosen = kernels.backend()
cached = {}
if chosen.name == "numba":
    stats = kernels.kernels().fill.stats
    cached = {"hits": sum(stats.cache_hits.values()), "misses": sum(stats.cache_misses.values())}
print(json.dumps({
    "name": chosen.name, "reason": chosen.reason, "new": sorted(set(mapped()) - set(before)),
    "numba": "numba" in sys.modules, **cached,
}))
"""


# OpenMP runtimes and Numba's threading layers.
THREADING = re.compile(r"lib[a-z]*omp[0-9]*\b|libtbb|omppool|tbbpool|workqueue")


def in_process(cache: Path, prelude: str = "", **environment: str) -> dict[str, object]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")}
    env.pop(kernels.SWITCH, None)
    env |= {"KNAPSPEC_EDGE_CACHE": str(cache), **environment}
    paths = [str(ROOT), *env.get("PYTHONPATH", "").split(os.pathsep)]
    env["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", prelude + PROGRAM],
        env=env,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


# Run first, makes Numba look as if it were not installed.
HIDDEN = """
import importlib.abc, sys
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "numba":
            raise ModuleNotFoundError("No module named 'numba'", name="numba")
sys.meta_path.insert(0, Hide())
"""


class TestLoading:
    def test_threading_libraries_are_recognised(self) -> None:
        for name in ("libgomp.so.1", "libomp.so", "libiomp5.so", "libtbb.so.12", "omppool.so"):
            assert THREADING.match(name)
        assert not THREADING.match("_decomp_update.cpython-311.so")

    def test_compiled_once_and_no_second_openmp(self, tmp_path: Path) -> None:
        compiled()
        first = in_process(tmp_path)
        assert (first["name"], first["reason"]) == ("numba", "")
        assert (first["hits"], first["misses"]) == (0, 1)
        assert list((tmp_path / "numba").rglob("*.nbc"))
        second = in_process(tmp_path)
        assert (second["hits"], second["misses"]) == (1, 0)
        for new in (first["new"], second["new"]):
            assert isinstance(new, list)
            if sys.platform == "linux":
                assert any("llvmlite" in name for name in new)
            assert not [n for n in new if THREADING.match(Path(n).name)]

    def test_the_users_own_cache_folder_counts(self, tmp_path: Path) -> None:
        compiled()
        own = tmp_path / "own"
        found = in_process(tmp_path / "cache", NUMBA_CACHE_DIR=str(own))
        assert found["name"] == "numba"
        assert list(own.rglob("*.nbc"))
        assert not (tmp_path / "cache" / "numba").exists()

    def test_a_cache_that_cannot_be_written_is_done_without(self, tmp_path: Path) -> None:
        compiled()
        (tmp_path / "file").write_text("not a folder")
        found = in_process(tmp_path / "file")
        assert (found["name"], found["hits"]) == ("numba", 0)
        assert not list((ROOT / "knapspec_edge" / "search").rglob("*.nb?"))

    def test_a_damaged_cache_is_made_anew(self, tmp_path: Path) -> None:
        compiled()
        in_process(tmp_path)
        for pattern in ("*.nbc", "*.nbi"):
            for file in (tmp_path / "numba").rglob(pattern):
                file.write_bytes(b"nonsense")
            assert in_process(tmp_path)["name"] == "numba"
            assert in_process(tmp_path)["hits"] == 1

    @pytest.mark.parametrize(
        ("name", "value"), [("KNAPSPEC_EDGE_NUMBA", "0"), ("NUMBA_DISABLE_JIT", "1")]
    )
    def test_switched_off(self, tmp_path: Path, name: str, value: str) -> None:
        found = in_process(tmp_path, **{name: value})
        assert (found["name"], found["reason"]) == ("numpy", f"{name}={value}")
        assert not found["numba"]

    @pytest.mark.parametrize(
        ("source", "reason"),
        [
            (None, "numba is not installed"),
            ("raise ImportError('Numba needs NumPy 2.5\\n or less')", "NumPy 2.5 or less"),
            ("raise SystemError", "cannot be imported: SystemError"),
            ("import no_such_part", "cannot be imported: No module named 'no_such_part'"),
            (
                "class config: CACHE_DIR = ''\ndef njit(*a, **k): raise RuntimeError('no LLVM')",
                "cannot compile: no LLVM",
            ),
        ],
    )
    def test_numba_that_does_not_work(
        self, tmp_path: Path, source: str | None, reason: str
    ) -> None:
        if source is None:
            found = in_process(tmp_path, HIDDEN)
        else:
            fake = tmp_path / "fake"
            fake.mkdir()
            (fake / "numba.py").write_text(source)
            found = in_process(tmp_path, f"import sys\nsys.path.insert(0, {str(fake)!r})\n")
        assert found["name"] == "numpy"
        assert reason in str(found["reason"])

    def test_while_another_thread_loads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels, "_loaded", None)
        with kernels._lock:
            found = kernels.kernels()
        assert found.implementation == kernels.Implementation("numpy", "numba is not loaded yet")
