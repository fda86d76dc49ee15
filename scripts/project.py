"""Project what self-speculation would gain for published model shapes, on machines not at hand.

    python scripts/project.py --device rtx4090 --device m4-max --types F16 Q4_K_M
    python scripts/project.py --bandwidth 100 --compute 1.2 --compute-int 4.8 --models 8b qwen3-8b
    python scripts/project.py --profile model-Q8_0.gguf --save measured.json    # scaled by bytes
    python scripts/project.py --profile measured.json --contexts 2048 8192
    python scripts/project.py --profile small.gguf --check large.gguf    # projected and measured
    python scripts/project.py --list

Costs come from peak figures of a machine (a roofline) or, scaled by bytes, from a profile that was
measured here. They go through the same cost model and search as measured ones. Acceptance is an
assumption throughout: no text is computed. Nothing here is a measurement, and every line says so;
--check shows how far such a projection is from what is measured of models that are here.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import _measuring as measuring  # noqa: E402
import _projection as projection  # noqa: E402
from _devices import DEVICES, Device  # noqa: E402
from _projection import Machine, Measured, Model, Roofline, Scaled  # noqa: E402
from make_shape import FILE_TYPES, SHAPES  # noqa: E402

from knapspec_edge import gguf_check, native  # noqa: E402
from knapspec_edge.config import CTX_TOKENS_MAX, DEFAULTS, Config  # noqa: E402
from knapspec_edge.errors import PlanError, UsageError  # noqa: E402
from knapspec_edge.latency import kept  # noqa: E402
from knapspec_edge.latency.costs import Costs  # noqa: E402
from knapspec_edge.latency.fidelity import Fidelity, ItemAgreement  # noqa: E402
from knapspec_edge.latency.profiler import measure_latency  # noqa: E402
from knapspec_edge.latency.store import Store  # noqa: E402
from knapspec_edge.records import SubLayer  # noqa: E402
from knapspec_edge.terminal import Terminal  # noqa: E402

# Of SHAPES: published models, dense ones.
LABELS = {
    "qwen3-0.6b": "Qwen3 0.6B",
    "qwen3-1.7b": "Qwen3 1.7B",
    "qwen3-4b": "Qwen3 4B",
    "qwen3-8b": "Qwen3 8B",
    "qwen3-14b": "Qwen3 14B",
    "qwen3-32b": "Qwen3 32B",
    "1b": "Llama 3.2 1B",
    "3b": "Llama 3.2 3B",
    "8b": "Llama 3.1 8B",
    "70b": "Llama 3.1 70B",
}
TYPES = ("F16", "Q8_0", "Q4_K_M")
CONTEXTS = (512, 2048, 8192, 16_384, 32_768)
CHECK_CONTEXTS = (64, 512, 2048, 8192)
CHECK_WIDTHS = (1, 8)
CHECK_ALPHA = 0.9
ALPHAS = (0.8, 0.9, 0.95)
# Acceptance where half of the sublayers' time is left out: what SmolLM2-135M keeps by the judged
# plans of docs/plans.md (0.49 with 25 of 60 sublayers left out), and what the published method
# reports for large models (0.935 to 0.97).
HALF_ALPHAS = (0.4, 0.95)
_ROOM_TOKENS = 40  # of a context, behind the longest one that is measured
_WIDTH_MEASURED = 16


# ---------------------------------------------------------------------------------------------
# Machines


@dataclass(frozen=True)
class Source:
    """A machine, for some file types, and what is to be known about it."""

    label: str
    machines: dict[str, Machine]  # by file type
    memory_bytes: float
    note: str


def roofline_source(
    device: Device,
    types: Sequence[str],
    bandwidth_share: float | None,
    compute_share: float | None,
    least_slope: float,
) -> Source:
    """A share that is None is the device's own; see Roofline for `least_slope`."""
    memory = device.bandwidth_share if bandwidth_share is None else bandwidth_share
    compute = device.compute_share if compute_share is None else compute_share
    machine = Roofline.of(
        memory * device.bandwidth_gbs,
        compute * device.compute_tflops,
        compute * device.compute_int_tops,
        least_slope,
    )
    slope = (
        f"s is taken to be at least {least_slope:g}."
        if least_slope
        else "s is the least there can be; kernels need more (--verify-slope)."
    )
    note = (
        f"{device.label}: a roofline from {device.bandwidth_gbs:g} GB/s, of which "
        f"{100 * memory:g} % are assumed to be reached, and {device.compute_tflops:g} TFLOP/s for "
        f"F16 weights and keys, {device.compute_int_tops:g} for quantised weights, of which "
        f"{100 * compute:g} % ({device.source}). Launching work, unpacking weights and picking "
        f"tokens are taken to cost nothing. {slope}"
    )
    memory_bytes = 1e9 * device.memory_gb
    return Source(device.label, dict.fromkeys(types, machine), memory_bytes, note)


