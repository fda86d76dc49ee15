"""What passes of a model would cost on a machine that is not here, as a latency profile.

A model is its sublayers and its head, each with the bytes and multiply-adds that it takes. A
machine says what a pass over them costs: from two peak figures (Roofline), or from what was
measured of another model (Scaled). The result is a LatencyProfile like a measured one, so that
everything else is the package's own cost model and search. Times in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import gguf
import make_shape
import numpy as np

from knapspec_edge.config import DEFAULTS, Config
from knapspec_edge.errors import UsageError
from knapspec_edge.gguf_check import GGML_TYPES, GgufInfo
from knapspec_edge.latency.classes import layer_classes
from knapspec_edge.latency.costs import Costs, cells_read
from knapspec_edge.latency.fidelity import Fidelity, ItemAgreement, ItemCount
from knapspec_edge.latency.profile import LatencyProfile, Sample
from knapspec_edge.latency.timing import Timing
from knapspec_edge.records import SKIP, Kind, Plan, SubLayer, Traits
from knapspec_edge.search import candidates
from knapspec_edge.search.throughput import expected_tokens_geometric, tokens_per_ms

# Contexts at which a projected profile says something, beside those that are asked for.
_LADDER = (64, 512, 2048, 8192, 32_768)
_CERTAIN = 1000  # samples that a projected time counts as: it has no noise
_ASSUMED_PLACES = 10**9  # so many that the assumed agreement is the expected one
_BLOCK_BYTES = {name: (weights, n_bytes) for name, weights, n_bytes in GGML_TYPES.values()}
_CUTS = 50  # of the knapsack that are looked at
_SLOPE_WIDTH = 8  # tokens of the pass that s is told from


def tensor_bytes(type_name: str, n_weights: int) -> int:
    """Bytes of so many weights of a ggml type."""
    per_block, block_bytes = _BLOCK_BYTES[type_name]
    return n_weights // per_block * block_bytes


# ---------------------------------------------------------------------------------------------
# Models


@dataclass(frozen=True)
class Part:
    """What one sublayer, or the head, takes in a pass."""

    weight_bytes: int  # read once in a pass
    weights: int  # multiply-adds for each token of a pass
    cell_bytes: int = 0  # keys and values of one token of context
    cell_products: int = 0  # multiply-adds for each token of a pass and each cell


@dataclass(frozen=True)
class Model:
    """A dense decoder: attention and MLP in every layer, then the head."""

    name: str
    file_type: str
    parts: tuple[Part, ...]  # attention 0, MLP 0, attention 1, ...
    head: Part  # the final norm as well
    file_bytes: int  # of all tensors
    n_weights: int

    @property
    def sublayers(self) -> tuple[SubLayer, ...]:
        kinds = (Kind.ATTENTION, Kind.MLP)
        return tuple(SubLayer(i, i // 2, kinds[i % 2]) for i in range(len(self.parts)))

    @property
    def is_float(self) -> bool:
        return self.file_type in ("F16", "BF16", "F32")

    def cache_bytes(self, context_tokens: int) -> int:
        return context_tokens * sum(part.cell_bytes for part in self.parts)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Model:
        """The inverse of dataclasses.asdict. Raises KeyError, TypeError or ValueError."""
        parts = tuple(Part(**part) for part in data["parts"])
        if not parts or len(parts) % 2:
            raise ValueError("not a whole number of layers")
        return cls(**{**data, "parts": parts, "head": Part(**data["head"])})


def of_shape(name: str, shape: make_shape.Shape, file_type: str, kv_type: str) -> Model:
    """The model that scripts/make_shape.py would write."""
    tensors = []
    for tensor, dims in make_shape.tensors(shape):
        type_name = make_shape.tensor_type(tensor, shape, file_type)
        n = math.prod(dims)
        tensors.append((tensor, n, tensor_bytes(type_name, n)))
    heads = (shape.heads, shape.kv_heads, shape.head_width)
    return _of_tensors(name, file_type, tensors, heads, kv_type)


def of_file(info: GgufInfo, kv_type: str) -> Model:
    """The model in a file. Raises UsageError for one that this cannot describe."""

    def number(key: str) -> int:
        text = info.metadata.get(f"{info.architecture}.{key}", "")
        return int(text) if text.isdecimal() else 0

    if info.n_experts or number("attention.sliding_window"):
        raise UsageError(
            f"{info.path.name} has experts or sliding windows: only dense models with full "
            "attention can be scaled"
        )
    heads = number("attention.head_count")
    kv_heads = number("attention.head_count_kv") or heads
    width = number("attention.key_length") or info.embedding_length // max(1, heads)
    tensors = [
        (tensor.name, int(tensor.n_elements), int(tensor.n_bytes))
        for path in info.paths
        for tensor in gguf.GGUFReader(path).tensors
    ]
    name = info.path.name
    return _of_tensors(name, info.file_type, tensors, (heads, kv_heads, width), kv_type)


def _of_tensors(
    name: str,
    file_type: str,
    tensors: Sequence[tuple[str, int, int]],
    heads: tuple[int, int, int],
    kv_type: str,
) -> Model:
    """From (name, weights, bytes) of every tensor and (heads, heads of keys, their width)."""
    n_heads, kv_heads, width = heads
    totals: dict[int, list[int]] = {}
    embedding, head, norm = [0, 0], [0, 0], [0, 0]
    for tensor, n, n_bytes in tensors:
        words = tensor.split(".")
        if words[0] == "blk":
            kind = 0 if "att" in words[2] else 1 if words[2].startswith(("ffn", "post_ff")) else -1
            if kind < 0:
                raise UsageError(f"{name} has {tensor}, which is neither attention nor MLP")
            found = totals.setdefault(2 * int(words[1]) + kind, [0, 0])
        elif words[0] in ("token_embd", "output", "output_norm"):
            found = {"token_embd": embedding, "output": head, "output_norm": norm}[words[0]]
        else:
            continue  # factors of rotary positions and the like
        found[0] += n
        found[1] += n_bytes
    if not totals or len(totals) != max(totals) + 1 or not kv_heads * width:
        raise UsageError(f"{name} has layers without attention or without an MLP")
    cell_bytes = 2 * tensor_bytes(kv_type.upper(), kv_heads * width)
    parts = [
        Part(n_bytes, n, cell_bytes, 2 * n_heads * width) if i % 2 == 0 else Part(n_bytes, n)
        for i, (n, n_bytes) in sorted(totals.items())
    ]
    used = head if head[0] else embedding  # tied: the embedding is the head
    return Model(
        name,
        file_type,
        tuple(parts),
        Part(used[1] + norm[1], used[0] + norm[0]),
        sum(n_bytes for _, _, n_bytes in tensors),
        sum(n for _, n, _ in tensors),
    )


# ---------------------------------------------------------------------------------------------
# Machines


class Machine(Protocol):
    """What a pass costs."""

    @property
    def max_width(self) -> int:
        """The widest pass of which it says anything."""
        ...

    def pass_ms(
        self,
        model: Model,
        context_tokens: int,
        width: int,
        skipped: Collection[int] = (),
        head: bool = True,
    ) -> float:
        """A pass of `width` tokens behind so many, without some sublayers, with or without head."""
        ...


@dataclass(frozen=True)
class Roofline:
    """Each part takes as long as reading its bytes or computing its products, whichever is longer.

    Launching, synchronising and picking cost nothing, and no cache keeps weights. A pass never
    costs less than `least_slope` of a step for each token after the first.
    """

    bytes_per_ms: float
    float_products_per_ms: float  # multiply-adds: half of the operations that makers count
    int_products_per_ms: float  # of quantised weights
    least_slope: float = 0.0
    max_width: int = 32

    @classmethod
    def of(
        cls,
        bandwidth_gbs: float,
        compute_tflops: float,
        compute_int_tops: float,
        least_slope: float = 0.0,
    ) -> Roofline:
        """From GB/s and 10^12 operations a second, all of which are reached."""
        return cls(
            1e6 * bandwidth_gbs, 0.5e9 * compute_tflops, 0.5e9 * compute_int_tops, least_slope
        )

    def pass_ms(
        self,
        model: Model,
        context_tokens: int,
        width: int,
        skipped: Collection[int] = (),
        head: bool = True,
    ) -> float:
        products = self.float_products_per_ms if model.is_float else self.int_products_per_ms
        left_out = set(skipped)
        parts = [part for i, part in enumerate(model.parts) if i not in left_out]
        parts += [model.head] if head else []

        def ms(b: int) -> float:
            cells = cells_read(context_tokens, b)
            return sum(
                max(part.weight_bytes / self.bytes_per_ms, b * part.weights / products)
                + max(
                    cells * part.cell_bytes / self.bytes_per_ms,
                    b * cells * part.cell_products / self.float_products_per_ms,
                )
                for part in parts
            )

        return max(ms(width), ms(1) * (1.0 + self.least_slope * (width - 1)))


@dataclass(frozen=True)
class Scaled:
    """What was measured of one model, in proportion to the bytes of each part of another.

    A pass of several tokens grows as it did there: once for weights, the head and what is fixed,
    once for keys and values.
    """

    attention_ms_per_byte: float  # of weights
    mlp_ms_per_byte: float
    head_ms_per_byte: float
    cell_ms_per_byte: float  # of keys and values
    rest_ms_per_layer: float  # launching the graph and the like
    widths: tuple[int, ...]  # ascending, from 1
    weights_growth: tuple[float, ...]  # time of such a pass in steps; 1 first
    cells_growth: tuple[float, ...]

    @property
    def max_width(self) -> int:
        return self.widths[-1]

    @classmethod
    def of(cls, costs: Costs, model: Model) -> Scaled:
        """From the costs that were measured of a model. Raises UsageError where too little was."""
        contexts = costs.profile.contexts
        near, far = contexts[0], contexts[-1]
        if far < 4 * near:
            raise UsageError(
                f"{model.name} was profiled up to {far} tokens of context only, which does not "
                "tell what keys cost: give --budget or a longer context"
            )
        if costs.blind:
            raise UsageError(f"noise hid what the sublayers of {model.name} cost: raise --budget")

        def spent(kind: Kind, context: int) -> float:
            return sum(costs.saving_ms(s.index, context) for s in model.sublayers if s.kind is kind)

        def size(kind: Kind) -> int:
            return sum(
                part.weight_bytes
                for part, s in zip(model.parts, model.sublayers, strict=True)
                if s.kind is kind
            )

        cells_bytes = model.cache_bytes(1)
        more = (cells_read(far) - cells_read(near)) * cells_bytes
        cell_ms = max(0.0, (spent(Kind.ATTENTION, far) - spent(Kind.ATTENTION, near)) / more)
        keys_ms = cell_ms * cells_read(near) * cells_bytes
        attention_ms = max(0.0, spent(Kind.ATTENTION, near) - keys_ms)
        mlp_ms = spent(Kind.MLP, near)
        # a head that no pass went without costs as much for a byte as an MLP
        head_ms = costs.head_ms() or mlp_ms / size(Kind.MLP) * model.head.weight_bytes
        whole_ms = costs.step_ms(near) - keys_ms
        rest_ms = whole_ms - attention_ms - mlp_ms - head_ms
        # Parts that cost less in company than by themselves are taken in company.
        share = min(1.0, whole_ms / (attention_ms + mlp_ms + head_ms))
        widths = [b for b in costs.profile.widths if b <= costs.max_width]
        low, high = costs.step_ms(near), costs.step_ms(far)
        weights_growth, cells_growth = [], []
        for b in widths:
            low_b, high_b = costs.verify_ms(near, b), costs.verify_ms(far, b)
            weights_growth.append(low_b / low)
            longer = high > 1.1 * low  # else there is nothing to tell it from
            cells_growth.append(
                max(1.0, (high_b - low_b) / (high - low)) if longer else low_b / low
            )
        return cls(
            share * attention_ms / size(Kind.ATTENTION),
            share * mlp_ms / size(Kind.MLP),
            share * head_ms / model.head.weight_bytes,
            cell_ms,
            max(0.0, rest_ms) / (len(model.parts) // 2),
            tuple(widths),
            tuple(weights_growth),
            tuple(cells_growth),
        )

    def pass_ms(
        self,
        model: Model,
        context_tokens: int,
        width: int,
        skipped: Collection[int] = (),
        head: bool = True,
    ) -> float:
        left_out = set(skipped)
        per_byte = (self.attention_ms_per_byte, self.mlp_ms_per_byte)
        weights_ms = self.rest_ms_per_layer * (len(model.parts) // 2)
        cell_bytes = 0
        for i, part in enumerate(model.parts):
            if i not in left_out:
                weights_ms += per_byte[i % 2] * part.weight_bytes
                cell_bytes += part.cell_bytes
        if head:
            weights_ms += self.head_ms_per_byte * model.head.weight_bytes
        cells_ms = self.cell_ms_per_byte * cell_bytes * cells_read(context_tokens, width)
        return weights_ms * float(np.interp(width, self.widths, self.weights_growth)) + (
            cells_ms * float(np.interp(width, self.widths, self.cells_growth))
        )


# ---------------------------------------------------------------------------------------------
# What follows


def project(
    model: Model, machine: Machine, contexts: Iterable[int], config: Config = DEFAULTS
) -> Costs:
    """The costs of a model on a machine: a projected profile, fitted like a measured one."""
    asked = sorted(set(contexts))
    ladder = sorted({*asked, *(c for c in _LADDER if c < asked[-1]), max(1, asked[0] // 2)})
    sublayers = model.sublayers
    signatures = {part: n for n, part in enumerate(dict.fromkeys(model.parts))}
    traits = [Traits(signatures[p], p.weight_bytes, p.cell_bytes) for p in model.parts]
    classes = layer_classes(sublayers, traits, config.profile_classes_per_kind)
    samples = []

    def add(context: int, width: int = 1, skipped: Sequence[int] = (), head: bool = True) -> None:
        left_out = tuple(skipped)
        # without the head, nothing needs the rows of the last MLP either
        idle = left_out if head else (*left_out, len(model.parts) - 1)
        ms = machine.pass_ms(model, context, width, idle, head)
        samples.append(Sample(context, width, left_out, head, Timing(ms, ms, ms, _CERTAIN)))

    widest = min(machine.max_width, config.draft_max_tokens + 1)
    for context in ladder:
        for width in range(1, widest + 1):
            add(context, width)
        for cls in classes:
            add(context, skipped=cls.members[::2])
        add(context, head=False)
    profile = LatencyProfile(
        n_sublayers=len(sublayers),
        classes=classes,
        limit_tokens=ladder[-1],
        samples=tuple(samples),
        settings={},
        budget_seconds=0.0,
        elapsed_seconds=0.0,
        measured_at=0.0,
        notes=("projected, not measured",),
        asked_tokens=ladder[-1],
        asked_width=widest,
    )
    return Costs(profile)


def half_plan(n_sublayers: int) -> Plan:
    """Leaves out every other layer: half of the attention and half of the MLPs."""
    return Plan.skipping(n_sublayers, [i for i in range(n_sublayers) if i // 2 % 2])


@dataclass(frozen=True)
class Speed:
    """Tokens in the time of plain decoding, with the best draft length."""

    ratio: float
    draft_tokens: int


def speed(
    costs: Costs, context_tokens: int, draft_ms: float, alpha: float, config: Config = DEFAULTS
) -> Speed:
    """With one acceptance for every place; below 1 where no draft pays."""
    step_ms = costs.step_ms(context_tokens)
    return max(
        (
            Speed(
                step_ms
                * tokens_per_ms(
                    expected_tokens_geometric(alpha, gamma), gamma, draft_ms, verify_ms
                ),
                gamma,
            )
            for gamma, verify_ms in candidates.verification_ms(
                costs, context_tokens, config
            ).items()
        ),
        key=lambda s: s.ratio,
    )


def verify_slope(costs: Costs, context_tokens: int) -> float:
    """s: what each further token of a pass costs, in plain steps, up to _SLOPE_WIDTH of them."""
    width = min(_SLOPE_WIDTH, costs.max_width)
    growth = costs.verify_ms(context_tokens, width) / costs.step_ms(context_tokens)
    return (growth - 1.0) / (width - 1)


def break_even(
    costs: Costs, context_tokens: int, draft_ms: float, config: Config = DEFAULTS
) -> float | None:
    """The acceptance above which the best draft length gains; None where even 1 does not.

    c + s where verification is a straight line (throughput.can_pay).
    """

    def gains(alpha: float) -> bool:
        return speed(costs, context_tokens, draft_ms, alpha, config).ratio > 1.0

    if not gains(1.0):
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if gains(middle) else (middle, high)
    return high


def assumed_fidelity(costs: Costs, context_tokens: int, half_alpha: float) -> Fidelity:
    """An assumption, not a measurement: drafts that leave out half of the sublayers' time keep
    `half_alpha`, others the power of it that goes with their share, whichever sublayers it is."""
    n = costs.profile.n_sublayers
    sizes = [costs.saving_ms(i, context_tokens) for i in range(n)]
    losses = [-math.log(half_alpha) * size / (0.5 * sum(sizes)) for size in sizes]
    return _fidelity(losses, context_tokens)


def transferred_fidelity(
    items: Sequence[ItemAgreement], source: Sequence[SubLayer], model: Model, context_tokens: int
) -> Fidelity:
    """An assumption, not a measurement: what leaving out a sublayer costs depends on its kind and
    its depth in the network, and on the number of layers in inverse proportion.

    `items` are the single agreements of another model. Raises UsageError where it lacks a kind.
    """
    n_source, n_here = source[-1].layer + 1, len(model.parts) // 2
    losses = [0.0] * len(model.parts)
    for kind in (Kind.ATTENTION, Kind.MLP):
        known = [i for i in items if source[i.index].kind is kind and math.isfinite(i.loss)]
        if not known:
            raise UsageError(f"no {kind.value} was counted in the model of --alpha-from")
        depths = [(source[i.index].layer + 0.5) / n_source for i in known]
        for s in model.sublayers:
            if s.kind is kind:
                loss = np.interp((s.layer + 0.5) / n_here, depths, [i.loss for i in known])
                losses[s.index] = float(loss) * n_source / n_here
    return _fidelity(losses, context_tokens)


def _fidelity(losses: Sequence[float], context_tokens: int) -> Fidelity:
    return Fidelity(
        tuple(
            ItemCount(
                i,
                str(SKIP),
                context_tokens,
                round(math.exp(-loss) * _ASSUMED_PLACES),
                _ASSUMED_PLACES,
            )
            for i, loss in enumerate(losses)
        )
    )


@dataclass(frozen=True)
class Best:
    """The best draft that the package's own search finds under assumed acceptance."""

    ratio: float
    draft_tokens: int
    attention: int  # sublayers left out
    mlp: int
    alpha: float  # assumed
    draft_cost: float  # c


