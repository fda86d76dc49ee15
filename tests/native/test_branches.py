"""Branches and hidden states: single sublayers equal the full library, and the text goes on as if
nothing had happened."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import naive_dp
import numpy as np
import pytest
from scripted_tools import load

from knapspec_edge import models
from knapspec_edge.errors import ContextError, DownloadError, Interrupted, NativeError, PlanError
from knapspec_edge.native import open_context, open_model
from knapspec_edge.native.quantize import quantize_file
from knapspec_edge.quantize import converted
from knapspec_edge.records import GREEDY, Plan
from knapspec_edge.search import hidden_state
from knapspec_edge.search.hidden_state import Reference, Settings, latest_reference

make_shape = load("make_shape")

EXACT = {"threads": 1, "kv_type": "f32", "flash_attn": "off"}
# F32 products of another number of rows, or over another number of cells, add up in another order:
# relative to the largest state. BLOOM and its like have few, large states.
TOLERANCE = 2e-4

# What cannot be cut out, by the reason that is given.
REFUSED = {
    "arctic-moe": "reads more than the stream before it",
    "cohere2-dense": "reads more than the stream before it",
    "cohere2moe-moe": "reads more than the stream before it",
    "command-r-dense": "reads more than the stream before it",
    "smallthinker-moe": "reads more than the stream before it",
    "talkie-dense": "something stands between mlp 0 and attention 1",
    "deepseek32-moe": "its cache is of a kind that cannot be shared",
    "dots3note-moe": "its cache is of a kind that cannot be shared",
    "glm-dsa-moe": "its cache is of a kind that cannot be shared",
    "minimax-m3-moe": "its cache is of a kind that cannot be shared",
    "mamba-dense": "keeps a recurrent state",
    "hrm_text-dense": "are not recognised",
    "llada-dense": "does not generate text",
}


def text(n: int, n_vocab: int, seed: int = 3) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(1, n_vocab, n)]


def first_behind(context: Any) -> int:
    """The first sublayer behind the first layer."""
    layers = [s.layer for s in context.sublayers]
    return next(i for i, layer in enumerate(layers) if layer != layers[0])


def alone(context: Any, tokens: list[int], start: int) -> Callable[[frozenset[int]], np.ndarray]:
    """One network by itself: the text before the window, then the window under the plan."""
    n = len(context.sublayers)

    def run(skipped: frozenset[int]) -> np.ndarray:
        context.truncate(start)
        return context.hidden_states(tokens[start:], Plan.skipping(n, skipped))

    return run


def is_close(found: np.ndarray, wanted: np.ndarray) -> bool:
    return float(np.abs(found - wanted).max()) <= TOLERANCE * float(np.abs(wanted).max())


def through(context: Any, start: int, tokens: list[int], plans: list[Plan]) -> list[np.ndarray]:
    """The states of all plans after each sublayer behind the first layer, as branches."""
    first = first_behind(context)
    with context.branches(start, tokens, len(plans)) as branches:
        states = np.stack([branches.embed(first - 1)] * len(plans))
        rows = []
        for i in range(first, len(context.sublayers)):
            applied = branches.apply(i, states)
            keep = [p.skipped for p in plans]
            states = np.stack(
                [states[k] if i in keep[k] else applied[k] for k in range(len(plans))]
            )
            rows.append(states)
    return rows


@pytest.fixture(scope="module")
def tiny_files(patched_library: Path, tiny_models: Path) -> list[Path]:
    return sorted(tiny_models.glob("*.gguf"))


def test_every_architecture_that_is_accepted_gives_the_states_of_the_full_library(
    tiny_files: list[Path],
) -> None:
    """And all DP decisions: each branch alone, through whole passes of one sequence."""
    accepted, wrong = [], []
    for path in tiny_files:
        with open_model(path) as model, open_context(model, ctx_tokens=256, **EXACT) as context:
            if context.branch_refusal is not None:
                continue
            accepted.append(path.stem)
            tokens, start = text(56, context.n_vocab), 50
            n, first = len(context.sublayers), first_behind(context)
            run = alone(context, tokens, start)
            context.prefill(tokens, GREEDY)
            plans = [Plan.full(n), *(Plan.skipping(n, [i]) for i in range(first, n))]
            rows = through(context, start, tokens[start:], plans)
            weights = [1 + i % 2 for i in range(n)]
            settings = Settings(6, -1.0, 1.0, None)
            reference = Reference(start, tuple(tokens[start:]), tuple(tokens[start:]))
            movable = range(first, n)
            found = hidden_state.search(context, reference, weights, settings, movable=movable)
            for k, plan in enumerate(plans):
                wanted = run(frozenset(plan.skipped))
                for i, states in enumerate(rows):
                    if not is_close(states[k], wanted[first + i]):
                        wrong.append(f"{path.stem}, {plan.skipped}, after {first + i}")
            expected = naive_dp.search(
                run, first, weights, movable, min_cosine=-1.0, budget_share=1.0, max_branches=None
            )
            got = {s.skipped_units: frozenset(s.plan.skipped) for s in found.survivors}
            if got != {saving: skipped for saving, (skipped, _) in expected.items()}:
                wrong.append(f"{path.stem}: {got} instead of {expected}")
            for survivor in found.survivors:
                context.truncate(start)
                picks, _ = context.evaluate(tokens[start:], survivor.plan)
                agree = [bool(p == t) for p, t in zip(picks, tokens[start:], strict=True)]
                if list(survivor.judgement.agree) != agree:
                    wrong.append(f"{path.stem}: agreement of {survivor.plan.skipped}")
    assert wrong == []
    assert len(accepted) == 91


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_what_cannot_be_cut_out_is_refused_by_name(
    patched_library: Path, tiny_models: Path, name: str, reason: str
) -> None:
    with (
        open_model(tiny_models / f"{name}.gguf") as model,
        open_context(model, ctx_tokens=256, **EXACT) as context,
    ):
        refusal = context.branch_refusal
        assert refusal is not None
        assert reason in refusal
        assert f"architecture {model.architecture}" in refusal
        assert "\n" not in refusal
        with pytest.raises(PlanError, match=r"no branches with this model: \S"):
            context.branches(0, [1], 1).__enter__()


@pytest.fixture(scope="module", params=[(), ("--experts", "4", "--experts-used", "2")])
def deep(request: pytest.FixtureRequest, patched_library: Path, tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("deep")
    arguments = ["tiny", "--layers", "8", "--type", "F16", "-o", str(folder / "f16.gguf")]
    assert make_shape.main([*arguments, *request.param]) == 0
    quantize_file(folder / "f16.gguf", folder / "f32.gguf", "F32", threads=1)
    return folder / "f32.gguf"


@pytest.mark.parametrize("max_branches", [None, 4])
@pytest.mark.parametrize("min_cosine", [-1.0, 0.9])
def test_a_deeper_search_decides_as_its_naive_twin(
    deep: Path, max_branches: int | None, min_cosine: float
) -> None:
    with open_model(deep) as model, open_context(model, ctx_tokens=256, **EXACT) as context:
        tokens, start = text(60, context.n_vocab), 52
        context.prefill(tokens, GREEDY)
        weights = [2 if s.kind.value == "attention" else 1 for s in context.sublayers]
        settings = Settings(8, min_cosine, 0.5, max_branches)
        reference = Reference(start, tuple(tokens[start:]), tuple(tokens[start:]))
        found = hidden_state.search(context, reference, weights, settings)
        assert found.cost.calls == len(weights) - 2 + 2
        expected = naive_dp.search(
            alone(context, tokens, start),
            2,
            weights,
            hidden_state.movable_indices(context.sublayers),
            min_cosine=min_cosine,
            budget_share=0.5,
            max_branches=max_branches,
        )
        got = {s.skipped_units: frozenset(s.plan.skipped) for s in found.survivors}
        assert got == {saving: skipped for saving, (skipped, _) in expected.items()}
        assert len(got) >= 2
        for survivor in found.survivors:
            assert survivor.cosine == pytest.approx(expected[survivor.skipped_units][1], abs=1e-5)


@pytest.mark.parametrize(
    ("kv_type", "flash_attn", "tolerance"), [("f32", "off", 2e-4), ("f16", "off", 2e-3),
                                             ("f16", "on", 2e-2), ("q8_0", "on", 5e-2)],
)  # fmt: skip
def test_states_with_every_kind_of_attention(
    deep: Path, kv_type: str, flash_attn: str, tolerance: float
) -> None:
    """Sublayers share the nodes that convert the mask."""
    settings = {"threads": 1, "kv_type": kv_type, "flash_attn": flash_attn}
    with open_model(deep) as model, open_context(model, ctx_tokens=256, **settings) as context:
        tokens, start = text(60, context.n_vocab), 52
        context.prefill(tokens, GREEDY)
        n = len(context.sublayers)
        plans = [Plan.skipping(n, skipped) for skipped in ([], [4], [3, 8], [2, 5, 11, 12])]
        rows = through(context, start, tokens[start:], plans)
        run = alone(context, tokens, start)
        for k, plan in enumerate(plans):
            wanted = run(frozenset(plan.skipped))
            for i, states in enumerate(rows):
                largest = float(np.abs(wanted[2 + i]).max())
                assert float(np.abs(states[k] - wanted[2 + i]).max()) <= tolerance * largest


# the text goes on


@pytest.fixture(params=["llama-dense", "gemma3-dense", "qwen3moe-moe", "phi2-dense", "bloom-dense"])
def context(request: pytest.FixtureRequest, tiny_models: Path, patched_library: Path) -> Any:
    path = tiny_models / f"{request.param}.gguf"
    settings: dict[str, Any] = {"ctx_tokens": 256, "repair_interval": 0, **EXACT}
    with open_model(path) as model, open_context(model, **settings) as opened:
        yield opened


def use_branches(context: Any, start: int, tokens: list[int], n_branches: int) -> np.ndarray:
    with context.branches(start, tokens, n_branches) as branches:
        states = np.stack([branches.embed(first_behind(context) - 1)] * n_branches)
        for i in range(first_behind(context), len(context.sublayers)):
            states = branches.apply(i, states)
        branches.head(states)
    return states


def goes_on(context: Any, tokens: list[int], use: Callable[[int], object] | None) -> list[Any]:
    context.truncate(0)
    context.prefill(tokens[:50], GREEDY)
    rows = []
    for i in range(50, len(tokens)):
        if use is not None:
            use(i)
        context.decode(tokens[i], GREEDY)
        rows.append(context.logits())
    return rows


def assert_equal(left: list[Any], right: list[Any]) -> None:
    for a, b in zip(left, right, strict=True):
        assert np.array_equal(a, b)


def test_the_text_goes_on_bit_for_bit(context: Any) -> None:
    tokens = text(70, context.n_vocab)

    def use(i: int) -> None:
        use_branches(context, i - 12, tokens[i - 12 : i - 4], 5)
        use_branches(context, i, tokens[i : i + 3], 3)
        assert context.n_past == i

    assert_equal(goes_on(context, tokens, None), goes_on(context, tokens, use))


def test_the_text_goes_on_after_errors_and_interrupts(context: Any) -> None:
    tokens = text(70, context.n_vocab)
    n = len(context.sublayers)

    def use(i: int) -> None:
        with context.branches(i - 8, tokens[i - 8 : i], 4) as branches:
            states = branches.embed(n - 1)[None]
            context.interrupt()
            with pytest.raises(Interrupted):
                branches.apply(n - 1, states)
        with pytest.raises(ZeroDivisionError), context.branches(i - 8, tokens[i - 8 : i], 4):
            raise ZeroDivisionError
        context.interrupt()
        with (
            pytest.raises(Interrupted),
            context.branches(i - 8, tokens[i - 8 : i], 4) as branches,
        ):
            branches.embed(0)

    assert_equal(goes_on(context, tokens, None), goes_on(context, tokens, use))


def test_ctrl_c_as_branches_open_leaves_none_open(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = text(60, context.n_vocab)
    context.prefill(tokens, GREEDY)
    native = context._lib

    class Pressed:
        """The library, with a press as soon as branches are open."""

        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def knapspec_branch_begin(self, *arguments: Any) -> int:
            assert native.knapspec_branch_begin(*arguments) == 0
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(context, "_lib", Pressed())
        with pytest.raises(KeyboardInterrupt), context.branches(50, tokens[50:], 4):
            pass
    context.decode(tokens[0], GREEDY)
    use_branches(context, 50, tokens[50:], 4)


def test_an_interrupt_from_another_thread_ends_the_search(context: Any) -> None:
    tokens = text(60, context.n_vocab)
    context.prefill(tokens, GREEDY)
    reference = Reference(52, tuple(tokens[52:]), tuple(tokens[52:]))
    timer = threading.Timer(0.05, context.interrupt)
    timer.start()
    n = len(context.sublayers)
    settings, movable = Settings(8, -1.0, 1.0, None), range(first_behind(context), n)

    def search_for_ever() -> None:
        while True:
            hidden_state.search(context, reference, [1] * n, settings, movable=movable)

    with pytest.raises(Interrupted):
        search_for_ever()
    timer.join()
    assert context.n_past == 60
    context.decode(tokens[0], GREEDY)


@pytest.mark.parametrize("flash_attn", ["off", "on"])
@pytest.mark.parametrize("name", ["gemma3-dense", "granite_swa-dense", "muse-glimmer-dense"])
def test_a_sliding_window_gets_its_cells_back(
    tiny_models: Path, patched_library: Path, name: str, flash_attn: str
) -> None:
    """Far beyond the window all cells of its cache are taken. Branches borrow those of positions
    that no pass sees any more; a later cut makes these visible again."""
    settings = {**EXACT, "flash_attn": flash_attn}
    with (
        open_model(tiny_models / f"{name}.gguf") as model,
        open_context(model, ctx_tokens=1600, **settings) as context,
    ):
        tokens = text(1600, context.n_vocab)

        def run(*, used: bool) -> list[Any]:
            context.truncate(0)
            context.prefill(tokens[:1400], GREEDY)
            rows = []
            for i in range(1400, 1430):
                if used and i % 5 == 0:
                    use_branches(context, i - 8, tokens[i - 8 : i], 60)
                    assert context.n_past == i
                context.decode(tokens[i], GREEDY)
                rows.append(context.logits())
            # the longest way back that the window still knows, and on from there
            cut = 1430 - 512
            context.truncate(cut)
            for i in range(cut, cut + 10):
                context.decode(tokens[i], GREEDY)
                rows.append(context.logits())
            return rows

        assert_equal(run(used=False), run(used=True))


def test_a_window_that_no_longer_knows_the_text_is_refused(
    tiny_models: Path, patched_library: Path
) -> None:
    with (
        open_model(tiny_models / "gemma3-dense.gguf") as model,
        open_context(model, ctx_tokens=2048, **EXACT) as context,
    ):
        tokens = text(2000, context.n_vocab)
        context.prefill(tokens, GREEDY)
        with pytest.raises(ContextError):
            use_branches(context, 40, tokens[40:44], 2)
        run = alone(context, tokens[:1980], 1970)
        rows = through(context, 1970, tokens[1970:1980], [Plan.full(len(context.sublayers))])
        assert is_close(rows[-1][0], run(frozenset())[-1])


# what fits


def test_more_branches_than_fit_take_turns(tiny_models: Path, patched_library: Path) -> None:
    with (
        open_model(tiny_models / "llama-dense.gguf") as model,
        open_context(model, ctx_tokens=256, **EXACT) as context,
    ):
        tokens = text(256, context.n_vocab)
        context.prefill(tokens, GREEDY)
        start, window = 226, tokens[226:]
        first, n = first_behind(context), len(context.sublayers)
        given = np.random.default_rng(1).normal(size=(11, 30, context._n_hidden))
        given = given.astype(np.float32)

        def last(states: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            with context.branches(start, window, len(states)) as branches:
                for i in range(first, n):
                    states = branches.apply(i, states)
                return states, *branches.head(states)

        states, picks, probabilities = last(given)  # 4 at a time
        for k in range(11):
            own, pick, probability = last(given[k : k + 1])
            assert is_close(states[k], own[0])
            assert np.array_equal(picks[k], pick[0])
            assert np.allclose(probabilities[k], probability[0], atol=1e-5)


def test_without_cells_there_are_no_branches(tiny_models: Path, patched_library: Path) -> None:
    path = tiny_models / "llama-dense.gguf"
    with open_model(path) as model:
        # the cache is padded to 256 cells
        with open_context(model, ctx_tokens=255, beside_tokens=1, **EXACT) as context:
            tokens = text(255, context.n_vocab)
            context.prefill(tokens, GREEDY)
            with pytest.raises(ContextError, match="no room for 8 more tokens"):
                use_branches(context, 247, tokens[247:], 1)
            context.truncate(240)
            use_branches(context, 232, tokens[232:240], 5)
        with (
            open_context(model, ctx_tokens=256, beside_tokens=0, **EXACT) as context,
            pytest.raises(PlanError, match="no cells beside the text"),
        ):
            context.branches(0, [1], 1).__enter__()


def test_wrong_arguments_are_refused_and_nothing_is_lost(context: Any) -> None:
    tokens = text(20, context.n_vocab)
    context.prefill(tokens, GREEDY)
    n, hidden = len(context.sublayers), context._n_hidden
    for start, window, n_branches in (
        (0, [], 1), (21, [1], 1), (-1, [1], 1), (0, [1] * 65, 1), (0, [1], 0), (0, [1], -3),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="window|branch|context"):
            context.branches(start, window, n_branches).__enter__()
    with pytest.raises(NativeError, match="invalid token"):
        context.branches(0, [context.n_vocab], 1).__enter__()
    with context.branches(10, tokens[10:14], 2) as branches:
        states = branches.embed(n - 1)[None]
        for shape in ((4, hidden), (0, 4, hidden), (1, 3, hidden), (1, 4, hidden + 1)):
            with pytest.raises(ValueError, match="states have the shape"):
                branches.apply(n - 1, np.zeros(shape, dtype=np.float32))
            with pytest.raises(ValueError, match="states have the shape"):
                branches.head(np.zeros(shape, dtype=np.float32))
        for outside in (-1, n):
            with pytest.raises(ValueError, match="outside"):
                branches.apply(outside, states)
            with pytest.raises(ValueError, match="outside"):
                branches.embed(outside)
        with pytest.raises(PlanError, match="first layer"):
            branches.apply(0, states)
        # any float will do, in any order in memory
        double = np.asfortranarray(states.astype(np.float64))
        assert np.array_equal(branches.apply(n - 1, double), branches.apply(n - 1, states))
        for call in (
            lambda: context.decode(1, GREEDY),
            lambda: context.truncate(3),
            lambda: context.fill(30),
            lambda: context.hidden_states([1]),
            lambda: context.branches(0, [1], 1).__enter__(),
        ):
            with pytest.raises(ValueError, match="branches are open"):
                call()
    with pytest.raises(ValueError, match="closed"):
        branches.apply(n - 1, states)
    assert context.n_past == 20
    context.decode(tokens[0], GREEDY)


def test_the_native_side_refuses_by_itself(context: Any) -> None:
    lib, pointer = context._lib, context.pointer
    one = (np.zeros(4096, dtype=np.float32)).ctypes.data_as(lib.knapspec_captured.argtypes[1])
    ids = (np.ones(64, dtype=np.int32)).ctypes.data_as(lib.knapspec_branch_begin.argtypes[2])
    bad = -10
    context.prefill([1, 2, 3], GREEDY)
    assert lib.knapspec_branch_apply(pointer, 1, 1, one, one) == bad
    assert lib.knapspec_branch_embed(pointer, 0, one) == bad
    assert lib.knapspec_branch_head(pointer, 1, one, ids, one) == bad
    assert lib.knapspec_captured(pointer, one, 3) == bad
    for start, n_tokens, n_branches in ((-1, 1, 1), (4, 1, 1), (0, 0, 1), (0, 1, 0), (0, 65, 1)):
        assert lib.knapspec_branch_begin(pointer, start, ids, n_tokens, n_branches) == bad
    assert lib.knapspec_branch_begin(pointer, 0, ids, 2, 1) == 0
    assert lib.knapspec_branch_begin(pointer, 0, ids, 2, 1) == bad
    for sublayer in (-1, 0, len(context.sublayers)):
        assert lib.knapspec_branch_apply(pointer, sublayer, 1, one, one) == bad
    assert lib.knapspec_branch_apply(pointer, len(context.sublayers) - 1, 0, one, one) == bad
    assert lib.knapspec_fill(pointer, 1, 3) == bad
    lib.knapspec_branch_end(pointer)
    lib.knapspec_branch_end(pointer)
    context.decode(1, GREEDY)


def test_a_context_can_be_closed_with_branches_open(
    tiny_models: Path, patched_library: Path
) -> None:
    with open_model(tiny_models / "llama-dense.gguf") as model:
        context = open_context(model, ctx_tokens=256, **EXACT)
        context.prefill([1, 2, 3], GREEDY)
        with context.branches(1, [2, 3], 2) as branches:
            branches.embed(1)
            context.close()
            with pytest.raises(ValueError, match="closed"):
                branches.embed(1)


# hidden states


def test_hidden_states_are_those_of_the_pass(context: Any) -> None:
    """Reading them changes nothing, a skipped sublayer leaves the stream as it was."""
    tokens = text(30, context.n_vocab)
    n = len(context.sublayers)
    context.prefill(tokens[:20], GREEDY)
    plans = [None, Plan.full(n), Plan.skipping(n, [0]), Plan.skipping(n, [n - 1])]
    wanted = []
    for plan in plans:
        context.evaluate(tokens[20:], plan)
        wanted.append(context.logits())
        context.truncate(20)
    for _ in range(2):
        for plan, logits in zip(plans, wanted, strict=True):
            states = context.hidden_states(tokens[20:], plan)
            assert states.shape == (n, 10, context._n_hidden)
            assert np.isfinite(states).all()
            assert np.array_equal(context.logits(), logits)
            for i in (plan or Plan.full(n)).skipped:
                if i:
                    assert np.array_equal(states[i], states[i - 1])
            context.truncate(20)
            context.evaluate(tokens[20:], plan)
            assert np.array_equal(context.logits(), logits)
            context.truncate(20)


def test_hidden_states_of_many_tokens_come_in_slices(context: Any) -> None:
    tokens = text(100, context.n_vocab)
    states = context.hidden_states(tokens)
    assert context.n_past == 100
    context.truncate(0)
    wanted = np.concatenate(
        [context.hidden_states(tokens[:40]), context.hidden_states(tokens[40:])], axis=1
    )
    assert is_close(states, wanted)
    with pytest.raises(ValueError, match="nothing to evaluate"):
        context.hidden_states([])
    with pytest.raises(ContextError, match="--ctx"):
        context.hidden_states([1] * 200)


def test_hidden_states_need_sublayers(tiny_models: Path, patched_library: Path) -> None:
    with (
        open_model(tiny_models / "deepseek4-moe.gguf") as model,
        open_context(model, ctx_tokens=256) as context,
        pytest.raises(PlanError, match="no hidden states"),
    ):
        context.hidden_states([1])


# the demo model


@pytest.fixture(scope="module")
def demo(patched_library: Path) -> Iterator[Any]:
    try:
        path = converted(models.default_model().name, "F32")
    except DownloadError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")
    with open_model(path) as model, open_context(model, ctx_tokens=512, **EXACT) as context:
        yield context


@pytest.mark.model
@pytest.mark.slow
def test_agreement_of_found_plans_is_that_of_the_judge(demo: Any) -> None:
    prompt = demo.model.tokenize("The capital of France is", parse_special=False)
    tokens = list(prompt)
    tokens.append(demo.prefill(prompt, GREEDY).token)
    while demo.n_past < 80:
        tokens.append(demo.decode(tokens[-1], GREEDY).token)
    before = demo.logits()
    reference = latest_reference(tokens, demo.n_past, 8)
    weights = hidden_state.paper_weights([1.0, 1.4] * 30)
    found = hidden_state.search(demo, reference, weights, Settings.bounded())
    assert len(found.survivors) == 7
    assert found.cost.peak_branches == 8
    assert found.survivors[0].judgement.agreement > 0.8
    for survivor in found.survivors:
        ((picks, _, _),) = demo.evaluate_beside([(72, reference.inputs)], survivor.plan)
        agree = tuple(bool(p == t) for p, t in zip(picks, reference.picks, strict=True))
        assert survivor.judgement.agree == agree
    assert demo.n_past == 80
    demo.truncate(79)
    demo.decode(tokens[79], GREEDY)
    assert np.array_equal(demo.logits(), before)