def scaled_source(measured: Sequence[Measured]) -> Source:
    """This machine, by file type. Raises UsageError where a type comes twice."""
    machines: dict[str, Machine] = {}
    for m in measured:
        if m.model.file_type in machines:
            raise UsageError(f"two profiles of type {m.model.file_type}: give one for each type")
        machines[m.model.file_type] = Scaled.of(Costs(m.profile), m.model)
    names = ", ".join(m.model.name for m in measured)
    note = (
        f"Scaled from what was measured of {names}: time for a byte of weights (attention, MLP "
        "and head apart), for a byte of keys and values, and for what is fixed in a layer; wider "
        "passes grow as they did there. A source of like size misleads least. Whether a model fits "
        "the memory is not looked at."
    )
    return Source(f"{names}, scaled", machines, math.inf, note)


# ---------------------------------------------------------------------------------------------
# Measuring what there is


def measured_of(
    options: argparse.Namespace, name: str, longest: int, terminal: Terminal
) -> list[Measured]:
    """What a file of --save holds, or the profile of a model: the stored one where it reaches so
    far (not with --fresh), else a new one, which is not stored. Raises KnapspecError."""
    path = Path(name)
    if path.suffix == ".json":
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, RecursionError):
            data = None
        return projection.measured_from_json(data, path)
    with measuring.opened_model(options, name, terminal) as (model, info):
        described = projection.of_file(info, options.kv_type)
        width = max(_WIDTH_MEASURED, options.gamma + 1)
        with measuring.open_context(
            options, model, longest + _ROOM_TOKENS, max_verify_tokens=width
        ) as backend:
            if backend.refusal is not None:
                raise PlanError(f"{info.path.name}: {backend.refusal}")
            with backend.interruptible():
                return [Measured(described, _profile(options, backend, info, longest, terminal))]


def _profile(
    options: argparse.Namespace,
    backend: Any,
    info: gguf_check.GgufInfo,
    longest: int,
    terminal: Terminal,
) -> Any:
    if not options.fresh:
        model_key = {"model": gguf_check.fingerprint(info), **native.machine_key()}
        key = kept.latency_key(backend, model_key)
        stored = kept.load_latency(Store(warn=terminal.warning), key, backend)
        wide_enough = stored is not None and stored.widths[-1] > options.gamma
        if stored is not None and wide_enough and stored.limit_tokens >= longest:
            return stored
    profile = measure_latency(
        backend,
        budget_seconds=options.budget,
        progress=lambda share: terminal.progress(f"measuring {info.path.name}", share),
    )
    terminal.clear_progress()
    return profile


def kept_agreements(
    options: argparse.Namespace, name: str, terminal: Terminal
) -> tuple[tuple[ItemAgreement, ...], tuple[SubLayer, ...], str]:
    """What `profile` counted of a model: agreement for each sublayer, the sublayers, its name."""
    with (
        measuring.opened_model(options, name, terminal) as (model, info),
        measuring.open_context(options, model, 256) as backend,
    ):
        key = kept.fidelity_key(backend, {"model": gguf_check.fingerprint(info)})
        found = kept.load_fidelity(Store(warn=terminal.warning), key, backend)
        if not found.counts:
            raise UsageError(
                f"nothing was counted of {info.path.name} yet: knapspec-edge profile {name}"
            )
        return found.agreements(backend.sublayers), backend.sublayers, info.path.name


