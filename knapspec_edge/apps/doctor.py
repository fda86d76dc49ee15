"""The `doctor` command: what is installed, what this machine offers, and what a model allows.

Works while parts are missing; each missing part is a finding, not a failure of the doctor.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import KnapspecError
from ..search import outlook
from ..search.outlook import Outlook

_PACKAGES = (
    "llama-cpp-python",
    "gguf",
    "numpy",
    "numba",
    "click",
    "rich",
    "prompt_toolkit",
    "platformdirs",
)


def examine(
    model: str | None = None, *, configuration: dict[str, Any] | None = None
) -> dict[str, Any]:
    """All findings, JSON-ready. `problems` holds one line for each thing that keeps the program,
    or the given model, from working; `remarks` what is slower or missing without being wrong.
    `configuration`: path of the configuration file, whether it exists, what is wrong with it.
    """
    problems: list[str] = []
    remarks: list[str] = []
    packages = {name: _version(name) for name in _PACKAGES}
    report: dict[str, Any] = {
        "version": __version__,
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        "platform": {
            "system": platform.platform(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "usable_cpus": _usable_cpus(),
            "threads": _threads(),
        },
        "packages": packages,
        "library": _library(problems),
        "folders": _folders(remarks),
        "search": _search(remarks),
    }
    with_library = not problems
    if configuration is not None:
        report["configuration"] = configuration
        if configuration["problem"] is not None:
            problems.append(configuration["problem"])
    if model is not None:
        report["model"] = _model(model, problems, remarks, with_library=with_library)
    report["problems"] = problems
    report["remarks"] = remarks
    return report


def lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The report as (name, value) rows for people."""
    machine = report["platform"]
    rows = [
        ("knapspec-edge", report["version"]),
        ("Python", f"{report['python']['version']} ({report['python']['executable']})"),
        ("platform", f"{machine['system']}, {machine['usable_cpus']} of {machine['cpus']} CPUs"),
        ("threads", f"{machine['threads']['count']} ({machine['threads']['reason']})"),
    ]
    rows += [(name, version or "missing") for name, version in report["packages"].items()]
    rows += [
        (f"library {name.replace('_', ' ')}", _shown(value))
        for name, value in report["library"].items()
        if name not in ("build", "devices")
    ]
    rows += [
        (f"build {name.replace('_', ' ')}", _shown(value))
        for name, value in report["library"].get("build", {}).items()
    ]
    rows += [
        (
            f"device {device['name']}",
            f"{device['description']} ({device['type']}, {device['free_bytes'] >> 20} of "
            f"{device['total_bytes'] >> 20} MiB free"
            f"{', memory shared with the CPU' if device['unified_memory'] else ''})",
        )
        for device in report["library"].get("devices", [])
    ]
    kernels = report["search"]
    reason = f" ({kernels['reason']})" if kernels["reason"] else ""
    rows.append(("search", f"{kernels['kernels']}{reason}"))
    if configured := report.get("configuration"):
        there = "" if configured["exists"] else " (not there)"
        rows.append(("configuration", f"{configured['path'] or 'none'}{there}"))
    for name, folder in report["folders"].items():
        state = "writable" if folder["writable"] else "not writable"
        free = "" if folder["free_bytes"] is None else f", {folder['free_bytes'] >> 20} MiB free"
        rows.append((f"{name} folder", f"{folder['path']} ({state}{free})"))
    rows += [
        (f"model {name.replace('_', ' ')}", _shown(value))
        for name, value in report.get("model", {}).items()
        if name not in ("placement", "auto")
    ]
    if auto := report.get("model", {}).get("auto"):
        rows.append(("speculation by auto", f"{auto['state']}: {auto['reason']}"))
        rows += [("what would change it", text) for text in auto["changes"]]
    if placed := report.get("model", {}).get("placement"):
        rows += placement_rows(placed)
    return rows


