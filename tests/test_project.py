"""scripts/project.py: rooflines worked by hand, sizes, acceptance, what it says and refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pytest
from scripted_tools import load

from knapspec_edge import gguf_check
from knapspec_edge.latency.costs import Costs
from knapspec_edge.latency.fidelity import ItemAgreement
from knapspec_edge.records import Kind, SubLayer
from knapspec_edge.search.throughput import can_pay

make_shape = load("make_shape")
project = load("project")
# those that project.py imported, so that there is one of each class
projection = project.projection
Model, Part, Roofline, Scaled = (
    projection.Model,
    projection.Part,
    projection.Roofline,
    projection.Scaled,
)

# one layer: 10 ms of attention weights, 30 of MLP and 20 of head at 100 bytes/ms
SMALL = Model(
    "small",
    "F16",
    (Part(1000, 500, cell_bytes=4, cell_products=10), Part(3000, 1500)),
    Part(2000, 1000),
    6000,
    3000,
)


@dataclass(frozen=True)
class Straight:
    """A step of 1 ms, half of it saved by leaving out every other layer; verification grows by
    `slope` steps a token."""

    slope: float
    max_width: int = 32

    def pass_ms(
        self,
        model: Model,
        context_tokens: int,
        width: int,
        skipped: Collection[int] = (),
        head: bool = True,
    ) -> float:
        rest = 0.2 if head else 0.1
        step_ms = rest + 0.8 * (1.0 - len(set(skipped)) / len(model.parts))
        return step_ms + self.slope * (width - 1)


def shape_model(name: str, file_type: str = "Q4_K_M") -> Model:
    return projection.of_shape(name, make_shape.SHAPES[name], file_type, "f16")


def run(*arguments: str) -> int:
    return int(project.main(list(arguments)))


# -- rooflines


def test_a_roofline_takes_the_longer_of_reading_and_computing():
    # 100 bytes and 200 products a ms; 255 tokens and the one of the pass are 256 cells
    machine = Roofline(100.0, 200.0, 800.0)
    # weights: 10, 30, 20 ms; keys: max(256 * 4 / 100, 256 * 10 / 200) = max(10.24, 12.8)
    assert machine.pass_ms(SMALL, 255, 1) == pytest.approx(72.8)
    # eight tokens end in the next 256 cells: weights max(10, 20), max(30, 60), max(20, 40);
    # keys max(512 * 4 / 100, 8 * 512 * 10 / 200) = 204.8
    assert machine.pass_ms(SMALL, 255, 8) == pytest.approx(20 + 60 + 40 + 204.8)
    assert machine.pass_ms(SMALL, 255, 1, skipped=[1]) == pytest.approx(42.8)
    assert machine.pass_ms(SMALL, 255, 1, skipped=[0], head=False) == pytest.approx(30.0)
    # quantised weights are computed four times as fast here: reading decides again
    quantised = Model("q", "Q8_0", SMALL.parts, SMALL.head, 6000, 3000)
    assert machine.pass_ms(quantised, 255, 8) == pytest.approx(10 + 30 + 20 + 204.8)


def test_a_least_slope_holds_where_the_figures_would_allow_less():
    machine = Roofline(100.0, 1e9, 1e9, least_slope=0.1)
    step_ms = machine.pass_ms(SMALL, 0, 1)
    assert machine.pass_ms(SMALL, 0, 5) == pytest.approx(1.4 * step_ms)


def test_figures_of_makers_are_turned_into_bytes_and_multiply_adds():
    machine = Roofline.of(bandwidth_gbs=100.0, compute_tflops=10.0, compute_int_tops=40.0)
    assert machine.bytes_per_ms == pytest.approx(100e9 / 1000)
    assert machine.float_products_per_ms == pytest.approx(10e12 / 2 / 1000)
    assert machine.int_products_per_ms == pytest.approx(40e12 / 2 / 1000)


# -- models


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-0.6b", 0.596),
        ("qwen3-1.7b", 1.72),
        ("qwen3-4b", 4.02),
        ("qwen3-8b", 8.19),
        ("qwen3-14b", 14.77),
        ("qwen3-32b", 32.76),
        ("1b", 1.24),
        ("3b", 3.21),
        ("8b", 8.03),
        ("70b", 70.55),
    ],
)
def test_shapes_have_as_many_weights_as_their_models(name, billions):
    assert shape_model(name).n_weights == pytest.approx(1e9 * billions, rel=0.02)
    assert name in project.LABELS


@pytest.mark.parametrize(
    ("name", "file_type", "gigabytes"),  # of files that others published
    [
        ("8b", "Q4_K_M", 4.92),
        ("8b", "Q8_0", 8.54),
        ("8b", "F16", 16.07),
        ("70b", "Q4_K_M", 42.52),
        ("qwen3-8b", "Q4_K_M", 5.03),
        ("qwen3-32b", "Q4_K_M", 19.76),
        ("qwen3-0.6b", "Q8_0", 0.64),
    ],
)
def test_shapes_take_as_many_bytes_as_published_files(name, file_type, gigabytes):
    assert shape_model(name, file_type).file_bytes == pytest.approx(1e9 * gigabytes, rel=0.02)


def test_keys_and_values_of_a_token():
    # Llama 3.1 8B: 32 layers, 8 heads of 128, keys and values of two bytes
    assert shape_model("8b").cache_bytes(1) == 32 * 8 * 128 * 2 * 2


def test_70b_has_values_of_more_bits_as_llama_cpp_gives_them():
    shape = make_shape.SHAPES["70b"]
    kinds = [
        make_shape.tensor_type(f"blk.{i}.attn_v.weight", shape, "Q4_K_M")
        for i in range(shape.layers)
    ]
    assert set(kinds) == {"Q5_K", "Q6_K"}


def test_a_file_is_described_as_the_shape_it_was_made_from(tmp_path, capsys):
    target = tmp_path / "tiny.gguf"
    assert make_shape.main(["tiny", "--type", "Q8_0", "-o", str(target)]) == 0
    capsys.readouterr()
    found = projection.of_file(gguf_check.inspect(target), "f16")
    wanted = projection.of_shape("tiny", make_shape.SHAPES["tiny"], "Q8_0", "f16")
    assert (found.parts, found.head) == (wanted.parts, wanted.head)
    assert (found.file_type, found.file_bytes) == (wanted.file_type, wanted.file_bytes)


def test_a_model_with_experts_is_refused_in_one_line(tmp_path, capsys):
    target = tmp_path / "moe.gguf"
    shape = ["tiny", "--type", "Q8_0", "--experts", "4", "--experts-used", "2"]
    assert make_shape.main([*shape, "-o", str(target)]) == 0
    capsys.readouterr()
    with pytest.raises(project.UsageError, match="only dense models"):
        projection.of_file(gguf_check.inspect(target), "f16")


# -- costs


@pytest.mark.parametrize("name", ["1b", "qwen3-8b"])
def test_projected_costs_are_those_of_the_machine(name):
    """The fit of the latency model adds nothing of its own."""
    model = shape_model(name)
    machine = Roofline.of(50.0, 1.0, 2.0)
    costs = projection.project(model, machine, [512, 8192])
    plan = projection.half_plan(len(model.parts))
    for context in (512, 8192):
        assert costs.step_ms(context) == pytest.approx(machine.pass_ms(model, context, 1))
        assert costs.draft_ms(plan, context) == pytest.approx(
            machine.pass_ms(model, context, 1, plan.skipped), rel=0.01
        )
        for width in (2, 5, 8):
            assert costs.verify_ms(context, width) == pytest.approx(
                machine.pass_ms(model, context, width), rel=0.01
            )
    head_ms = model.head.weight_bytes / machine.bytes_per_ms
    assert costs.head_ms() == pytest.approx(head_ms, rel=0.02)


def test_scaling_what_was_measured_by_bytes_finds_a_machine_that_only_reads():
    reader = Roofline.of(20.0, 1e6, 1e6)
    small, large = shape_model("1b"), shape_model("qwen3-14b")
    scaled = Scaled.of(projection.project(small, reader, [128, 8192]), small)
    assert scaled.rest_ms_per_layer == pytest.approx(0.0, abs=1e-3)
    for model in (small, large):
        for context, width in ((256, 1), (256, 8), (8192, 1), (8192, 8)):
            assert scaled.pass_ms(model, context, width) == pytest.approx(
                reader.pass_ms(model, context, width), rel=0.01
            )
        skipped = projection.half_plan(len(model.parts)).skipped
        assert scaled.pass_ms(model, 8192, 1, skipped) == pytest.approx(
            reader.pass_ms(model, 8192, 1, skipped), rel=0.01
        )


def test_scaling_keeps_how_passes_grew():
    computing = Roofline.of(1e6, 1.0, 1.0)  # nothing but products: eight tokens cost eight steps
    model = shape_model("1b", "Q8_0")
    scaled = Scaled.of(projection.project(model, computing, [128, 8192]), model)
    assert scaled.pass_ms(model, 512, 8) / scaled.pass_ms(model, 512, 1) == pytest.approx(
        8, rel=0.02
    )


def test_a_profile_of_short_contexts_does_not_say_what_keys_cost():
    model = shape_model("1b")
    costs = projection.project(model, Roofline.of(20.0, 1.0, 1.0), [128])
    with pytest.raises(project.UsageError, match="what keys cost"):
        Scaled.of(costs, model)


# -- what follows


@pytest.mark.parametrize(
    ("alpha", "slope", "draft_cost", "ratio", "gamma"),
    [  # S = E(α, γ) / (γ c + 1 + s γ), worked out elsewhere
        (0.9, 0.0, 0.5, 1.38, 3),
        (0.95, 0.1, 0.4, 1.51, 5),
        (0.8, 0.0, 0.6, 1.12, 1),
        (0.95, 0.5, 0.4, 1.03, 1),
    ],
)
def test_speed_with_the_best_draft_length(alpha, slope, draft_cost, ratio, gamma):
    costs = projection.project(SMALL, Straight(slope), [512])
    found = projection.speed(costs, 512, draft_cost * costs.step_ms(512), alpha)
    assert found.ratio == pytest.approx(ratio, abs=0.005)
    assert found.draft_tokens == gamma


@pytest.mark.parametrize(("slope", "draft_cost"), [(0.0, 0.5), (0.1, 0.4), (0.25, 0.6)])
def test_break_even_of_a_straight_line_is_c_plus_s(slope, draft_cost):
    costs = projection.project(SMALL, Straight(slope), [512])
    step_ms = costs.step_ms(512)
    assert projection.verify_slope(costs, 512) == pytest.approx(slope)
    found = projection.break_even(costs, 512, draft_cost * step_ms)
    assert found == pytest.approx(draft_cost + slope, abs=1e-4)
    assert can_pay(found + 1e-3, draft_cost, slope)
    assert not can_pay(found - 1e-3, draft_cost, slope)


def test_break_even_is_never_where_even_certain_drafts_lose():
    costs = projection.project(SMALL, Straight(0.6), [512])
    assert projection.break_even(costs, 512, 0.5 * costs.step_ms(512)) is None


@pytest.mark.parametrize("half_alpha", [0.75, 0.95])
def test_the_best_plan_leaves_out_half_at_most_and_keeps_the_assumed_share(half_alpha):
    model = shape_model("1b")
    costs = projection.project(model, Roofline.of(50.0, 10.0, 10.0), [2048])
    fidelity = projection.assumed_fidelity(costs, 2048, half_alpha)
    best = projection.best_plan(costs, 2048, fidelity, model)
    assert best is not None
    step_ms = costs.step_ms(2048)
    whole = sum(costs.saving_ms(i, 2048) for i in range(len(model.parts))) / step_ms
    share = (1.0 - best.draft_cost) / whole
    assert 0.0 < share <= 0.501
    assert best.alpha == pytest.approx(half_alpha ** (2.0 * share), abs=0.01)


def test_agreement_of_another_model_is_taken_by_kind_and_depth():
    """There, attention is harmless and MLPs are not: so the best plan leaves out attention."""
    source = tuple(SubLayer(i, i // 2, (Kind.ATTENTION, Kind.MLP)[i % 2]) for i in range(4))
    kept = (0.999, 0.5, 0.998, 0.6)
    items = [ItemAgreement(i, share, 1000, True, share) for i, share in enumerate(kept)]
    model = shape_model("1b")
    fidelity = projection.transferred_fidelity(items, source, model, 2048)
    here = fidelity.agreements(model.sublayers)
    # 16 layers here, two there: a sublayer counts an eighth; the first is nearest to the first
    assert here[0].loss == pytest.approx(-math.log(0.999) / 8, rel=1e-3)
    assert here[1].loss == pytest.approx(-math.log(0.5) / 8, rel=1e-3)
    assert here[-1].loss == pytest.approx(-math.log(0.6) / 8, rel=1e-3)
    assert here[0].loss < here[16].loss < here[30].loss
    costs = projection.project(model, Roofline.of(50.0, 10.0, 10.0), [2048])
    best = projection.best_plan(costs, 2048, fidelity, model)
    assert best is not None
    assert best.attention > 0
    assert best.mlp == 0


# -- the program


def test_every_line_of_a_table_says_projected(capsys, tmp_path):
    target = tmp_path / "out.json"
    arguments = ["--device", "rtx4090", "--models", "qwen3-8b", "70b", "--types", "Q4_K_M"]
    assert run(*arguments, "--contexts", "512", "8192", "--json", str(target)) == 0
    shown = capsys.readouterr()
    rows = [line for line in shown.out.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + 4
    assert rows[0].startswith("| projected |")
    assert all("projected" in row for row in rows[2:])
    assert "projected, not measured" in shown.out.splitlines()[0]
    assert "1008 GB/s, of which 75 %" in shown.out
    assert sum("does not fit: 43 GB" in row or "does not fit: 45 GB" in row for row in rows) == 2
    data = json.loads(target.read_text(encoding="utf-8"))
    assert data["projected"] is True
    (source,) = data["sources"]
    assert [row["projected"] for row in source["rows"]] == [True] * 4
    first = source["rows"][0]
    assert first["fits"] is True
    assert [speed["alpha"] for speed in first["speeds"]] == [0.8, 0.9, 0.95]
    assert first["break_even"] == pytest.approx(
        first["draft_cost"] + first["verify_slope"], abs=0.01
    )
    assert source["rows"][2]["fits"] is False
    assert source["rows"][2]["step_ms"] is None


def measured(model: Model, machine: object, path: Path) -> Costs:
    """A file of --save, of which `machine` is the truth."""
    costs = projection.project(model, machine, [64, 512, 2048, 8192])
    data = projection.measured_json([projection.Measured(model, costs.profile)])
    path.write_text(json.dumps(data), encoding="utf-8")
    return costs


def test_a_check_shows_how_far_a_projection_is_off(capsys, tmp_path):
    """The machine reads at 20 GB/s; the figures given say 25."""
    path = tmp_path / "m.json"
    truth = measured(shape_model("1b", "Q8_0"), Roofline.of(20.0, 1.0, 1.0), path)
    given = ["--bandwidth", "25", "--compute", "1.25", "--bandwidth-share", "1"]
    target = tmp_path / "out.json"
    arguments = ["--check", str(path), *given, "--compute-share", "1", "--json", str(target)]
    assert run(*arguments) == 0
    shown = capsys.readouterr()
    assert "median error: t(1) 20 %, t(8) 20 %" in shown.out
    assert shown.out.count(" -20 % ") == 2 * len(project.CHECK_CONTEXTS)
    (comparison,) = json.loads(target.read_text(encoding="utf-8"))["comparisons"]
    seen, guess = comparison["rows"][0]
    assert seen["times_ms"][0] == pytest.approx(truth.step_ms(64))
    assert guess["draft_cost"] == pytest.approx(seen["draft_cost"], rel=0.01)


def test_a_check_against_itself_finds_no_error(capsys, tmp_path):
    path = tmp_path / "m.json"
    measured(shape_model("1b", "Q8_0"), Roofline.of(20.0, 1e3, 1e3), path)
    assert run("--check", str(path), "--profile", str(path)) == 0
    assert "median error: t(1) 0 %, t(8) 0 %" in capsys.readouterr().out


def test_types_of_a_scaled_projection_are_those_that_were_profiled(capsys, tmp_path):
    path = tmp_path / "m.json"
    measured(shape_model("1b", "Q8_0"), Roofline.of(20.0, 1.0, 1.0), path)
    arguments = ["--profile", str(path), "--models", "8b", "--contexts", "512"]
    assert run(*arguments) == 0
    shown = capsys.readouterr().out
    assert "Llama 3.1 8B Q8_0, projected" in shown
    assert "F16, projected" not in shown
    assert run(*arguments, "--types", "F16") == 2
    assert "no profile of type F16" in capsys.readouterr().err


def test_the_list_names_every_model_and_device(capsys):
    assert run("--list") == 0
    shown = capsys.readouterr().out
    assert all(f"| {name} |" in shown for name in (*project.LABELS, *project.DEVICES))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--device NAME"),
        (["--device", "abacus"], "--device abacus"),
        (["--bandwidth", "100"], "give both"),
        (["--bandwidth", "0", "--compute", "1"], "--bandwidth"),
        (["--bandwidth", "nan", "--compute", "1"], "--bandwidth"),
        (["--device", "pi5", "--bandwidth-share", "1.5"], "--bandwidth-share"),
        (["--device", "pi5", "--models", "9b"], "--models 9b"),
        (["--device", "pi5", "--types", "Q9"], "--types Q9"),
        (["--device", "pi5", "--kv-type", "q3"], "--kv-type q3"),
        (["--device", "pi5", "--contexts", "0"], "--contexts"),
        (["--device", "pi5", "--alpha", "1.1"], "--alpha"),
        (["--device", "pi5", "--alpha-half", "1"], "--alpha-half"),
        (["--device", "pi5", "--verify-slope", "-1"], "--verify-slope"),
        (["--device", "pi5", "--gamma", "0"], "--gamma"),
        (["--device", "pi5", "--json", "nowhere/x.json"], "no folder"),
        (["--profile", "missing.json"], "missing.json"),
        (["--profile", "missing.gguf"], "missing.gguf"),
    ],
)
def test_bad_arguments_get_one_line(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) != 0
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}', "null"])
def test_a_damaged_file_gets_one_line(text, capsys, tmp_path):
    path = tmp_path / "m.json"
    path.write_text(text, encoding="utf-8")
    assert run("--profile", str(path)) == 2
    shown = capsys.readouterr()
    assert "not a file that --save wrote" in shown.err
    assert shown.err.count("\n") == 1