# ---------------------------------------------------------------------------------------------
# Projections


@dataclass(frozen=True)
class Row:
    """One model of one type at one context on one machine. Costs in plain steps but for step_ms."""

    machine: str
    model: str
    file_type: str
    context_tokens: int
    needed_bytes: int  # weights and keys
    fits: bool  # else nothing more is said
    step_ms: float = math.nan
    attention_share: float = math.nan
    draft_cost: float = math.nan  # c, with every other layer left out
    verify_slope: float = math.nan  # s, up to 8 tokens
    break_even: float | None = None  # α, for that draft
    speeds: tuple[tuple[float, projection.Speed], ...] = ()  # by assumed α, for that draft
    best: tuple[projection.Best | None, ...] = ()  # of the search, one for each assumption


@dataclass(frozen=True)
class Assumption:
    """Where acceptance comes from, which nothing here measures."""

    half_alpha: float = HALF_ALPHAS[-1]
    items: tuple[ItemAgreement, ...] = ()  # of another model, where there are any
    sublayers: tuple[SubLayer, ...] = ()
    name: str = ""

    @property
    def label(self) -> str:
        return f"α from {self.name}" if self.items else f"α={self.half_alpha:g} at half"

    @property
    def text(self) -> str:
        if self.items:
            return (
                f"Best plan, {self.label}: what single sublayers of it were counted to keep, by "
                "kind and depth, divided among as many layers as there are, and multiplied. "
                "Another model may well differ."
            )
        return (
            f"Best plan, {self.label}: {self.half_alpha:g} where half of the sublayers' time is "
            "left out, and the power of it that goes with other shares, whichever sublayers it is."
        )

    def fidelity(self, costs: Costs, context_tokens: int, model: Model) -> Fidelity:
        if self.items:
            return projection.transferred_fidelity(
                self.items, self.sublayers, model, context_tokens
            )
        return projection.assumed_fidelity(costs, context_tokens, self.half_alpha)


def rows_of(
    source: Source,
    models: Sequence[Model],
    contexts: Sequence[int],
    alphas: Sequence[float],
    assumed: Sequence[Assumption],
    config: Config = DEFAULTS,
) -> Iterator[Row]:
    """All combinations, models outermost."""
    for model in models:
        costs = projection.project(model, source.machines[model.file_type], contexts, config)
        plan = projection.half_plan(len(model.parts))
        for context in contexts:
            needed = model.file_bytes + model.cache_bytes(context)
            row = Row(source.label, model.name, model.file_type, context, needed, False)
            if needed > source.memory_bytes:
                yield row
                continue
            step_ms, draft_ms = costs.step_ms(context), costs.draft_ms(plan, context)
            yield replace(
                row,
                fits=True,
                step_ms=step_ms,
                attention_share=costs.share(["attention"], context),
                draft_cost=draft_ms / step_ms,
                verify_slope=projection.verify_slope(costs, context),
                break_even=projection.break_even(costs, context, draft_ms, config),
                speeds=tuple(
                    (alpha, projection.speed(costs, context, draft_ms, alpha, config))
                    for alpha in alphas
                ),
                best=tuple(
                    projection.best_plan(
                        costs, context, a.fidelity(costs, context, model), model, config
                    )
                    for a in assumed
                ),
            )


def speed_text(ratio: float, draft_tokens: int) -> str:
    """Off where no draft pays, as the program does it."""
    return f"{ratio:.2f} ({draft_tokens})" if ratio > 1.0 else "off"


def best_text(best: projection.Best | None, assumption: Assumption) -> str:
    if best is None or best.ratio <= 1.0:
        return "off"
    found = f"{speed_text(best.ratio, best.draft_tokens)}: α {best.alpha:.2f}"
    if not assumption.items:  # then any sublayers do
        return found
    return f"{found}, {best.attention} attention, {best.mlp} MLP left out"