def placement_rows(placed: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows for people about what `native.devices.placement` found."""
    offloaded = placed["offloaded_layers"]
    layers = f"{'unknown' if offloaded is None else offloaded} of {placed['n_layers']}"
    if placed["partial"]:
        layers += ", the CPU computes the others"
    devices = "unknown"
    if placed["devices"]:
        devices = f"{_shown(placed['devices'])} (weights in {_shown(placed['buffers'])})"
    return [
        ("model devices", devices),
        ("model offloaded layers", layers),
    ]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{k} {_shown(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_shown(v) for v in value) or "none"
    return "none" if value is None else str(value)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _usable_cpus() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _threads() -> dict[str, Any]:
    """What decoding uses unless --threads says otherwise, and why."""
    from ..native.threads import choose_threads

    choice = choose_threads()
    return {"count": choice.threads, "reason": choice.reason}


def _library(problems: list[str]) -> dict[str, Any]:
    """What the patched llama.cpp says about itself, or why it could not be asked."""
    try:
        from .. import native

        return {"loaded": True, **native.library_info()}
    except (KnapspecError, ImportError, OSError) as error:
        problem = " ".join(str(error).split())
        if not isinstance(error, KnapspecError):
            problem = f"the patched llama.cpp cannot be used ({problem}); install the package again"
        problems.append(problem)
        return {"loaded": False, "error": problem}


def _search(remarks: list[str]) -> dict[str, Any]:
    """What the search for plans runs on: tried, because an installed Numba may not work."""
    from ..search import kernels

    found = kernels.backend()
    if found.name != "numba":
        remarks.append(f"searching for plans is slower without numba: {found.reason}")
    return {"kernels": found.name, "reason": found.reason}


def _folders(remarks: list[str]) -> dict[str, Any]:
    from ..folders import cache_root
    from ..models import models_folder

    found = {}
    for name, folder in (("cache", cache_root()), ("models", models_folder())):
        writable = _writable(folder)
        if not writable:
            remarks.append(f"the {name} folder {folder} cannot be written: nothing is kept there")
        found[name] = {"path": str(folder), "writable": writable, "free_bytes": _free(folder)}
    return found


def _existing(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _auto(shown: Outlook | None, model: str) -> dict[str, Any]:
    """What `--spec auto` does with the model, why, and what would change it."""
    name = shlex.quote(model)
    if shown is None:
        return {
            "state": "unknown",
            "reason": "nothing was measured on this machine with these settings yet",
            "changes": [
                f"`knapspec-edge plan {name}` measures and explains it, as does the first "
                f"`knapspec-edge run {name}`"
            ],
        }
    needs = outlook.condition(shown)
    age_days = (time.time() - shown.measured_at) / 86400.0
    figures = {} if needs is None else asdict(needs)
    if shown.disturbed or shown.state == "on" or needs is None:
        changes: list[str] = []
    else:
        changes = list(needs.sentences())
    if shown.disturbed:
        changes.append(f"measure again with `knapspec-edge profile {name}` while nothing else runs")
    return {
        "state": shown.state,
        "reason": shown.why,
        "changes": changes,
        "measured_days_ago": round(age_days, 2),
        **figures,
    }


def _writable(folder: Path) -> bool:
    # Asking the file system is the only reliable answer (read-only mounts, quotas, root). A folder
    # that does not exist yet is judged by the nearest one that does.
    try:
        with tempfile.TemporaryFile(dir=_existing(folder)):
            return True
    except OSError:
        return False


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(_existing(folder)).free
    except OSError:
        return None


def _model(
    model: str, problems: list[str], remarks: list[str], *, with_library: bool
) -> dict[str, Any]:
    """What the file is, and whether its sublayers can be left out."""
    from .. import gguf_check, models

    try:
        info = gguf_check.inspect(models.resolve(model))
    except KnapspecError as error:
        problems.append(str(error))
        return {"usable": False}
    found: dict[str, Any] = {
        "usable": True,
        "path": str(info.path),
        "name": info.name,
        "architecture": info.architecture,
        "layers": info.n_layers,
        "trained_context": info.context_length,
        "file_type": info.file_type,
        "size_bytes": info.size_bytes,
        "parameters": info.n_params,
        "tied_embeddings": info.tied_embeddings,
        "chat_template": info.has_chat_template,
        "fingerprint": gguf_check.fingerprint(info),
    }
    if not with_library:
        return found
    from ..engine import Engine
    from ..native.devices import placement

    try:
        # as `chat` and `run` do it, so that what they have measured is found
        with Engine.open(info.path, spec="off", purpose="speculation") as engine:
            backend: Any = engine.backend
            kinds: dict[str, int] = {}
            for sublayer in backend.sublayers:
                kinds[sublayer.kind.value] = kinds.get(sublayer.kind.value, 0) + 1
            found["sublayers"] = kinds or "none found"
            found["speculation"] = backend.refusal or "possible"
            found["placement"] = placement(backend)
            found["settings"] = dict(backend.settings)
            if backend.refusal is not None:
                remarks.append(f"speculation is not possible with this model: {backend.refusal}")
            else:
                found["auto"] = _auto(engine.kept_outlook(), model)
    except KnapspecError as error:
        found["usable"] = False
        problems.append(str(error))
    return found
