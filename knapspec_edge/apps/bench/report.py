"""A comparison as text: Markdown for people, CSV with llama-bench's column names for tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from ..report import clean, counted, duration
from .options import AUTO, FORCED
from .rows import LEAST_TIMED_TOKENS, PLAIN, Summary
from .runner import Report
from .tasks import shown_context

# Names of llama-bench's own CSV where it has the same; speeds are tokens per second.
CSV_COLUMNS = (
    "build_commit", "backends", "cpu_info", "gpu_info", "model_filename", "model_type",
    "model_size", "model_n_params", "n_threads", "n_threads_batch", "type_k", "type_v",
    "n_gpu_layers", "flash_attn", "n_prompt", "n_gen", "n_depth", "test_time", "avg_ts",
    "stddev_ts", "median_ts", "q1_ts", "q3_ts", "policy", "task", "context", "runs", "timed",
    "speedup", "speedup_q1", "speedup_q3", "speculated", "n_drafted", "n_accepted", "acceptance",
    "tokens_per_round", "draft_share", "verify_share", "plan_share", "overhead_share",
    "draft_cost", "verify_cost", "model_error", "setup_s", "warmup_s", "identical", "explained",
    "unexplained", "largest_margin", "library_digest", "model_fingerprint", "version",
)  # fmt: skip


def csv_table(report: Report) -> str:
    """One row per side, length and task, and one for the prompts of each length."""
    fixed = _csv_fixed(report.environment)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, CSV_COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for speed in report.prompt_speeds:
        writer.writerow(
            {
                **fixed,
                "n_prompt": speed["prompt_tokens"],
                "n_gen": 0,
                "n_depth": 0,
                "median_ts": speed["per_second"],
                "q1_ts": speed["per_second_low"],
                "q3_ts": speed["per_second_high"],
                "policy": PLAIN,
                "context": shown_context(speed["context"]),
                "runs": speed["runs"],
                "timed": speed["runs"],
            }
        )
    for s in report.by_task:
        writer.writerow({**fixed, **_csv_row(s)})
    return stream.getvalue()


def _csv_fixed(e: dict[str, Any]) -> dict[str, Any]:
    settings = e["settings"]
    devices = settings.get("devices", [])
    gpus = [d for d in devices if not d.startswith("CPU")]
    return {
        "build_commit": (e.get("library_build") or {}).get("commit", ""),
        "backends": ",".join(devices),
        "cpu_info": "; ".join(e["devices"]),
        "gpu_info": ",".join(gpus),
        "model_filename": e["model"],
        "model_type": " ".join(x for x in (e.get("model_architecture"), e["model_type"]) if x),
        "model_size": e.get("model_size"),
        "model_n_params": e.get("model_n_params"),
        "n_threads": settings["threads"],
        "n_threads_batch": settings.get("threads_batch"),
        "type_k": settings["kv_type"],
        "type_v": settings["kv_type"],
        "n_gpu_layers": settings.get("gpu_layers"),
        "flash_attn": settings["flash_attn"],
        "test_time": e.get("time"),
        "library_digest": e.get("library_digest"),
        "model_fingerprint": e.get("model_fingerprint"),
        "version": e.get("version"),
    }


def _csv_row(s: Summary) -> dict[str, Any]:
    return {
        "n_prompt": 0,
        "n_gen": s.completion_tokens,
        "n_depth": s.prompt_tokens,
        "avg_ts": s.per_second_mean,
        "stddev_ts": s.per_second_deviation,
        "median_ts": s.per_second,
        "q1_ts": s.per_second_low,
        "q3_ts": s.per_second_high,
        "policy": s.side,
        "task": s.task,
        "context": shown_context(s.context),
        "runs": s.runs,
        "timed": s.timed,
        "speedup": s.ratio,
        "speedup_q1": s.ratio_low,
        "speedup_q3": s.ratio_high,
        "speculated": int(s.speculated),
        "n_drafted": s.draft_n,
        "n_accepted": s.draft_n_accepted,
        "acceptance": s.acceptance,
        "tokens_per_round": s.tokens_per_round,
        "draft_share": s.draft_share,
        "verify_share": s.verify_share,
        "plan_share": s.plan_share,
        "overhead_share": s.overhead_share,
        "draft_cost": s.draft_cost,
        "verify_cost": s.verify_cost,
        "model_error": s.model_error,
        "setup_s": s.setup_seconds,
        "warmup_s": s.warmup_seconds,
        "identical": s.identical,
        "explained": s.explained,
        "unexplained": s.unexplained,
        "largest_margin": s.largest_margin,
    }


# ---------------------------------------------------------------------------------------------
# Markdown


def markdown(report: Report) -> str:
    """Tables for people, with the machine above and the notes below them."""
    lines = [_opening(report), "", *_llama_bench_table(report), ""]
    lines += _sides_table(report.by_context)
    tasks = {s.task for s in report.by_task}
    if len(tasks) > 1 and len(report.sides) > 1:
        lines += ["", "Against plain decoding, median by task:", "", *_task_table(report.by_task)]
    lines += ["", *_effort_table(report.sides), ""]
    for name, plan in report.plans.items():
        skipped = ", ".join(plan["skipped"]) or "nothing"
        lines.append(
            f"* {name}: skips {skipped}; up to {plan['max_tokens']} drafted, stop below "
            f"{plan['min_probability']:.2f}"
        )
    names = {s.side for s in report.sides}
    if AUTO in names:
        lines.append("* auto: our planner, which drafts only where it expects that to pay")
    if FORCED in names:
        lines.append("* knapspec: our planner, forced to draft always")
    short = sum(s.runs - s.timed for s in report.sides)
    if short:
        lines.append(
            f"* {counted(short, 'answer')} with at most {LEAST_TIMED_TOKENS} tokens: compared, not "
            "timed"
        )
    lines += [f"* {note}" for note in remarks(report)]
    return "\n".join(lines)


def remarks(report: Report) -> list[str]:
    """What a reader has to know beside the figures, a line each."""
    found = [" ".join(note.split()) for note in report.notes]
    if not report.complete:
        found.append("Not complete: the figures are of the rows that were finished.")
    return found


def _opening(report: Report) -> str:
    e, o = report.environment, report.options
    settings = e["settings"]
    sampling = o["sampling"]
    how = "greedy" if not sampling["temperature"] else f"temperature {sampling['temperature']:g}"
    prompts = len({(r.task, r.prompt, r.context) for r in report.runs})
    return (
        f"Model {clean(str(e['model']))} ({e['model_type']}), {', '.join(e['devices'])}, "
        f"{counted(settings['threads'], 'thread')}, flash attention {settings['flash_attn']}, "
        f"{settings['kv_type']} keys and values; {how}, up to {o['max_tokens']} tokens, "
        f"{counted(prompts, 'prompt')}. Library {str(e.get('library_digest'))[:12]}, model "
        f"{str(e.get('model_fingerprint'))[:12]}, Python {e.get('python')}."
    )


def _rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]


def _llama_bench_table(report: Report) -> list[str]:
    """What llama-bench prints of plain decoding: prompts, and answers behind them."""
    e = report.environment
    settings = e["settings"]
    size, params = e.get("model_size"), e.get("model_n_params")
    fixed = [
        f"{e.get('model_architecture') or clean(str(e['model']))} {e['model_type']}",
        "–"
        if not size
        else f"{size / 2**20:.2f} MiB"
        if size < 2**30
        else f"{size / 2**30:.2f} GiB",
        "–" if not params else f"{params / 1e6:.2f} M" if params < 1e9 else f"{params / 1e9:.2f} B",
        ",".join(settings.get("devices", [])) or "–",
        str(settings["threads"]),
        settings["kv_type"],
        str(settings["flash_attn"]),
    ]
    rows = []
    for speed in report.prompt_speeds:
        half = (speed["per_second_high"] - speed["per_second_low"]) / 2
        test = f"pp{speed['prompt_tokens']}"
        rows.append([*fixed, test, f"{speed['per_second']:.2f} ± {half:.2f}"])
    for s in report.by_context:
        if s.side == PLAIN and s.per_second is not None:
            test = f"tg{s.completion_tokens} @ d{s.prompt_tokens}"
            rows.append([*fixed, test, _plus_minus(s)])
    heads = ["model", "size", "params", "backend", "threads", "type_k", "fa", "test", "t/s"]
    return _rows(heads, rows)


def _plus_minus(s: Summary) -> str:
    """Median and half of the distance between the quartiles."""
    if s.per_second is None or s.per_second_high is None or s.per_second_low is None:
        return "–"
    return f"{s.per_second:.2f} ± {(s.per_second_high - s.per_second_low) / 2:.2f}"


def _sides_table(found: Sequence[Summary]) -> list[str]:
    heads = ["context", "policy", "speculated", "t/s (quartiles)", "against plain (quartiles)"]
    heads += ["drafted", "α", "tokens/round", "plan", "overhead", "same text"]
    rows = []
    for s in found:
        speed = "–"
        if s.per_second is not None:
            speed = f"{s.per_second:.1f} ({s.per_second_low:.1f}–{s.per_second_high:.1f})"
        rows.append(
            [
                shown_context(s.context),
                s.side,
                "yes" if s.speculated else "no",
                speed,
                _ratio(s),
                str(s.draft_n),
                _number(s.acceptance),
                _number(s.tokens_per_round),
                _percent(s.plan_share),
                _percent(s.overhead_share),
                _same(s),
            ]
        )
    return _rows(heads, rows)


def _ratio(s: Summary) -> str:
    if s.side == PLAIN:
        return "–"
    if s.ratio is None:
        return "not given: the text differs" if s.unexplained else "–"
    return f"{s.ratio:.2f}× ({s.ratio_low:.2f}–{s.ratio_high:.2f})"


def _same(s: Summary) -> str:
    if s.side == PLAIN:
        return "–"
    same = f"{s.identical} of {s.runs}"
    if s.explained:
        same += f", {s.explained} by rounding (margin up to {s.largest_margin:.2g})"
    if s.unexplained:
        same += f", **{s.unexplained} unexplained**"
    return same


def _task_table(found: Sequence[Summary]) -> list[str]:
    columns = list(dict.fromkeys((s.context, s.task) for s in found))
    sides = [name for name in dict.fromkeys(s.side for s in found) if name != PLAIN]
    cells = {(s.side, s.context, s.task): s for s in found}
    heads = ["policy", *(f"{task} {shown_context(context)}" for context, task in columns)]
    rows = []
    for side in sides:
        row = [side]
        for context, task in columns:
            s = cells.get((side, context, task))
            row.append("–" if s is None or s.ratio is None else f"{s.ratio:.2f}×")
        rows.append(row)
    return _rows(heads, rows)


def _effort_table(found: Sequence[Summary]) -> list[str]:
    """What a side costs beside the rows, and where the time of a round goes."""
    heads = ["policy", "setup and search", "warm-up", "draft", "verification", "c", "v"]
    heads += ["cost model"]
    rows = []
    for s in found:
        error = "–" if s.model_error is None else f"{100 * s.model_error:+.1f} %"
        rows.append(
            [
                s.side,
                duration(s.setup_seconds) if s.setup_seconds >= 0.5 else "–",
                f"{s.warmup_seconds:.1f} s",
                _percent(s.draft_share),
                _percent(s.verify_share),
                _number(s.draft_cost),
                _number(s.verify_cost),
                error,
            ]
        )
    return [
        "Setup (measuring, searching; nothing where it was kept) and warm-up are not in the speeds "
        "above. Draft and verification: shares of the decode time. c: a draft step, v: the "
        "verification of a round, in plain steps. Cost model: predicted against measured time.",
        "",
        *_rows(heads, rows),
    ]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"