def table_of(
    rows: Sequence[Row], alphas: Sequence[float], assumed: Sequence[Assumption]
) -> list[str]:
    heads = [
        "projected",
        "context",
        "step, ms",
        "attention",
        "c",
        "s",
        "pays from α",
        *(f"S at α={alpha:g} (γ)" for alpha in alphas),
        *(f"S of the best plan (γ), {a.label}" for a in assumed),
    ]
    lines = []
    for row in rows:
        name = [f"{row.model} {row.file_type}, projected", f"{row.context_tokens:,}"]
        if not row.fits:
            gb = row.needed_bytes / 1e9
            lines.append([*name, f"does not fit: {gb:.0f} GB", *["–"] * (len(heads) - 3)])
            continue
        lines.append(
            [
                *name,
                f"{row.step_ms:.4g}",
                f"{100 * row.attention_share:.0f} %",
                f"{row.draft_cost:.2f}",
                f"{row.verify_slope:.2f}",
                "never" if row.break_even is None else f"{row.break_even:.2f}",
                *(speed_text(s.ratio, s.draft_tokens) for _, s in row.speeds),
                *map(best_text, row.best, assumed),
            ]
        )
    return measuring.table(heads, lines)


def assumptions(
    source: Source, assumed: Sequence[Assumption], options: argparse.Namespace
) -> list[str]:
    return [
        source.note,
        f"Shapes from the published config.json, types mixed as llama.cpp's quantizer does it, "
        f"{options.kv_type} keys and values, one sequence.",
        "c: a draft step with every other layer left out, in plain steps; s: what each further "
        "token of a verification costs, up to 8; α: share of drafted tokens that are accepted, the "
        "same at every place; S: speed-up over plain decoding with the best draft length γ, "
        f"1 to {options.gamma}; off: no draft pays.",
        "The columns S at α=… take α as given, for the draft of c. Whether a model reaches it, "
        "only a measurement tells.",
        *(a.text for a in assumed),
        "The best plan leaves out at most half of the sublayers' time. Searching, judging plans "
        "and prompts are not counted.",
    ]


# ---------------------------------------------------------------------------------------------
# --check


@dataclass(frozen=True)
class Figures:
    """What is compared, at one context."""

    context_tokens: int
    times_ms: tuple[float, ...]  # of passes of CHECK_WIDTHS
    draft_cost: float
    verify_slope: float
    speed: float  # at α = CHECK_ALPHA; 1 where no draft pays

    @classmethod
    def of(cls, costs: Costs, context_tokens: int, config: Config = DEFAULTS) -> Figures:
        plan = projection.half_plan(costs.profile.n_sublayers)
        draft_ms = costs.draft_ms(plan, context_tokens)
        best = projection.speed(costs, context_tokens, draft_ms, CHECK_ALPHA, config)
        return cls(
            context_tokens,
            tuple(costs.verify_ms(context_tokens, width) for width in CHECK_WIDTHS),
            draft_ms / costs.step_ms(context_tokens),
            projection.verify_slope(costs, context_tokens),
            max(1.0, best.ratio),
        )


@dataclass(frozen=True)
class Comparison:
    """Projections of one model against what was measured of it."""

    model: str
    source: str
    rows: tuple[tuple[Figures, Figures], ...]  # (measured, projected)

    def errors(self, place: int) -> list[float]:
        """Projected over measured time of a pass of CHECK_WIDTHS[place], minus one."""
        return [p.times_ms[place] / m.times_ms[place] - 1.0 for m, p in self.rows]


def compare(
    target: Measured, source: Source, contexts: Sequence[int], config: Config = DEFAULTS
) -> Comparison | None:
    """None where the source says nothing about the target's type, or the profile not enough."""
    machine = source.machines.get(target.model.file_type)
    measured = Costs(target.profile)
    within = [c for c in contexts if c <= target.profile.limit_tokens]
    if machine is None or not within or measured.max_width < CHECK_WIDTHS[-1]:
        return None
    projected = projection.project(target.model, machine, within, config)
    rows = tuple(
        (Figures.of(measured, c, config), Figures.of(projected, c, config)) for c in within
    )
    return Comparison(target.model.name, source.label, rows)


