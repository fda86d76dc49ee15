"""The `profile` command: measures what passes cost and what sublayers contribute, and keeps it.

Records first; how they are shown is in profile_report and plots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..latency.fidelity import Fidelity
from ..latency.profile import LatencyProfile
from ..records import SubLayer


@dataclass(frozen=True)
class SettingResult:
    """One setting of the context with its latency profile."""

    flash_attn: str  # "on" or "off"
    kv_type: str
    threads: int
    threads_batch: int
    profile: LatencyProfile
    # what it is the best measured setting for, at the expected context: "plain", "speculation"
    best_for: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProfileReport:
    """What one run of the command found. `results` holds the best setting for plain decoding
    first."""

    model: str  # name for people
    path: str
    n_params: int
    size_bytes: int
    device: dict[str, Any]  # where the layers lie, JSON-ready
    sublayers: tuple[SubLayer, ...]
    expected_tokens: int  # context length that `best_for` refers to
    results: tuple[SettingResult, ...]
    fidelity: Fidelity
    threads_ms: dict[str, dict[str, float]]  # threads -> {"step_ms": ..., "pass_ms": ...}
    elapsed_seconds: float
    budget_seconds: float
    kept_in: str | None  # folder of the stored measurement; None where it could not be kept
    interrupted: bool = False
    notes: tuple[str, ...] = field(default=())
