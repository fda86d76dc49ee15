"""What a policy may use."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..backend import Backend
from ..config import DEFAULTS, Config
from ..decode.loop import Clock
from ..latency.costs import Costs
from ..latency.store import Store
from ..records import Draft

if TYPE_CHECKING:
    from ..latency.drift import DriftTracker
    from ..search.plan_book import PlanBook
    from ..text.vocabulary import Vocabulary


@dataclass(frozen=True)
class Setting:
    """One record for all policies; each takes of it what it needs (catalogue.Description.needs)."""

    backend: Backend
    config: Config = DEFAULTS
    seed: int = 0  # of whatever a policy draws by chance
    costs: Costs | None = None  # of passes and sublayers, as measured
    # the planner's: what is known about plans, whether the machine is as it was, the best draft it
    # found (None: there is none)
    book: PlanBook | None = None
    drift: DriftTracker | None = None
    best: Draft | None = None
    forced: bool = False  # the planner never turns to plain decoding
    lookup: bool = True  # the planner proposes what it finds in the text, where that pays
    calibration: Sequence[int] = ()  # a text to search on
    store: Store = field(default_factory=lambda: Store(enabled=False))
    model_key: Mapping[str, Any] = field(default_factory=dict)  # what found things are kept under
    vocabulary: Vocabulary | None = None  # the target's
    draft_model: str | os.PathLike[str] | None = None  # a name or a GGUF file
    progress: Callable[[float], None] | None = None  # share done of what takes long
    clock: Clock = time.perf_counter
