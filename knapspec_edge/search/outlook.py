"""What a decision means, in figures: items, the budget curve, the judged plans, and why one won.

Computes from what was measured; measures nothing and lays nothing out. Costs and savings without a
unit are in plain steps at the measured context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

from ..config import DEFAULTS, Config
from ..latency.costs import Costs
from ..latency.fidelity import Losses, Text
from ..records import FULL, SKIP, Draft, ModeKind, Plan, SubLayer
from .candidates import Cut, cuts, draft_lengths
from .judged import Alternative, Measured
from .planner import Decision
from .throughput import can_pay, expected_tokens_geometric

_NAMES = {"mlp": "MLP"}  # kinds that people write otherwise
_LEAST_SLOPE = 0.01  # of a step: no machine verifies a further token for less
_Z95 = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Item:
    """One sublayer: what it costs, and how many picks survive without it."""

    sublayer: SubLayer
    mode: str  # in the best draft, see records.Mode; "full" where there is none
    cost_ms: float
    share: float  # of the step
    agreement: float  # of the single skip, or of its window in the draft, as counted, 0..1
    expected: float  # elsewhere, see latency.fidelity.ItemAgreement
    agreed: int | None  # None: interpolated between sublayers that were probed
    total: int  # picks it was judged on; of an interpolated one those of its neighbours
    interval: tuple[float, float]  # 95 % confidence


@dataclass(frozen=True)
class CurvePoint:
    """The knapsack's plan for one saving, with predictions by the geometric model."""

    plan: Plan
    skipped: Mapping[str, int]  # by kind
    windowed: int  # attention sublayers that read recent tokens only
    saved_share: float  # of the step
    alpha: float  # product of what single skips let expect
    draft_tokens: int  # γ with the best throughput, of 1 or more
    ratio: float  # predicted throughput relative to plain decoding


@dataclass(frozen=True)
class JudgedPlan:
    """A plan whose picks were compared with the target's, with its best draft length."""

    draft: Draft
    skipped: Mapping[str, int]  # by kind
    windowed: int  # attention sublayers that read recent tokens only
    agreement: float
    agreed: int
    total: int  # places it was judged on
    interval: tuple[float, float]  # of the agreement, 95 % confidence
    acceptance: tuple[float, ...]  # p_1..p_γ as far as any round got
    tokens_per_round: float
    drafted_per_round: float
    draft_cost: float  # c
    verify_cost: float  # of the pass over γ + 1 tokens
    verify_slope: float  # s: a further token at the width where it is cheapest
    ratio: float  # predicted speed relative to plain decoding
    geometric_ratio: float  # the same if every place were accepted with the agreement
    timed: bool  # in real rounds

    @property
    def round_cost(self) -> float:
        """A round in plain steps."""
        return self.tokens_per_round / self.ratio