def comparison_lines(comparison: Comparison) -> list[str]:
    heads = ["context"]
    for width in CHECK_WIDTHS:
        heads.append(f"t({width}), ms: measured, projected")
        heads.append("error")
    heads += [
        f"{name}: measured, projected"
        for name in ("c", "s", f"S at α={CHECK_ALPHA:g} (both computed)")
    ]
    lines = []
    for measured, projected in comparison.rows:
        line = [f"{measured.context_tokens:,}"]
        for ms, guess in zip(measured.times_ms, projected.times_ms, strict=True):
            line += [f"{ms:.4g}, {guess:.4g}", f"{100 * (guess / ms - 1.0):+.0f} %"]
        for name in ("draft_cost", "verify_slope", "speed"):
            pair = (getattr(measured, name), getattr(projected, name))
            line.append(", ".join(f"{value:.2f}" for value in pair))
        lines.append(line)
    medians = ", ".join(
        f"t({width}) {100 * statistics.median(map(abs, comparison.errors(i))):.0f} %"
        for i, width in enumerate(CHECK_WIDTHS)
    )
    return [
        f"{comparison.model}, projected from {comparison.source}; median error: {medians}",
        "",
        *measuring.table(heads, lines),
    ]


# ---------------------------------------------------------------------------------------------
# The program


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", action="append", default=[], metavar="NAME", help="see --list; repeatable")
    add("--bandwidth", type=float, metavar="GB/s", help="of a machine of your own")
    add("--compute", type=float, metavar="TFLOP/s", help="with F16 weights")
    add("--compute-int", type=float, metavar="TOP/s", help="quantised weights; default: --compute")
    add("--memory", type=float, metavar="GB", help="default: enough")
    add("--bandwidth-share", type=float, metavar="SHARE", help="of the peak that is reached, 0..1")
    add("--compute-share", type=float, metavar="SHARE", help="the same of --compute")
    add(
        "--verify-slope",
        type=float,
        default=0.0,
        metavar="S",
        help="s is at least this, with --device and --bandwidth; default: what the figures allow",
    )
    add(
        "--profile",
        action="append",
        default=[],
        metavar="MODEL|FILE.json",
        help="scale from this model's profile on this machine (the stored one, else it is "
        "measured), or from what --save wrote; one for each file type",
    )
    add("--check", nargs="+", default=[], metavar="MODEL|FILE.json", help="compare with these")
    add("--models", nargs="+", default=list(LABELS), metavar="NAME", help="default: all of --list")
    add("--types", nargs="+", metavar="TYPE", help=f"default: {' '.join(TYPES)}, or the profiles'")
    add("--contexts", nargs="+", type=int, metavar="TOKENS")
    add("--alpha", nargs="+", type=float, default=list(ALPHAS), metavar="A", help="assumed, 0..1")
    add(
        "--alpha-half",
        nargs="+",
        type=float,
        default=list(HALF_ALPHAS),
        metavar="A",
        help="assumed of the best plan, where half of the sublayers' time is left out",
    )
    add(
        "--alpha-from",
        metavar="MODEL",
        help="instead from what `knapspec-edge profile` counted of this model",
    )
    add("--gamma", type=int, default=DEFAULTS.draft_max_tokens, help="default %(default)s")
    add("--budget", type=float, default=40.0, metavar="SECONDS", help="of each new profile")
    add("--fresh", action="store_true", help="measure anew where a stored profile would do")
    add("--save", type=Path, metavar="FILE.json", help="keep what was measured for later runs")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    add("--list", action="store_true", help="the models and devices, with their sources")
    measuring.add_settings(parser)
    return parser


