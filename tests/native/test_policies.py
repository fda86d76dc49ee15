"""Every policy on a real context: the text is the plain one, bit for bit of what it picks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_tools import load
from stats_identity import check_stats
from test_policies import last_pair

from knapspec_edge import native, policies
from knapspec_edge.config import DEFAULTS
from knapspec_edge.decode.policy import Policy
from knapspec_edge.engine import Engine
from knapspec_edge.errors import ModelError, PlanError, UsageError
from knapspec_edge.policies.lookup import Proposing
from knapspec_edge.records import GREEDY, Grammar, Sampling

plant_model = load("plant_model")

PROMPT = [3, 17, 42, 5, 99, 64, 23, 8, 3, 17, 42, 5, 11]
N_TOKENS = 60
# Little time: what is found matters less here than that it changes nothing.
CONFIG = replace(
    DEFAULTS,
    measure_budget_seconds=1.0,
    measure_max_spread=1e9,
    draft_verify_seconds=1.0,
    draft_verify_new_tokens=8,
    draft_verify_prompt_tokens=16,
    swift_window_tokens=12,
    swift_bayes_interval=8,
    dp_paper_interval_rounds=12,
    clasp_interval_rounds=8,
    draft_model_min_probability=0.0,  # random weights are never sure
)
# Fewer threads than cores, or tests that run beside this one take turns with it.
THREADS = 1


@pytest.fixture(scope="module")
def deep(
    tiny_models: Path, patched_library: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A model of random weights with layers in between that do next to nothing, and the model
    without them: an early exit is seldom right there, leaving out those layers nearly always."""
    source = tiny_models / "llama-dense.gguf"
    target = tmp_path_factory.mktemp("deep") / "deep.gguf"
    assert plant_model.main(
        ["--model", str(source), "-o", str(target), "--insert", "6", "--type", "F32"]
    ) == 0  # fmt: skip
    return target, source


@pytest.fixture
def engine(deep: tuple[Path, Path], tmp_path: Path, monkeypatch: Any) -> Iterator[Engine]:
    monkeypatch.setenv("KNAPSPEC_EDGE_CACHE", str(tmp_path / "cache"))
    target, source = deep
    with Engine.open(
        target, ctx=512, kv_type="f32", flash_attn="off", threads=THREADS, spec="off",
        draft_model=source, config=CONFIG,
    ) as opened:  # fmt: skip
        yield opened


def generate(engine: Engine, policy: Policy | None, sampling: Sampling) -> tuple[list[int], Any]:
    generation = engine.session.generate(
        PROMPT, sampling=sampling, max_tokens=N_TOKENS, policy=policy, is_end=lambda token: False
    )
    tokens = [event.token for event in generation]
    if policy is not None:
        check_stats(generation.stats)
    return tokens, generation.stats


def test_no_policy_changes_the_text(engine: Engine) -> None:
    samplings = (GREEDY, Sampling(temperature=0.7, top_k=50, top_p=0.95, seed=5))
    expected = [generate(engine, None, s)[0] for s in samplings]
    assert expected[0] != expected[1]
    names = list(policies.NAMES)
    try:
        import bayes_opt  # noqa: F401
    except ImportError:
        names = [n for n in names if "extra" not in policies.describe(n).needs]
    drafted: dict[str, int] = {}
    accepted: dict[str, int] = {}
    for name in names:
        policy = engine.create_policy(name, forced=True)
        for sampling, text in zip(samplings, expected, strict=True):
            tokens, stats = generate(engine, policy, sampling)
            assert tokens == text, name
            drafted[name] = drafted.get(name, 0) + stats.draft_n
            accepted[name] = accepted.get(name, 0) + stats.draft_n_accepted
        close = getattr(policy, "close", None)
        if close is not None:
            close()
    silent = {name for name, n in drafted.items() if not n}
    # a lookup finds nothing in a text that never repeats itself
    assert silent <= {"plain", "del", "lookup", "lookup-llama-cpp"}, drafted
    assert sum(accepted.values()) < sum(drafted.values())
    # the model without the planted layers is the same network but for a thousandth
    assert accepted["draft-model"] > 0.9 * drafted["draft-model"] > 0
    assert accepted["clasp"] > 0.5 * drafted["clasp"]


def test_proposals_that_a_grammar_forbids(engine: Engine) -> None:
    """A proposed token is only ever the target's own pick, which the grammar holds to."""
    letters = Sampling(grammar=Grammar("root ::= [a-z ]*"))
    expected, _ = generate(engine, None, letters)

    class Any17(Proposing):
        n = 0

        def propose(self, emitted: Any, most: int) -> Any:
            self.n += 1
            guesses = [expected[len(emitted)], 0, 1, 2] if self.n % 2 else [1, 0, 3, 2]
            return [(token, 1.0) for token in guesses[:most]]

    tokens, stats = generate(engine, Any17(), letters)
    assert tokens == expected
    assert 0 < stats.draft_n_accepted < stats.draft_n


def test_a_draft_model_that_cannot_be_read_is_refused(
    deep: tuple[Path, Path], tmp_path: Path
) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(deep[1].read_bytes()[:5000])
    for file in (cut, "no such model", tmp_path / "missing.gguf"):
        with pytest.raises(ModelError) as caught:
            Engine.open(deep[0], ctx=128, policy="draft-model", draft_model=file, threads=THREADS)
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="needs --draft-model"):
        Engine.open(deep[0], ctx=128, policy="draft-model")


def test_a_draft_model_that_cannot_be_cut_back_is_refused(
    deep: tuple[Path, Path], tiny_models: Path
) -> None:
    mamba = next(tiny_models.glob("mamba*.gguf"))
    with pytest.raises(PlanError, match="cannot draft: it keeps a recurrent state"):
        Engine.open(deep[0], ctx=128, policy="draft-model", draft_model=mamba, threads=THREADS)


def test_the_lookup_of_llama_cpp_is_the_one_of_the_twin(patched_library: Path) -> None:
    find = native.prompt_lookup(2, 10)
    dice = np.random.default_rng(0)
    for _ in range(300):
        text = dice.integers(0, 6, dice.integers(1, 40)).astype(np.intc)
        assert find(text).tolist() == list(last_pair(text))
