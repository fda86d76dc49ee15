"""Groups sublayers that cost the same, so that few unknowns describe a deep network.

Mixed quantization, sliding windows, experts and partial offload all show in the signature of a
sublayer (records.Traits); sublayers of one signature form a class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..records import Kind, SubLayer, Traits


@dataclass(frozen=True)
class LayerClass:
    """Sublayers of one kind that do the same work. Bytes are means over the members."""

    name: str  # "attention", or "attention A", "attention B" where there are several
    kind: Kind
    members: tuple[int, ...]  # indices into the sublayers, ascending
    weight_bytes: int
    cell_bytes: int = 0
    n_cells: int = 0
    n_experts: int = 0
    n_experts_used: int = 0
    device: str = ""


def layer_classes(
    sublayers: Sequence[SubLayer], traits: Sequence[Traits], max_per_kind: int
) -> tuple[LayerClass, ...]:
    """One class per kind and signature, in order of first appearance.

    Where a kind has more than `max_per_kind` signatures, those nearest in weight bytes are merged,
    of equal cache and place first. Without traits (an empty sequence) the kind alone decides.
    """
    found = list(traits) or [Traits(0, 0)] * len(sublayers)
    groups: dict[tuple[Kind, int], list[int]] = {}
    for i, (sublayer, trait) in enumerate(zip(sublayers, found, strict=True)):
        groups.setdefault((sublayer.kind, trait.signature), []).append(i)
    by_kind: dict[Kind, list[list[int]]] = {}
    for (kind, _), members in groups.items():
        by_kind.setdefault(kind, []).append(members)
    classes = []
    for kind, parts in by_kind.items():
        merged = _merge(parts, found, max_per_kind)
        for n, members in enumerate(merged):
            name = kind.value if len(merged) == 1 else f"{kind.value} {_letter(n)}"
            classes.append(_describe(name, kind, members, found))
    return tuple(sorted(classes, key=lambda c: c.members[0]))


def _letter(n: int) -> str:
    return chr(ord("A") + n) if n < 26 else str(n + 1)


def _describe(name: str, kind: Kind, members: list[int], traits: list[Traits]) -> LayerClass:
    own = [traits[i] for i in members]
    first = own[0]
    return LayerClass(
        name,
        kind,
        tuple(members),
        weight_bytes=sum(t.weight_bytes for t in own) // len(own),
        cell_bytes=sum(t.cell_bytes for t in own) // len(own),
        n_cells=max(t.n_cells for t in own),
        n_experts=first.n_experts,
        n_experts_used=first.n_experts_used,
        device=first.device,
    )


def _merge(parts: list[list[int]], traits: list[Traits], most: int) -> list[list[int]]:
    parts = [list(p) for p in parts]

    def size(members: list[int]) -> float:
        return sum(traits[i].weight_bytes for i in members) / len(members)

    def distance(a: list[int], b: list[int]) -> tuple[bool, float]:
        first, second = traits[a[0]], traits[b[0]]
        alike = (first.n_cells, first.device, first.n_experts) == (
            second.n_cells, second.device, second.n_experts,
        )  # fmt: skip
        return not alike, abs(size(a) - size(b))

    while len(parts) > max(1, most):
        pairs = [(i, j) for i in range(len(parts)) for j in range(i + 1, len(parts))]
        i, j = min(pairs, key=lambda ij: distance(parts[ij[0]], parts[ij[1]]))
        parts[i] = sorted(parts[i] + parts.pop(j))
    return parts