def _check_options(options: argparse.Namespace) -> None:
    """Raises UsageError."""
    measuring.check_settings(options)
    for name, known in (
        ("models", LABELS),
        ("types", FILE_TYPES),
        ("device", DEVICES),
    ):
        for value in getattr(options, name) or ():
            if value not in known:
                raise UsageError(f"--{name} {value} is not known: choose of {', '.join(known)}")
    if options.kv_type not in ("f32", "f16", "bf16", "q8_0"):
        raise UsageError(f"--kv-type {options.kv_type} is not known: f32, f16, bf16 or q8_0")
    for name in ("bandwidth", "compute", "compute_int", "memory", "budget"):
        value = getattr(options, name)
        if value is not None and not 0.0 < value < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} must be a number above 0, not {value:g}")
    for name in ("bandwidth_share", "compute_share"):
        value = getattr(options, name)
        if value is not None and not 0.0 < value <= 1.0:
            raise UsageError(f"--{name.replace('_', '-')} must be above 0 and at most 1")
    if (options.bandwidth is None) != (options.compute is None):
        raise UsageError("--bandwidth and --compute describe a machine together: give both")
    if not 0.0 <= options.verify_slope <= 1.0:
        raise UsageError("--verify-slope must be in 0..1: 1 is what a step costs")
    for alpha in options.alpha:
        if not 0.0 <= alpha <= 1.0:
            raise UsageError(f"--alpha must be in 0..1, not {alpha:g}")
    for alpha in options.alpha_half:
        if not 0.0 < alpha < 1.0:
            raise UsageError(f"--alpha-half must be between 0 and 1, not {alpha:g}")
    if not 1 <= options.gamma < DEFAULTS.max_verify_tokens:
        raise UsageError(f"--gamma must be in 1..{DEFAULTS.max_verify_tokens - 1}")
    for context in options.contexts or ():
        if not 1 <= context <= CTX_TOKENS_MAX:
            raise UsageError(f"--contexts must be in 1..{CTX_TOKENS_MAX}, not {context}")
    for name in ("json", "save"):
        path = getattr(options, name)
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"--{name} {path}: there is no folder {path.parent}")
    if not (options.device or options.profile or options.bandwidth):
        raise UsageError("say of which machine: --device NAME, --bandwidth with --compute, or "
                         "--profile MODEL; --list shows devices")  # fmt: skip


def _sources(
    options: argparse.Namespace, profiles: Sequence[Measured], types: Sequence[str]
) -> list[Source]:
    shares = (options.bandwidth_share, options.compute_share, options.verify_slope)
    devices = [DEVICES[name] for name in dict.fromkeys(options.device)]
    if options.bandwidth is not None:
        devices.append(
            Device(
                "this description" if options.device else "the given figures",
                options.bandwidth,
                options.compute,
                options.compute_int or options.compute,
                options.memory or math.inf,
                "given by --bandwidth and --compute",
            )
        )
    sources = [roofline_source(device, types, *shares) for device in devices]
    return [scaled_source(profiles), *sources] if profiles else sources


def _list() -> list[str]:
    models = [
        [name, label, f"{projection.of_shape(label, SHAPES[name], 'F16', 'f16').n_weights:,}"]
        for name, label in LABELS.items()
    ]
    devices = [
        [
            name,
            d.label,
            f"{d.bandwidth_gbs:g}",
            f"{d.compute_tflops:g}",
            f"{d.compute_int_tops:g}",
            f"{d.memory_gb:g}",
            f"{d.bandwidth_share:g}, {d.compute_share:g}",
            d.source,
        ]
        for name, d in DEVICES.items()
    ]
    heads = ["--device", "", "GB/s", "TFLOP/s", "quantised", "GB", "assumed shares", "figures from"]
    return [
        *measuring.table(["--models", "", "weights"], models),
        "",
        *measuring.table(heads, devices),
    ]


def _row_json(row: Row) -> dict[str, Any]:
    speeds = [{"alpha": alpha, **asdict(found)} for alpha, found in row.speeds]
    return {"projected": True, **asdict(row), "speeds": speeds}