@dataclass(frozen=True)
class Outlook:
    """Everything that a plan at one context was chosen by."""

    context_tokens: int
    policy: str
    state: str  # "on" or "off"
    reason: str  # the decision's own line
    why: str  # one sentence: why it won
    runner_up: str  # one sentence: what came next, and by how much it lost
    disturbed: bool  # the machine was too busy for the figures to be believed
    draft: Draft | None  # the best draft found, also when off
    sublayers: tuple[SubLayer, ...]
    step_ms: float
    head_ms: float  # 0 where it was not measured
    rest_ms: float  # negative where the parts cost less in company than alone
    verify_two: float  # a pass over two tokens, in plain steps; nan where none was measured
    items: tuple[Item, ...]
    curve: tuple[CurvePoint, ...]  # by growing saving
    judged: tuple[JudgedPlan, ...]  # best first
    margin: float  # predicted gain that auto asks for
    text: Text  # the target's own, on which items and plans were judged
    batch_agreement: float  # share in which a pass of several tokens picks what single steps pick
    latency_contexts: tuple[int, ...]  # at which steps were timed
    measured_at: float  # seconds since 1970
    from_cache: bool
    settings: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def window_tokens(self) -> int:
        """Tokens of the text behind its prompt."""
        return len(self.text.window)

    @property
    def best(self) -> JudgedPlan | None:
        return self.judged[0] if self.judged else None

    def front(self, parts: int) -> list[CurvePoint]:
        """The plan with the best prediction in each of so many parts of all savings.

        Shallow parts are finer, as those of candidates.candidate_plans are. Plans whose drafts
        would take as long as a step are left out.
        """
        deepest = max((p.saved_share for p in self.curve), default=0.0)
        chosen: dict[int, CurvePoint] = {}
        for point in self.curve:
            if point.saved_share > 0.0:
                part = min(parts - 1, int(parts * math.sqrt(point.saved_share / deepest)))
                if part not in chosen or point.ratio > chosen[part].ratio:
                    chosen[part] = point
        return [chosen[part] for part in sorted(chosen)]

    def to_json(self) -> dict[str, Any]:
        """Plain data; see apps.plan_report.to_json for what it holds."""
        return {
            "context_tokens": self.context_tokens,
            "policy": self.policy,
            "state": self.state,
            "reason": self.reason,
            "why": self.why,
            "runner_up": self.runner_up,
            "disturbed": self.disturbed,
            "margin": self.margin,
            "plan": None if self.draft is None else _draft_json(self.draft),
            "step_ms": self.step_ms,
            "tokens_per_second": 1000.0 / self.step_ms,
            "head_ms": self.head_ms,
            "rest_ms": self.rest_ms,
            "items": [
                {
                    "index": i.sublayer.index,
                    "layer": i.sublayer.layer,
                    "kind": i.sublayer.kind.value,
                    **{k: v for k, v in asdict(i).items() if k not in ("sublayer", "interval")},
                    "interval": list(i.interval),
                }
                for i in self.items
            ],
            "curve": [
                {
                    "skipped": list(p.plan.skipped),
                    "modes": _other_modes(p.plan),
                    "n_skipped": dict(p.skipped),
                    "n_windowed": p.windowed,
                    "head_rows": p.plan.head_rows,
                    "saved_share": p.saved_share,
                    "alpha": p.alpha,
                    "draft_tokens": p.draft_tokens,
                    "ratio": p.ratio,
                }
                for p in self.curve
            ],
            "judged": [
                {
                    **_draft_json(j.draft),
                    "n_skipped": dict(j.skipped),
                    "n_windowed": j.windowed,
                    "agreement": j.agreement,
                    "agreed": j.agreed,
                    "total": j.total,
                    "interval": list(j.interval),
                    "acceptance": list(j.acceptance),
                    "tokens_per_round": j.tokens_per_round,
                    "drafted_per_round": j.drafted_per_round,
                    "draft_cost": j.draft_cost,
                    "verify_cost": j.verify_cost,
                    "verify_slope": j.verify_slope,
                    "ratio": j.ratio,
                    "geometric_ratio": j.geometric_ratio,
                    "timed": j.timed,
                }
                for j in self.judged
            ],
            "measurement": {
                "window_tokens": self.window_tokens,
                "batch_agreement": self.batch_agreement,
                "latency_contexts": list(self.latency_contexts),
                "measured_at": self.measured_at,
                "from_cache": self.from_cache,
                "settings": dict(self.settings),
            },
            "notes": list(self.notes),
        }


def outlook(
    decision: Decision,
    sublayers: tuple[SubLayer, ...],
    settings: Mapping[str, Any],
    config: Config = DEFAULTS,
    *,
    policy: str = "knapspec",
) -> Outlook:
    """`settings` are those of the context that was measured, `config` the one that decided.

    Raises ValueError for a decision without a measurement.
    """
    measured = decision.measured
    if measured is None:
        raise ValueError("nothing was measured, so there is nothing to show")
    costs, context = measured.costs, measured.context_tokens
    places = {f.judgement.plan: f.judgement.agree for f in decision.finalists}
    judged = tuple(
        _judged(a, places[a.draft.plan], measured, sublayers, config) for a in decision.alternatives
    )
    found = cuts(costs, measured.fidelity, context, sublayers, config)
    return Outlook(
        context_tokens=context,
        policy=policy,
        state=decision.state,
        reason=decision.reason,
        why=_why(decision, judged, config),
        runner_up=_runner_up(decision, judged),
        disturbed=decision.disturbed,
        draft=decision.draft,
        sublayers=sublayers,
        step_ms=measured.step_ms,
        head_ms=costs.head_ms(),
        rest_ms=costs.rest_ms(context),
        verify_two=(
            costs.verify_ms(context, 2) / measured.step_ms if costs.max_width > 1 else math.nan
        ),
        items=_items(measured, sublayers, decision.draft),
        curve=_curve(found, costs, context, sublayers, config),
        judged=judged,
        margin=config.plan_margin,
        text=measured.text,
        batch_agreement=measured.fidelity.batch_agreement,
        latency_contexts=costs.profile.contexts,
        measured_at=costs.profile.measured_at,
        from_cache=decision.from_cache,
        settings=settings,
        notes=tuple(dict.fromkeys(measured.notes)),
    )


