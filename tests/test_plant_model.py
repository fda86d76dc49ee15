"""scripts/plant_model.py: what is planted where, and what it says; real files are in native/."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import sublayers_of
from hypothesis import given
from hypothesis import strategies as st
from scripted_tools import load

from knapspec_edge.errors import ModelError, UsageError
from knapspec_edge.records import Kind

plant_model = load("plant_model")
Layer, Planted = plant_model.Layer, plant_model.Planted


def run(*arguments: str) -> int:
    return int(plant_model.main(list(arguments)))


def test_items_are_read_once_each_in_execution_order():
    found = plant_model.parse_items(["mlp:4", "attention:9,3,5-6", "attention:3"])
    a, m = Kind.ATTENTION, Kind.MLP
    assert found == [(3, a), (4, m), (5, a), (6, a), (9, a)]
    assert plant_model.parse_items([]) == []


@pytest.mark.parametrize(
    "text", ["attention", "attention:", "head:3", "mlp:3-", "mlp:5-4", "mlp:-1", "mlp:1;2", "3", ""]
)
def test_what_is_no_list_of_sublayers_is_refused(text):
    with pytest.raises(UsageError, match="--plant"):
        plant_model.parse_items([text])


@given(st.integers(2, 80), st.integers(0, 120))
def test_copies_stand_evenly_between_the_original_layers(n_layers, n_inserted):
    layers = plant_model.layout(n_layers, n_inserted)
    assert [layer.source for layer in layers if not layer.inserted] == list(range(n_layers))
    assert not layers[0].inserted
    assert not layers[-1].inserted
    # each behind the layer it is a copy of
    assert [layer.source for layer in layers] == sorted(layer.source for layer in layers)
    copies = [sum(c.inserted and c.source == i for c in layers) for i in range(n_layers)]
    assert sum(copies) == n_inserted
    assert max(copies[:-1]) - min(copies[:-1]) <= 1
    half = sum(copies[: (n_layers - 1) // 2])
    assert abs(half - n_inserted * ((n_layers - 1) // 2) / (n_layers - 1)) <= 1


@pytest.mark.parametrize(("n_layers", "n_inserted"), [(1, 1), (30, 500)])
def test_layers_that_have_no_place_are_refused(n_layers, n_inserted):
    with pytest.raises(UsageError, match="--insert"):
        plant_model.layout(n_layers, n_inserted)


def test_planted_sublayers_are_numbered_as_in_the_written_file():
    layers = [Layer(0), Layer(0, True), Layer(1), Layer(2)]
    items = [(1, Kind.MLP), (2, Kind.ATTENTION)]
    found = plant_model.planted_sublayers(sublayers_of(3), layers, items)
    assert found == [
        Planted(2, 1, "attention", 0, True),
        Planted(3, 1, "mlp", 0, True),
        Planted(5, 2, "mlp", 1, False),
        Planted(6, 3, "attention", 2, False),
    ]


def test_sublayers_that_do_not_exist_or_cannot_be_planted_are_refused():
    with pytest.raises(UsageError, match="no attention 3"):
        plant_model.planted_sublayers(sublayers_of(3), [Layer(0)], [(3, Kind.ATTENTION)])
    with pytest.raises(UsageError, match="block cannot be planted"):
        plant_model.planted_sublayers(sublayers_of(1, parallel=True), [Layer(0, True)], [])


def test_what_ends_a_sublayer():
    plain = [
        "blk.1.attn_output.weight",
        "blk.1.attn_output.bias",
        "blk.1.ffn_down.weight",
        "blk.11.ffn_down.weight",
        "output.weight",
    ]
    assert plant_model.ends(plain, (1, Kind.ATTENTION)) == plain[:2]
    assert plant_model.ends(plain, (1, Kind.MLP)) == plain[2:3]
    experts = ["blk.0.ffn_down_exps.weight", "blk.0.ffn_down_shexp.weight", "blk.0.ffn_up.weight"]
    assert plant_model.ends(experts, (0, Kind.MLP)) == experts[:2]
    # a norm behind the projection would undo what is done to the projection
    normed = [*plain, "blk.1.post_attention_norm.weight", "blk.1.post_ffw_norm.weight"]
    assert plant_model.ends(normed, (1, Kind.ATTENTION)) == normed[-2:-1]
    assert plant_model.ends(normed, (1, Kind.MLP)) == normed[-1:]
    # some architectures have one of the names for a norm in front of the MLP
    assert plant_model.ends(normed[:-1], (1, Kind.ATTENTION)) == plain[:2]
    with pytest.raises(UsageError, match="output projection of mlp 0 is not known"):
        plant_model.ends(["blk.0.ffn_up.weight", "blk.0.ffn_down.bias"], (0, Kind.MLP))


def test_the_record_is_read_as_it_was_written(tmp_path):
    model = tmp_path / "deep.v2.gguf"
    planted = (Planted(2, 1, "attention", 0, True), Planted(5, 2, "mlp", 1, False))
    record = plant_model.Record("deep.v2.gguf", "s.gguf", "F16", 1e-4, 3, 6, (1,), planted)
    plant_model.write_record(record, model)
    assert plant_model.record_path(model) == tmp_path / "deep.v2.planted.json"
    assert plant_model.read_record(model) == record
    assert record.indices == (2, 5)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "plant_model.py"), ("{", "damaged"), ("[]", "damaged"), ('{"format": 1}', "damaged")],
)
def test_a_record_that_cannot_be_read_is_said_in_one_line(content, words, tmp_path):
    model = tmp_path / "x.gguf"
    if content is not None:
        plant_model.record_path(model).write_text(content)
    with pytest.raises(ModelError, match=words) as caught:
        plant_model.read_record(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to plant"),
        (["--insert", "-1", "--plant", "mlp:0"], "--insert"),
        (["--insert", "1", "--factor", "1"], "--factor"),
        (["--insert", "1", "--factor", "nan"], "--factor"),
        (["--plant", "ffn:3"], "--plant"),
        (["-o", "missing/x.gguf", "--insert", "1"], "no folder"),
        (["-o", "x.bin", "--insert", "1"], ".gguf"),
    ],
)
def test_bad_requests_get_one_line(arguments, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "source.gguf").write_bytes(b"GGUF")
    assert run("--model", "source.gguf", "-o", "x.gguf", *arguments) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert [p.name for p in tmp_path.iterdir()] == ["source.gguf"]


@pytest.mark.parametrize("content", [None, b"", b"not a model at all, but long enough to look"])
def test_a_source_that_is_no_model_gets_one_line(content, tmp_path, capsys):
    source = Path(tmp_path / "source.gguf")
    if content is not None:
        source.write_bytes(content)
    assert run("--model", str(source), "-o", str(tmp_path / "x.gguf"), "--insert", "1") == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "x.gguf").exists()