def _measure_all(
    options: argparse.Namespace, longest: int, terminal: Terminal
) -> tuple[list[Measured], list[Measured]]:
    """(those of --profile, those of --check)."""
    found: dict[str, list[Measured]] = {}
    for name in dict.fromkeys([*options.profile, *options.check]):
        found[name] = measured_of(options, name, longest, terminal)
    if options.save is not None:
        everything = [m for part in found.values() for m in part]
        text = json.dumps(projection.measured_json(everything))
        options.save.write_text(text + "\n", encoding="utf-8")
    return (
        [m for name in options.profile for m in found[name]],
        [m for name in options.check for m in found[name]],
    )


def run(options: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    """Print the tables; everything as plain data. Raises KnapspecError and OSError."""
    _check_options(options)
    config = replace(DEFAULTS, draft_max_tokens=options.gamma)
    contexts = sorted(set(options.contexts or (CHECK_CONTEXTS if options.check else CONTEXTS)))
    # costs of a profile are lines in the context: further contexts are continued
    longest = min(max(contexts), max(CHECK_CONTEXTS))
    profiles, targets = _measure_all(options, longest, terminal)
    if options.check:
        types = list(dict.fromkeys(t.model.file_type for t in targets))
        return _run_check(_sources(options, profiles, types), targets, contexts, config, terminal)
    types = list(dict.fromkeys(options.types or [m.model.file_type for m in profiles] or TYPES))
    assumed = [Assumption(alpha) for alpha in options.alpha_half]
    if options.alpha_from is not None:
        items, sublayers, name = kept_agreements(options, options.alpha_from, terminal)
        assumed = [Assumption(items=items, sublayers=sublayers, name=name)]
    sources = _sources(options, profiles, types)
    for source in sources:
        for type_ in types:
            if type_ not in source.machines:
                raise UsageError(
                    f"no profile of type {type_}: give one of such a file, or other --types"
                )
        for type_ in source.machines:
            if type_ not in FILE_TYPES:
                raise UsageError(f"shapes cannot be described in type {type_} of a profile")
    models = [
        projection.of_shape(LABELS[name], SHAPES[name], type_, options.kv_type)
        for type_ in types
        for name in dict.fromkeys(options.models)
    ]
    found = []
    for source in sources:
        rows = []
        for row in rows_of(source, models, contexts, options.alpha, assumed, config):
            rows.append(row)
            terminal.progress("projecting", len(rows) / (len(models) * len(contexts)))
        terminal.clear_progress()
        rests_on = assumptions(source, assumed, options)
        lines = [
            f"## {source.label}: projected, not measured",
            "",
            "None of these models ran. What the figures rest on:",
            "",
            *(f"* {line}" for line in rests_on),
            "",
            *table_of(rows, options.alpha, assumed),
            "",
        ]
        terminal.text("\n".join(lines) + "\n")
        found.append(
            {
                "machine": source.label,
                "assumptions": rests_on,
                "rows": [_row_json(row) for row in rows],
            }
        )
    return {"projected": True, "sources": found}


def _run_check(
    sources: Sequence[Source],
    targets: Sequence[Measured],
    contexts: Sequence[int],
    config: Config,
    terminal: Terminal,
) -> dict[str, Any]:
    found = []
    for target in targets:
        for source in sources:
            comparison = compare(target, source, contexts, config)
            if comparison is None:
                terminal.warning(
                    f"{target.model.name}: {source.label} says nothing about type "
                    f"{target.model.file_type}, or its profile reaches none of the contexts"
                )
                continue
            found.append(comparison)
            terminal.text("\n".join(comparison_lines(comparison)) + "\n\n")
    if not found:
        raise UsageError("there was nothing to compare")
    return {"comparisons": [asdict(c) for c in found], "sources": [s.note for s in sources]}


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)

    def body(terminal: Terminal) -> None:
        if options.list:
            terminal.text("\n".join(_list()) + "\n")
            return
        data = run(options, terminal)
        if options.json is not None:
            text = json.dumps(measuring.in_json(data), allow_nan=False, indent=1)
            options.json.write_text(text + "\n", encoding="utf-8")

    return measuring.run_guarded(body)


if __name__ == "__main__":
    sys.exit(main())
