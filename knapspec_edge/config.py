"""Every tunable of the package, with its unit and the reason for its default."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Defaults. Policy never stands as a literal in a loop; it stands here."""

    # context
    ctx_tokens: int = 4096  # modest by default: 128k-token models must start on an 8 GB laptop
    max_verify_tokens: int = 16  # widest verification pass; its logits rows are all that is reserved
    prefill_slice_tokens: int = 512  # an interrupt on a GPU is noticed between slices
    kept_graphs: int = 12  # allocated graphs kept alive per context

    # drafting
    draft_max_tokens: int = 8  # γ tried by the planner: 1..this
    draft_min_probability: float = 0.7  # the paper's stop threshold

    # first measurement
    measure_budget_seconds: float = 10.0
    measure_context_tokens: int = 256
    measure_window_tokens: int = 48  # tokens on which single-sublayer agreement is judged
    measure_repeats: int = 5
    measure_verify_max: int = 9  # verification cost is measured at 1..this tokens


DEFAULTS = Config()