def wilson_interval(agreed: float, total: int, z: float = _Z95) -> tuple[float, float]:
    """Confidence interval of a share by Wilson's score; (0, 1) where nothing was counted."""
    if total < 1:
        return 0.0, 1.0
    share, zz = agreed / total, z * z
    middle = (share + zz / (2 * total)) / (1.0 + zz / total)
    half = z / (1.0 + zz / total) * math.sqrt(share * (1 - share) / total + zz / (4 * total**2))
    # at the ends rounding must not leave the share outside
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def count_skipped(plan: Plan, sublayers: Sequence[SubLayer]) -> dict[str, int]:
    """Skipped sublayers of each kind of the model, by the kind's name."""
    counts = {s.kind.value: 0 for s in sublayers}
    for i in plan.skipped:
        counts[sublayers[i].kind.value] += 1
    return counts


def _items(
    measured: Measured, sublayers: tuple[SubLayer, ...], draft: Draft | None
) -> tuple[Item, ...]:
    found = []
    losses = Losses(measured.fidelity, sublayers)
    modes = (FULL,) * len(sublayers) if draft is None else draft.plan.modes
    for i, mode in enumerate(modes):
        item = losses.items(mode if mode.kind is ModeKind.WINDOW else SKIP)[i]
        cost_ms = measured.costs.saving_ms(item.index, measured.context_tokens)
        agreed = item.agreement * item.total
        found.append(
            Item(
                sublayers[item.index],
                str(mode),
                cost_ms,
                cost_ms / measured.step_ms,
                item.agreement,
                item.expected,
                round(agreed) if item.probed else None,
                item.total,
                wilson_interval(agreed, item.total),
            )
        )
    return tuple(found)


def _curve(
    found: Sequence[Cut],
    costs: Costs,
    context: int,
    sublayers: tuple[SubLayer, ...],
    config: Config,
) -> tuple[CurvePoint, ...]:
    step_ms = costs.step_ms(context)
    lengths = draft_lengths(costs, config)
    verify = {g: costs.verify_ms(context, g + 1) / step_ms for g in lengths}
    points = []
    for cut in found:
        draft = costs.draft_ms(cut.plan, context) / step_ms
        ratios = {g: _geometric(cut.agreement, g, draft, verify[g]) for g in lengths}
        gamma = max(ratios, key=lambda g: ratios[g], default=0)
        points.append(
            CurvePoint(
                cut.plan,
                count_skipped(cut.plan, sublayers),
                len(cut.plan.windowed),
                1.0 - draft,
                cut.agreement,
                gamma,
                ratios.get(gamma, 0.0),
            )
        )
    return tuple(points)


def _geometric(alpha: float, gamma: int, draft_cost: float, verify_cost: float) -> float:
    """TPT of the paper with the measured verification, relative to plain decoding."""
    return expected_tokens_geometric(alpha, gamma) / (gamma * draft_cost + verify_cost)


def _judged(
    alternative: Alternative,
    agree: Sequence[bool],
    measured: Measured,
    sublayers: tuple[SubLayer, ...],
    config: Config,
) -> JudgedPlan:
    draft, right = alternative.draft, sum(agree)
    verify = _verification(alternative, measured)
    lengths = draft_lengths(measured.costs, config)
    return JudgedPlan(
        draft,
        count_skipped(draft.plan, sublayers),
        len(draft.plan.windowed),
        alternative.agreement,
        right,
        len(agree),
        wilson_interval(right, len(agree)),
        alternative.acceptance,
        alternative.tokens_per_round,
        alternative.drafted_per_round,
        alternative.draft_cost,
        alternative.verify_cost,
        min((verify(g + 1) - 1.0) / g for g in lengths),
        alternative.predicted_ratio,
        _geometric(
            alternative.agreement,
            draft.max_tokens,
            alternative.draft_cost,
            alternative.verify_cost,
        ),
        alternative.timed,
    )


def _verification(alternative: Alternative, measured: Measured) -> Callable[[int], float]:
    """The curve of the profile, at the height that this plan's rounds gave it."""
    costs, context = measured.costs, measured.context_tokens
    scale = alternative.verify_cost / costs.verify_ms(context, alternative.draft.max_tokens + 1)
    return lambda tokens: max(1.0, scale * costs.verify_ms(context, tokens))


def _why(decision: Decision, judged: Sequence[JudgedPlan], config: Config) -> str:
    reason = decision.reason.removeprefix(f"{decision.state}: ")
    measured = decision.measured
    seen = measured is not None and any(c.points for c in measured.costs.class_costs)
    if not judged or decision.disturbed or not seen:
        return reason
    best = judged[0]
    round_ = (
        f"a round of the best draft yields {best.tokens_per_round:.2f} tokens and costs "
        f"{best.round_cost:.2f} plain steps"
    )
    if decision.state == "on":
        source = "as timed in real rounds" if best.timed else "by the profile"
        return f"{round_}, {source}: {best.ratio:.2f}x of plain decoding"
    if not can_pay(best.agreement, best.draft_cost, best.verify_slope):
        # the limit for any γ, with s where it is smallest
        return (
            f"α = {best.agreement:.2f} of the best draft's picks agree, but drafting a token "
            f"costs c = {best.draft_cost:.2f} and verifying it s = {best.verify_slope:.2f} of a "
            f"step at least: α <= c + s = {best.draft_cost + best.verify_slope:.2f}, so no draft "
            "length gains"
        )
    if best.ratio <= 1.0:
        return f"{round_}: {best.ratio:.2f}x of plain decoding"
    if best.timed and best.ratio < 1.0 + config.plan_margin:
        return (
            f"{round_}: {best.ratio:.2f}x of plain decoding, less than the "
            f"{1.0 + config.plan_margin:.2f}x asked for"
        )
    return reason


