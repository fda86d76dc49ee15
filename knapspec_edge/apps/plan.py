"""The `plan` command: what would be drafted with at one context, and why. Measured if need be.

How a report is shown is in plan_report and plots.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..config import DEFAULTS, Config, without_windows
from ..engine import Engine, Progress
from ..errors import ModelError, PlanError, UsageError
from ..search import plan_file, planner
from ..search.outlook import Outlook
from .certify import Certification, certify

# Who asks again after the machine was busy does not want the same answer for an hour.
ASKED = replace(DEFAULTS, measure_retry_seconds=0.0)


@dataclass(frozen=True)
class Options:
    """What was asked for; None and "auto" leave it to what was measured before."""

    at_tokens: int | None = None
    ctx: int | None = None
    budget_seconds: float | None = None
    threads: int | None = None
    gpu_layers: int | None = None
    kv_type: str = "f16"
    flash_attn: str = "auto"
    template: str | None = None
    policy: str = "knapspec"
    certify: bool = False
    windows: bool = True  # attention may be windowed in drafts


@dataclass(frozen=True)
class PlanReport:
    """What one run of the command found."""

    model: str  # name for people
    path: str
    architecture: str
    fingerprint: str  # of the model file, for the plan file
    device: str | None  # where the layers lie, for people
    settings_reason: str | None  # which settings were measured to be best; None without a profile
    outlook: Outlook
    elapsed_seconds: float
    shown_at: float  # seconds since 1970
    certification: Certification | None = None  # of the judged plans, in their order
    uncertified: str | None = None  # why there is none although it was asked for
    warnings: tuple[str, ...] = field(default=())


def run(
    model_path: str | os.PathLike[str],
    options: Options,
    progress: Progress = lambda stage, share: None,
    *,
    warn: Callable[[str], None] = lambda warning: None,
    config: Config = ASKED,
) -> PlanReport:
    """Decide for one context, by what is kept about it or by measuring.

    `warn` takes each warning when it is due; the report lists them all. Raises what Engine.open and
    Engine.plan raise, and ModelError for a certificate of a model whose head cannot be read; what
    had been measured when it was interrupted is kept.
    """
    from .. import gguf_check, gguf_head

    started = time.monotonic()
    if not options.windows:
        config = without_windows(config)
    at_tokens = options.at_tokens or config.expected_context_tokens
    info = gguf_check.inspect(Path(model_path))
    # what cannot be certified is said before anything is measured
    head = gguf_head.GgufHead(info) if options.certify else None
    certification, uncertified = None, None
    warnings: list[str] = []

    def pass_on(engine: Engine) -> None:
        for warning in engine.take_warnings():
            if warning not in warnings:  # the engine says it for each thing it could not keep
                warnings.append(warning)
                warn(warning)

    with Engine.open(
        info.path,
        ctx=context_size(at_tokens, options.ctx, info.context_length, config),
        threads=options.threads,
        gpu_layers=options.gpu_layers,
        kv_type=options.kv_type,
        flash_attn=options.flash_attn,
        spec="off",
        purpose="speculation",
        template=options.template,
        expected_tokens=at_tokens,
        config=config,
        progress=progress,
    ) as engine:
        pass_on(engine)
        outlook = engine.plan(
            at_tokens,
            budget_seconds=options.budget_seconds,
            policy=options.policy,
            progress=progress,
        )
        pass_on(engine)
        if head is not None:
            plans = [judged.draft.plan for judged in outlook.judged]
            try:
                with engine.interruptible():
                    certification = certify(
                        engine.backend,
                        head,
                        plans,
                        outlook.text,
                        progress=lambda share: progress("certify", share),
                    )
            except ModelError as error:
                uncertified = str(error)
        return PlanReport(
            model=engine.name,
            path=str(info.path),
            architecture=info.architecture,
            fingerprint=engine.fingerprint(),
            device=engine.device,
            settings_reason=engine.settings_reason,
            outlook=outlook,
            elapsed_seconds=time.monotonic() - started,
            shown_at=time.time(),
            certification=certification,
            uncertified=uncertified,
            warnings=tuple(warnings),
        )


def context_size(
    at_tokens: int, ctx: int | None, trained: int | None, config: Config = DEFAULTS
) -> int:
    """Size of the context for a plan at `at_tokens`: what was asked for, or what it takes.

    Raises UsageError where it does not fit.
    """
    least = planner.room_tokens(at_tokens, config)
    if ctx is not None:
        if least > ctx:
            raise UsageError(
                f"--at {at_tokens} does not fit: with the text it is judged on it takes {least} "
                f"tokens, and --ctx is {ctx}"
            )
        return ctx
    usual = min(trained or config.ctx_tokens, config.ctx_tokens)
    if trained and least > trained:
        raise UsageError(
            f"--at {at_tokens} does not fit: with the text it is judged on it takes {least} "
            f"tokens, and this model was trained for {trained}; --ctx N goes beyond"
        )
    wanted = max(usual, planner.room_tokens(at_tokens, config, fresh=True))
    return min(trained, wanted) if trained else wanted


def check(report: PlanReport) -> None:
    """After the report: raises what keeps it from being all that was asked for, in one line.

    PlanError where the machine was too busy for the figures to be believed, ModelError where plans
    could not be certified.
    """
    if report.outlook.disturbed:
        raise PlanError(report.outlook.reason.removeprefix("off: "))
    if report.uncertified is not None:
        raise ModelError(report.uncertified)


def save(report: PlanReport, path: Path) -> None:
    """Write the best draft as a plan file for --spec.

    Raises PlanError where there is none, UsageError where the file cannot be written.
    """
    outlook = report.outlook
    if outlook.draft is None:
        reason = outlook.reason.removeprefix(f"{outlook.state}: ")
        raise PlanError(f"there is no plan to save: {reason}")
    plan_file.save(path, outlook.draft, outlook.sublayers, report.fingerprint, report.architecture)
