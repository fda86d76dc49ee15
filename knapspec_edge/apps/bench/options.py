"""What a comparison is asked for, and how that is written on the command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...config import BENCH_TASKS, DEFAULTS, Config
from ...errors import UsageError
from ...folders import expanded
from ...policies import NAMES
from ...records import Sampling
from ...search.planner import room_tokens
from ..peers import Source, parse_all
from .rows import PLAIN
from .tasks import OwnPrompt, parse_contexts, read_prompts

AUTO = "auto"  # the default policy as `--spec auto` has it
FORCED = "knapspec"  # the same, never turning to plain decoding
# Those that go by a measurement at each length.
PLANNED = (AUTO, FORCED, "knapspec-masks")
DRAFT_MODEL = "draft-model"

ALL = "all"
DEFAULT_POLICIES = (AUTO, FORCED)
DEFAULT_CONTEXTS = (256, 2048)


@dataclass(frozen=True)
class Options:
    """What to compare. Raises UsageError, one line, for what cannot be."""

    # beside plain decoding, which is always there
    policies: tuple[str, ...] = DEFAULT_POLICIES
    # whether they were named one by one: what cannot be had then is an error, else it is noted
    named: bool = False
    tasks: tuple[str, ...] = BENCH_TASKS
    contexts: tuple[int, ...] = DEFAULT_CONTEXTS
    prompts: tuple[OwnPrompt, ...] = ()  # in place of tasks and contexts
    repeats: int = 1  # prompts of each task and length
    max_tokens: int = 128
    warmup_tokens: int = 16
    cooldown_seconds: float = 0.0
    plans: tuple[Path, ...] = ()
    draft_model: Path | None = None
    peers: tuple[Source, ...] = ()  # other builds
    sampling: Sampling = field(default_factory=Sampling)
    resume: Path | None = None  # a file of rows, to be read and added to

    def __post_init__(self) -> None:
        stems = [path.stem for path in self.plans]
        for stem in stems:
            if stems.count(stem) > 1:
                raise UsageError(f"two plan files are called {stem}; rename one of them")
        if self.peers and self.sampling.temperature > 0.0:
            raise UsageError(
                f"{self.peers[0].given}: other builds draw other random numbers, so that they are "
                "compared greedily; leave --temp and --preset away"
            )
        drafts = DRAFT_MODEL in self.policies
        if drafts and self.named and self.draft_model is None:
            raise UsageError(f"--policies {DRAFT_MODEL} needs --draft-model MODEL, a small one")
        if self.draft_model is not None and not drafts:
            raise UsageError(
                f"--draft-model is for the policy {DRAFT_MODEL}: add that to --policies, or leave "
                "--draft-model away"
            )
        own = {PLAIN, *self.policies, *(f"plan {stem}" for stem in stems)}
        for peer in self.peers:
            if peer.name in own:
                raise UsageError(f"{peer.given}: a side of the comparison has this name")

    def ctx_tokens(self, config: Config = DEFAULTS) -> int:
        """Size of the context that this takes."""
        longest = max(self.contexts)
        if self.prompts:
            # two characters per token is more than most texts take
            longest = max(longest, max(prompt.n_chars for prompt in self.prompts) // 2 + 128)
        most = longest + max(self.max_tokens, self.warmup_tokens) + 1
        if set(PLANNED) & set(self.policies) and not self.prompts:
            most = max(most, room_tokens(longest, config, fresh=True))
        return -(-most // 256) * 256  # whole steps of the cache

    def to_json(self) -> dict[str, Any]:
        own = [{"name": p.name, "task": p.task} for p in self.prompts]
        return {
            "policies": list(self.policies),
            "tasks": list(self.tasks) if not own else None,
            "contexts": list(self.contexts) if not own else None,
            "prompts": own or None,
            "repeats": self.repeats,
            "max_tokens": self.max_tokens,
            "warmup_tokens": self.warmup_tokens,
            "cooldown_seconds": self.cooldown_seconds,
            "plans": [os.fspath(path) for path in self.plans],
            "draft_model": None if self.draft_model is None else os.fspath(self.draft_model),
            "peers": {peer.name: peer.given for peer in self.peers},
            "sampling": sampling_json(self.sampling),
        }


def sampling_json(sampling: Sampling) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "temperature_first": sampling.temperature_first,
        "seed": sampling.seed,
    }


def parse_names(text: str, known: Sequence[str], option: str) -> tuple[str, ...]:
    """The names of "a,b,c" in their order, all of them where "all" is among them. Raises
    UsageError."""
    names = _split(text)
    for name in names:
        if name not in (*known, ALL):
            raise UsageError(
                f"{option} {ascii(text)}: {ascii(name)} is none of {', '.join((*known, ALL))}"
            )
    return tuple(known) if ALL in names else tuple(dict.fromkeys(names))


def _split(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def parse_policies(text: str, names: Sequence[str]) -> tuple[str, ...]:
    """The same for policies, `names` of which there are; plain decoding is there without being
    named. Raises UsageError."""
    known = (PLAIN, AUTO, *(name for name in names if name != PLAIN))
    return tuple(n for n in parse_names(text, known, "--policies") if n != PLAIN)


def _plan_file(text: str) -> Path:
    path = expanded(text)
    if not os.path.isfile(path):  # False for what is no path at all, too
        raise UsageError(f"--plan {text}: there is no such file; `plan --save` writes one")
    return path


def from_texts(
    *,
    policies: str | None = None,
    plans: Sequence[str] = (),
    draft_model: str | None = None,
    unpatched: str | None = None,
    peers: Sequence[str] = (),
    contexts: str | None = None,
    tasks: str | None = None,
    prompts: str | None = None,
    repeats: int = 1,
    max_tokens: int = 128,
    cooldown: float = 0.0,
    resume: str | None = None,
    sampling: Sampling | None = None,
) -> Options:
    """The options of the command line. Raises UsageError, one line."""
    if prompts is not None and (contexts is not None or tasks is not None):
        raise UsageError(
            "--prompts are compared as they are: --contexts and --tasks are for the prompts that "
            "bench makes; leave one or the other away"
        )
    chosen = DEFAULT_POLICIES if policies is None else parse_policies(policies, NAMES)
    return Options(
        policies=chosen,
        named=policies is not None and ALL not in _split(policies),
        tasks=BENCH_TASKS if tasks is None else parse_names(tasks, BENCH_TASKS, "--tasks"),
        contexts=DEFAULT_CONTEXTS if contexts is None else parse_contexts(contexts),
        prompts=() if prompts is None else read_prompts(expanded(prompts)),
        repeats=repeats,
        max_tokens=max_tokens,
        cooldown_seconds=cooldown,
        plans=tuple(_plan_file(plan) for plan in plans),
        draft_model=None if draft_model is None else expanded(draft_model),
        peers=tuple(parse_all(peers, unpatched)),
        sampling=sampling or Sampling(),
        resume=None if resume is None else expanded(resume),
    )