def _runner_up(decision: Decision, judged: Sequence[JudgedPlan]) -> str:
    if not judged:
        return "none: no draft could be made"
    best = judged[0]
    if decision.state == "off":
        behind = f"{1.0 - best.ratio:.2f} less" if best.ratio < 1.0 else "not enough of a gain"
        return f"{describe(best)}: {best.ratio:.2f}x, {behind}"
    others = [j for j in judged[1:] if j.ratio > 1.0]
    if not others:
        return f"plain decoding: 1.00x, {best.ratio - 1.0:.2f} less"
    second = others[0]
    behind = (
        f"{best.ratio - second.ratio:.2f} less"
        if second.ratio <= best.ratio
        else "not confirmed in real rounds"
    )
    return f"{describe(second)}: {second.ratio:.2f}x, {behind}"


@dataclass(frozen=True)
class Condition:
    """Under which figures the best draft would pay: α > c + s. All in plain steps."""

    context_tokens: int
    alpha: float  # agreement of the best draft
    draft_cost: float  # c
    verify_slope: float  # s, of a further token at the width where it is cheapest
    verify_two: float  # what a pass over two tokens costs
    slope_needed: float | None  # it pays below this s; None: at none, as c is not below α
    predicted_ratio: float  # of plain decoding

    def sentences(self) -> tuple[str, ...]:
        """What would change the decision, in plain words; each follows from the figures."""
        cost = (
            f"a pass over 2 tokens costs {self.verify_two:.2f} steps here, a further one at least "
            f"s = {self.verify_slope:.2f}; drafting one costs c = {self.draft_cost:.2f} and "
            f"α = {self.alpha:.2f} of them agree: drafts pay only if α > c + s, and "
            f"c + s = {self.draft_cost + self.verify_slope:.2f}"
        )
        if self.slope_needed is None:
            return (
                cost,
                "faster verification alone would not change that: too few sublayers of this model "
                "do little, so its drafts cost too much for what they get right; a larger model "
                "may have more",
            )
        if self.verify_slope < self.slope_needed:
            return (cost,)
        return (
            cost,
            f"this draft would pay with s below {self.slope_needed:.2f}, that is where a pass over "
            f"several tokens is cheaper: weights of another type (F16 instead of a quantized one), "
            "flash attention on or off, a GPU; or with drafts that are cheaper for the same α, "
            "as a larger model may have them",
        )


def condition(shown: Outlook) -> Condition | None:
    """What the best draft lacks, or None where there is no draft."""
    best = shown.best
    if best is None:
        return None
    room = best.agreement - best.draft_cost
    return Condition(
        shown.context_tokens,
        best.agreement,
        best.draft_cost,
        best.verify_slope,
        shown.verify_two,
        room if room >= _LEAST_SLOPE else None,
        best.ratio,
    )


def describe(judged: JudgedPlan) -> str:
    """A draft in a few words: "a draft without 3 attention and 2 MLP sublayers, γ = 4"."""
    parts = [f"{n} {_NAMES.get(kind, kind)}" for kind, n in judged.skipped.items() if n]
    changes = []
    rows = judged.draft.plan.head_rows
    if parts or not (judged.windowed or rows):
        plural = "sublayer" if sum(judged.skipped.values()) == 1 else "sublayers"
        changes.append(f"without {' and '.join(parts) if parts else 'no'} {plural}")
    if judged.windowed:
        changes.append(f"with {judged.windowed} windowed")
    if rows:
        changes.append(f"with {rows:,} rows of the head")
    return f"a draft {', '.join(changes)}, γ = {judged.draft.max_tokens}"


def _other_modes(plan: Plan) -> dict[int, str]:
    """Of what neither runs in full nor is skipped."""
    return {i: str(m) for i, m in enumerate(plan.modes) if m not in (FULL, SKIP)}


def _draft_json(draft: Draft) -> dict[str, Any]:
    return {
        "skipped": list(draft.plan.skipped),
        "modes": _other_modes(draft.plan),
        "head_rows": draft.plan.head_rows,
        "draft_max_tokens": draft.max_tokens,
        "draft_min_probability": draft.min_probability,
    }
