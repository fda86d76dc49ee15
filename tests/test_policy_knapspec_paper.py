"""The published method as a policy, on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import naive
import pytest
from test_online import PROMPT, Bench

from knapspec_edge.errors import ContextError, KnapspecError, NativeError
from knapspec_edge.policies.knapspec_paper import PaperPolicy
from knapspec_edge.records import GREEDY


@pytest.mark.parametrize(
    "error", [ContextError("no cells"), NativeError("no finite logit")], ids=["cells", "logits"]
)
def test_a_search_that_fails_ends_searching_not_the_answer(
    error: KnapspecError, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    asked = 0

    @contextmanager
    def branches(*_: Any) -> Iterator[None]:
        nonlocal asked
        asked += 1
        raise error
        yield

    monkeypatch.setattr(type(bench.backend), "branches", branches, raising=False)
    policy = PaperPolicy(bench.backend, bench.book.costs)
    generation = bench.session.generate(PROMPT, max_tokens=900, policy=policy)
    tokens = [event.token for event in generation]
    assert tokens == naive.plain(bench.model, PROMPT, 900, GREEDY)[0]
    assert asked == 1
    assert policy.n_searches == 0