def best_plan(
    costs: Costs,
    context_tokens: int,
    fidelity: Fidelity,
    model: Model,
    config: Config = DEFAULTS,
) -> Best | None:
    """Of the knapsack's cuts that leave out at most half of the sublayers' time, as the published
    method does: beyond, nobody says what is accepted. None where there is none."""
    step_ms = costs.step_ms(context_tokens)
    savings = np.array([costs.saving_ms(i, context_tokens) for i in range(len(model.parts))])
    most_ms = (0.5 + 1e-6) * float(savings.sum())
    found = []
    for cut in candidates.cuts(costs, fidelity, context_tokens, model.sublayers, config):
        saved_ms = float(savings[list(cut.plan.skipped)].sum())
        if saved_ms <= most_ms:
            found.append((cut, step_ms - saved_ms))
    best = None
    for cut, draft_ms in found[:: max(1, len(found) // _CUTS)] + found[-1:]:
        one = speed(costs, context_tokens, draft_ms, cut.agreement, config)
        if best is None or one.ratio > best.ratio:
            n_attention = sum(i % 2 == 0 for i in cut.plan.skipped)
            best = Best(
                one.ratio,
                one.draft_tokens,
                n_attention,
                len(cut.plan.skipped) - n_attention,
                cut.agreement,
                draft_ms / step_ms,
            )
    return best


# ---------------------------------------------------------------------------------------------
# Measurements that are carried from one run to the next

FORMAT = "knapspec-edge measured costs"
VERSION = 1


@dataclass(frozen=True)
class Measured:
    """A model and its latency profile."""

    model: Model
    profile: LatencyProfile


def measured_json(found: Sequence[Measured]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "measured": [{"model": asdict(m.model), "profile": m.profile.to_json()} for m in found],
    }


def measured_from_json(data: Any, path: Path) -> list[Measured]:
    """The inverse. Raises UsageError for anything else."""
    try:
        if data["format"] != FORMAT or data["version"] != VERSION:
            raise ValueError("another format")
        found = []
        for entry in data["measured"]:
            measured = Measured(
                Model.from_json(entry["model"]), LatencyProfile.from_json(entry["profile"])
            )
            if measured.profile.n_sublayers != len(measured.model.parts):
                raise ValueError("another number of sublayers")
            Costs(measured.profile)
            found.append(measured)
        return found
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise UsageError(f"{path} is not a file that --save wrote: measure again") from None
