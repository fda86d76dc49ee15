"""What the programs that compare predictions with measurements share: options, opening, tables."""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from knapspec_edge import gguf_check, models, native  # noqa: E402
from knapspec_edge.config import CTX_TOKENS_MAX, THREADS_MAX  # noqa: E402
from knapspec_edge.errors import KnapspecError, UsageError  # noqa: E402
from knapspec_edge.terminal import Terminal  # noqa: E402

SKIPPED_SHARES = (0.05, 0.6)  # of the sublayers, least and most that a random plan leaves out


def random_plans(
    rng: random.Random, n_sublayers: int, count: int, avoid: Iterable[tuple[int, ...]] = ()
) -> list[tuple[int, ...]]:
    """Sets of sublayers to leave out: distinct, none of `avoid`, sizes even over SKIPPED_SHARES.

    Fewer than `count` where a small model has no more.
    """
    low, high = SKIPPED_SHARES
    least = max(1, round(low * n_sublayers))
    most = max(least, math.floor(high * n_sublayers))
    possible = sum(math.comb(n_sublayers, k) for k in range(least, most + 1))
    seen = set(avoid)
    found: list[tuple[int, ...]] = []
    for _ in range(50 * min(count, possible)):
        if len(found) == count:
            break
        size = min(most, max(least, round(rng.uniform(low, high) * n_sublayers)))
        skipped = tuple(sorted(rng.sample(range(n_sublayers), size)))
        if skipped not in seen:
            seen.add(skipped)
            found.append(skipped)
    return found


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def add_settings(parser: argparse.ArgumentParser) -> None:
    """The options that say how a model is opened."""
    add = parser.add_argument
    add("--flash-attn", default="auto", help="auto, on or off")
    add("--kv-type", default="f16")
    add("--threads", type=int, help="default: one per physical core")
    add("--gpu-layers", type=int, help="default: what fits")


def check_settings(options: argparse.Namespace) -> None:
    """Raises UsageError for what no model can be opened with."""
    ctx = getattr(options, "ctx", None)
    if ctx is not None and not 1 <= ctx <= CTX_TOKENS_MAX:
        raise UsageError(f"--ctx must be in 1..{CTX_TOKENS_MAX}, not {ctx}")
    if options.threads is not None and not 1 <= options.threads <= THREADS_MAX:
        raise UsageError(f"--threads must be in 1..{THREADS_MAX}, not {options.threads}")


@contextmanager
def opened_model(
    options: argparse.Namespace, name: str | Path, terminal: Terminal
) -> Iterator[tuple[Any, gguf_check.GgufInfo]]:
    """The model of a name or path, and what its header says. Raises KnapspecError."""
    info = gguf_check.inspect(models.resolve(str(name)))

    def on_load(share: float) -> bool:
        terminal.progress("load", share)
        return True

    with native.open_model(info.path, gpu_layers=options.gpu_layers, progress=on_load) as model:
        yield model, info


def open_context(options: argparse.Namespace, model: Any, ctx_tokens: int, **more: Any) -> Any:
    """A context with the settings of `add_settings`; a context manager. Raises KnapspecError."""
    return native.open_context(
        model,
        ctx_tokens=ctx_tokens,
        threads=options.threads,
        kv_type=options.kv_type,
        flash_attn=options.flash_attn,
        **more,
    )


def setting(backend: Any, info: gguf_check.GgufInfo) -> dict[str, Any]:
    """What figures depend on beside the options: JSON-ready."""
    library = native.library_info()
    return {
        "model": info.path.name,
        "model_type": info.file_type,
        "settings": dict(backend.settings),
        "devices": [d["description"] for d in library["devices"]],
        "library_digest": library["digest"],
    }


def setting_line(data: dict[str, Any]) -> str:
    """The same for people."""
    settings = data["settings"]
    return (
        f"Model {data['model']} ({data['model_type']}), {', '.join(data['devices'])}, "
        f"{settings['threads']} threads, flash attention {settings['flash_attn']}, "
        f"{settings['kv_type']} keys and values, {settings['ctx_tokens']:,} tokens of context."
    )


def in_json(value: Any) -> Any:
    """The same with null for every number that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): in_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [in_json(item) for item in value]
    return value


def json_line(data: Any) -> str:
    return json.dumps(in_json(data), allow_nan=False, separators=(",", ":"))


def run_guarded(body: Callable[[Terminal], None]) -> int:
    """Run a program; its exit code. What users can cause is said in one line."""
    terminal = Terminal()
    try:
        body(terminal)
    except KnapspecError as error:
        terminal.error(str(error))
        return error.exit_code
    except OSError as error:
        terminal.error(f"cannot write {error.filename}: {error.strerror}")
        return 1
    except KeyboardInterrupt:
        terminal.error("interrupted")
        return 130
    return 0
