"""What is known about a model on this machine, under which keys it is kept, and when it is stale.

Latencies depend on everything that times depend on; fidelity only on the model and the type of its
keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..backend import Backend
from .costs import Costs
from .fidelity import Fidelity
from .profile import LatencyProfile
from .store import INVALID, Store

# Grow when a stored record means something else than before.
_LATENCY = 3
_FIDELITY = 2

ModelKey = str | Mapping[str, Any]


def latency_key(backend: Backend, model_key: ModelKey) -> dict[str, Any]:
    """The size of the context is left out: a profile says how far it reaches."""
    settings = dict(getattr(backend, "settings", {}))
    settings.pop("ctx_tokens", None)
    return {
        "latency": _LATENCY,
        "model": model_key if isinstance(model_key, str) else dict(model_key),
        "settings": settings,
        "sublayers": len(backend.sublayers),
    }


def fidelity_key(backend: Backend, model_key: ModelKey) -> dict[str, Any]:
    settings = getattr(backend, "settings", {})
    model = model_key if isinstance(model_key, str) else model_key.get("model", dict(model_key))
    return {
        "fidelity": _FIDELITY,
        "model": model,
        "kv_type": settings.get("kv_type"),
        "sublayers": len(backend.sublayers),
    }


def load_latency(store: Store, key: Mapping[str, Any], backend: Backend) -> LatencyProfile | None:
    """The stored profile, unless it is damaged (one warning) or was found to be stale."""
    content = store.load(key)
    if content is None or content.get("stale"):
        return None
    try:
        profile = LatencyProfile.from_json(content["profile"])
        if profile.n_sublayers != len(backend.sublayers):
            raise ValueError("another number of sublayers")
        Costs(profile)  # what cannot be fitted was never measured
    except INVALID:
        store.ignore(key)
        return None
    return profile


def save_latency(store: Store, key: Mapping[str, Any], profile: LatencyProfile) -> bool:
    return store.save(key, {"profile": profile.to_json()})


def mark_stale(store: Store, key: Mapping[str, Any], profile: LatencyProfile, reason: str) -> None:
    """The machine no longer behaves as the profile says: it is measured again next time.

    A newer one, which another process may have kept meanwhile, stays as it is.
    """
    content = store.load(key)
    stored = None if content is None else content.get("profile")
    if isinstance(stored, dict) and stored.get("measured_at") == profile.measured_at:
        store.save(key, {"profile": stored, "stale": reason})


def load_fidelity(store: Store, key: Mapping[str, Any], backend: Backend) -> Fidelity:
    """All counts so far; none where nothing usable is stored."""
    content = store.load(key)
    if content is None:
        return Fidelity()
    try:
        return Fidelity.from_json(content, len(backend.sublayers))
    except INVALID:
        store.ignore(key)
        return Fidelity()


def add_fidelity(
    store: Store,
    key: Mapping[str, Any],
    backend: Backend,
    found: Fidelity,
) -> Fidelity:
    """Add a run's counts to what is stored; all of them together."""
    with store.updating():
        known = load_fidelity(store, key, backend)
        total = known.plus(found)
        store.save(key, total.to_json())
    return total
