"""How long a context may be that nobody asked for."""

from __future__ import annotations

from collections.abc import Mapping

from ..config import DEFAULTS, Config


def tokens_that_fit(
    metadata: Mapping[str, str],
    architecture: str,
    kv_type: str,
    *,
    on_gpu: bool,
    weight_bytes: int = 0,
    config: Config = DEFAULTS,
) -> int:
    """Tokens whose keys and values there is memory to spare for; 0 where it is not known.

    They lie where the layers do (`on_gpu`: on a GPU where there is one), and what is free there
    after loading has to do for the rest of the context too. `weight_bytes`: of a model that is not
    loaded yet.
    """
    from ..native import library
    from ..native.context import kv_bytes_per_token

    devices = library.devices()
    gpus = [d for d in devices if "GPU" in d["type"] and on_gpu]
    used = gpus or [d for d in devices if d["type"] == "CPU"]
    most = config.profile_memory_share * sum(d["total_bytes"] for d in used)
    free = sum(d["free_bytes"] for d in used)
    cache_bytes = min(most, max(0, free - weight_bytes) / 2) if free else most
    return int(cache_bytes) // max(1, kv_bytes_per_token(metadata, architecture, kv_type))
