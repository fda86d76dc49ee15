"""What the sampling is worth: the same text with drafts and without, acceptance, cost of a pick.

    python scripts/check_sampling.py identity f32.gguf --kv-type f32 --flash-attn off
    python scripts/check_sampling.py identity f16.gguf q8_0.gguf model.gguf
    python scripts/check_sampling.py acceptance model.gguf
    python scripts/check_sampling.py cost model.gguf other.gguf

* identity: sampled answers with forced drafts against answers without, for several prompts, seeds
  and settings. Each first difference is listed with its margin, the noise of the logits there, and
  whether batch shapes alone explain it. Fails where one is not explained, where F32 weights and
  keys differ at a margin of 1e-4 or more, and where nothing was proved because drafts were never
  accepted, never rejected, or never accepted whole.
* acceptance: how often a draft's pick equals the target's where both share their noise, against
  what the two distributions let expect of it, of rejection sampling, and of draws without common
  noise.
* cost: time of one pick by setting and size of the vocabulary, as a share of a real round.

Prints Markdown and, as the last line, one line of JSON. A timing is never a pass or a fail. Run it
with the project's Python; `cost` on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import _measuring as measuring  # noqa: E402
import _pick_cost as pick_cost  # noqa: E402
from _distributions import adjusted, agreement, candidates, distribution  # noqa: E402
from _measuring import percent  # noqa: E402
from _sampled import (  # noqa: E402
    PLANS,
    SETTING_WORDS,
    SETTINGS,
    Answer,
    NativePick,
    Picker,
    Recorder,
    Repeater,
    Row,
    answered,
    plans_by_harm,
    primed,
    prompts_of,
    require_plans,
)

from knapspec_edge.apps.bench.texts import QUESTIONS  # noqa: E402
from knapspec_edge.apps.report import counted, sig  # noqa: E402
from knapspec_edge.backend import Backend  # noqa: E402
from knapspec_edge.decode.rollback import rewind  # noqa: E402
from knapspec_edge.errors import UsageError  # noqa: E402
from knapspec_edge.records import GREEDY, Draft, Plan, Sampling  # noqa: E402
from knapspec_edge.terminal import Terminal  # noqa: E402
from knapspec_edge.text.templates import choose_template  # noqa: E402

Show = Callable[[str, float], None]

CTX_TOKENS = 1024
STRICT_MARGIN = 1e-4  # with F32 weights and keys no pick by a wider margin may differ
# γ of the plans by name: the more is left out, the shorter
DRAFT_LENGTHS = {"few": 8, "some": 4, "many": 2, "windows": 4, "short-head": 4}
BLOCK_TOKENS = 4  # drafted one after the other where acceptance is counted
NOISE_WIDTH = 5  # tokens of the passes that show how much batch shapes change a logit
NOISE_TOKENS = 41
BOOTSTRAPS = 1000


# ---------------------------------------------------------------------------------------------
# identity


@dataclass(frozen=True)
class Difference:
    """The first token at which an answer with drafts differs from the one without.

    Changes are of logits, between the row that the one was picked from and the row of the other.
    """

    setting: str
    plan: str
    prompt: int
    seed: int
    token: int  # of the answer, 0-based
    position: int  # in the context
    plain: int  # token without drafts
    drafted: int  # token with drafts
    margin: float  # of the pick without drafts
    change: float = math.nan  # the larger one of the two tokens' logits
    score_change: float = math.nan  # of the distance of their scores, in the unit of the margin
    median_change: float = math.nan  # of all logits of the row
    # largest change that is left where the same passes were made without a draft: 0 if it left no
    # trace
    trace: float = math.nan
    cause: str = ""

    @property
    def explained(self) -> bool:
        return self.cause in (RACE, FILTER)


RACE = "close race"
FILTER = "edge of a filter"
NOT_REPEATED = "not repeated by a second run"
NOT_PICKED = "not what its row gives"
TRACE = "the draft left a trace"
ENDED = "one answer is longer"


@dataclass
class Identity:
    """All answers of one setting under one plan."""

    setting: str
    plan: str
    draft_tokens: int
    answers: int = 0
    identical: int = 0
    compared: int = 0  # tokens up to the first difference, or to the end
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    whole_rounds: int = 0
    differences: list[Difference] = field(default_factory=list)

    def add(self, with_drafts: Answer, difference: Difference | None) -> None:
        self.answers += 1
        self.drafted += with_drafts.stats.draft_n
        self.accepted += with_drafts.stats.draft_n_accepted
        self.rejected += with_drafts.rejected
        self.whole_rounds += with_drafts.whole_rounds
        if difference is None:
            self.identical += 1
            self.compared += len(with_drafts.tokens)
        else:
            self.compared += difference.token
            self.differences.append(difference)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs; the end of the shorter one where it is a beginning."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def _changes(a: Row, b: Row) -> NDArray[np.float64]:
    """|a - b| f64 [n_vocab]; 0 where both are the same infinity."""
    with np.errstate(invalid="ignore"):
        return np.where(a == b, 0.0, np.abs(a.astype(np.float64) - b))


def _row_of(recorder: Recorder, prompt: Sequence[int], sampling: Sampling, draft: Draft | None,
            max_tokens: int, answer: Answer, token: int) -> Row | None:  # fmt: skip
    """The row that a token of this answer was picked from, by a second run; None where that run
    gives another text."""
    session = primed(recorder, prompt)
    again = answered(session, prompt, sampling, draft, max_tokens)
    if again.tokens != answer.tokens:
        return None
    return recorder.rows.get(answer.row_of(token)[0])


def examined(
    found: Difference,
    backend: Backend,
    pick: Picker,
    prompt: Sequence[int],
    sampling: Sampling,
    draft: Draft,
    max_tokens: int,
    plain: Answer,
    drafted: Answer,
) -> Difference:
    """The same with what explains it. Both answers are given once more for it, and a third time the
    one with drafts, whose drafts are not computed then but repeated."""
    at = found.token
    if at >= min(len(plain.tokens), len(drafted.tokens)):
        return replace(found, cause=ENDED)

    def only(answer: Answer) -> Callable[[int], int | None]:
        number, row = answer.row_of(at)
        return {number: row}.get

    one = Recorder(backend, only(plain))
    several = Recorder(backend, only(drafted))
    row = _row_of(one, prompt, sampling, None, max_tokens, plain, at)
    other = _row_of(several, prompt, sampling, draft, max_tokens, drafted, at)
    if row is None or other is None:
        return replace(found, cause=NOT_REPEATED)
    alone = Repeater(backend, only(drafted), several.drafted)
    undrafted = _row_of(alone, prompt, sampling, draft, max_tokens, drafted, at)
    history = [*prompt, *plain.tokens[:at]]
    tokens = [found.plain, found.drafted]
    changes = _changes(row, other)
    signed = other.astype(np.float64)[tokens] - row.astype(np.float64)[tokens]
    temperature = sampling.temperature or 1.0
    trace = math.inf if undrafted is None else float(_changes(other, undrafted).max())
    position = len(history)
    picked = [pick(r, sampling, position, history).token for r in (row, other)]
    if picked != tokens:
        cause = NOT_PICKED
    elif trace > 0.0:
        cause = TRACE
    else:
        left = [set(candidates(adjusted(r, sampling, history), sampling)) for r in (row, other)]
        both = all(set(tokens) <= some for some in left)
        cause = RACE if both or sampling.temperature <= 0.0 else FILTER
    return replace(
        found,
        change=float(changes[tokens].max()),
        score_change=float(abs(signed[1] - signed[0])) / temperature,
        median_change=float(np.median(changes)),
        trace=trace,
        cause=cause,
    )


def compared(
    backend: Backend,
    pick: Picker,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    settings: Mapping[str, Sampling],
    drafts: Mapping[str, Draft],
    max_tokens: int,
    show: Show,
) -> list[Identity]:
    """Each answer once without drafts and once with those of one plan; plans take turns. Greedy
    answers know no seed, so there each plan has its turn at every prompt."""
    found = {
        (setting, plan): Identity(setting, plan, drafts[plan].max_tokens)
        for setting in settings
        for plan in drafts
    }
    names = list(drafts)
    turns = {
        name: seeds if s.temperature > 0.0 else list(seeds)[: len(names)]
        for name, s in settings.items()
    }
    total, done = len(prompts) * sum(map(len, turns.values())), 0
    for number, prompt in enumerate(prompts):
        session = primed(backend, prompt)
        for offset, (setting, base) in enumerate(settings.items()):
            plain: Answer | None = None
            for turn, seed in enumerate(turns[setting]):
                sampling = _seeded(base, seed)
                if plain is None or sampling.temperature > 0.0:
                    plain = answered(session, prompt, sampling, None, max_tokens)
                plan = names[(number + offset + turn) % len(names)]
                other = answered(session, prompt, sampling, drafts[plan], max_tokens)
                at = first_difference(plain.tokens, other.tokens)
                difference = None
                if at is not None:
                    difference = examined(
                        _difference(setting, plan, number, seed, at, len(prompt), plain, other),
                        backend,
                        pick,
                        prompt,
                        sampling,
                        drafts[plan],
                        max_tokens,
                        plain,
                        other,
                    )
                    session = primed(backend, prompt)
                found[setting, plan].add(other, difference)
                done += 1
                show("answering", done / total)
    return list(found.values())


def _seeded(sampling: Sampling, seed: int) -> Sampling:
    return replace(sampling, seed=seed)


def _difference(setting: str, plan: str, prompt: int, seed: int, at: int, start: int,
                plain: Answer, other: Answer) -> Difference:  # fmt: skip
    def token(answer: Answer) -> int:
        return answer.tokens[at] if at < len(answer.tokens) else -1

    margin = plain.margins[at] if at < len(plain.margins) else math.inf
    return Difference(
        setting, plan, prompt, seed, at, start + at, token(plain), token(other), margin
    )


def batch_noise(backend: Backend, prompt: Sequence[int]) -> NDArray[np.float64]:
    """How much the logits of the two best tokens change between single steps and passes of
    NOISE_WIDTH tokens: f64 [places, 2]. The cache is empty before and after."""
    recorder = Recorder(backend, lambda _: 0)
    answer = answered(primed(recorder, prompt), prompt, GREEDY, None, NOISE_TOKENS)
    rows = [recorder.rows[i + 1] for i in range(len(answer.tokens) - 1)]
    rewind(backend, len(prompt))
    changes = []
    for start in range(0, len(rows), NOISE_WIDTH):
        part = list(answer.tokens[start : min(start + NOISE_WIDTH, len(rows))])
        backend.verify(part, GREEDY)
        for i in range(len(part)):
            row = rows[start + i]
            two = np.argsort(-row, kind="stable")[:2]
            changes.append(_changes(row, backend.logits(i))[two])
    rewind(backend, 0)
    return np.array(changes, dtype=np.float64).reshape(len(changes), 2)


def unproved(found: Sequence[Identity]) -> list[str]:
    """Why the check proves nothing, one line for each setting where it does not."""
    lines = []
    for setting in dict.fromkeys(i.setting for i in found):
        here = [i for i in found if i.setting == setting]
        missing = [
            words
            for words, count in (
                ("no drafted token was accepted", sum(i.accepted for i in here)),
                ("none was rejected", sum(i.rejected for i in here)),
                ("no draft was accepted whole", sum(i.whole_rounds for i in here)),
            )
            if not count
        ]
        if missing:
            lines.append(f"{setting}: nothing is proved, because {' and '.join(missing)}")
    return lines


def broken(found: Sequence[Identity], strict: bool) -> list[str]:
    """What contradicts the claim that the text does not depend on drafts, one line each."""
    lines = []
    for d in (d for i in found for d in i.differences):
        where = f"{d.setting}, prompt {d.prompt}, seed {d.seed}, token {d.token}"
        if not d.explained:
            lines.append(f"{where}: {d.cause}")
        elif strict and not d.margin < STRICT_MARGIN:
            lines.append(f"{where}: a margin of {sig(d.margin)} with F32 weights and keys")
    return lines


def identity_table(found: Sequence[Identity]) -> list[str]:
    heads = ["setting", "plan", "γ", "drafted", "accepted", "rejected", "whole drafts", "same text"]
    heads += ["tokens compared", "per difference", "largest margin", "unexplained"]
    rows = []
    for i in found:
        if not i.answers:
            continue
        margins = [d.margin for d in i.differences]
        rows.append(
            [
                SETTING_WORDS.get(i.setting, i.setting),
                i.plan,
                str(i.draft_tokens),
                f"{i.drafted:,}",
                percent(i.accepted / i.drafted) if i.drafted else "–",
                f"{i.rejected:,}",
                f"{i.whole_rounds:,}",
                f"{i.identical} of {i.answers}",
                f"{i.compared:,}",
                f"{i.compared / len(margins):,.0f}" if margins else "–",
                sig(max(margins), 2) if margins else "–",
                str(sum(not d.explained for d in i.differences)),
            ]
        )
    return measuring.table(heads, rows)


def difference_table(found: Sequence[Identity], words: Callable[[int], str]) -> list[str]:
    """Every first difference; nothing where there is none."""
    rows = [
        [
            d.setting,
            d.plan,
            str(d.prompt),
            str(d.seed),
            f"{d.token} ({d.position})",
            f"{words(d.plain)} / {words(d.drafted)}",
            sig(d.margin, 2),
            sig(d.score_change, 2),
            sig(d.change, 2),
            sig(d.median_change, 2),
            d.cause,
        ]
        for i in found
        for d in i.differences
    ]
    if not rows:
        return []
    heads = ["setting", "plan", "prompt", "seed", "token (position)", "without / with drafts"]
    heads += ["margin", "change of their distance", "of a logit of the two", "of the row, median"]
    return ["", *measuring.table([*heads, "cause"], rows)]


# ---------------------------------------------------------------------------------------------
# acceptance


@dataclass(frozen=True)
class Place:
    """One position of a text, as a plan would draft it."""

    answer: int
    offset: int  # in the block, 0-based
    match: bool  # the draft's pick is the token of the text
    gumbel: float  # chance of that, over all seeds
    maximal: float
    independent: float
    best: bool  # the most probable token is the same


@dataclass
class Acceptance:
    """A plan at one setting."""

    setting: str
    plan: str
    skipped: int
    places: list[Place] = field(default_factory=list)
    # drafted tokens of the real loop by their place in the draft: verified behind accepted ones
    # only, and accepted
    tried: list[int] = field(default_factory=lambda: [0] * BLOCK_TOKENS)
    accepted: list[int] = field(default_factory=lambda: [0] * BLOCK_TOKENS)

    def mean(self, of: Callable[[Place], float]) -> float:
        return float(np.mean([of(p) for p in self.places]))

    def error(self, of: Callable[[Place], float], seed: int = 0) -> float:
        """Standard error of that mean, by drawing answers with replacement."""
        answers = sorted({p.answer for p in self.places})
        sums = np.array(
            [[sum(of(p) for p in self.places if p.answer == a),
              sum(p.answer == a for p in self.places)] for a in answers]
        )  # fmt: skip
        draws = np.random.default_rng(seed).integers(0, len(answers), (BOOTSTRAPS, len(answers)))
        drawn = sums[draws].sum(axis=1)
        return float(np.std(drawn[:, 0] / drawn[:, 1]))

    @property
    def deviations(self) -> float:
        """How many standard errors the matches lie above what shared noise lets expect. Given the
        text before it, each is an independent draw, so variances add up."""
        variance = sum(p.gumbel * (1.0 - p.gumbel) for p in self.places)
        excess = sum(p.match - p.gumbel for p in self.places)
        if variance < 1e-9:  # certain to match or to miss, but for rounding
            return 0.0 if abs(excess) < 1e-6 else math.copysign(math.inf, excess)
        return excess / math.sqrt(variance)

    @property
    def in_loop(self) -> float:
        """Share of the drafted tokens accepted, of those whose predecessors all were."""
        return sum(self.accepted) / sum(self.tried) if sum(self.tried) else math.nan


def places_of(
    backend: Backend,
    prompt: Sequence[int],
    tokens: Sequence[int],
    target: Sequence[NDArray[np.float64]],
    rows: Sequence[Row],
    sampling: Sampling,
    plan: Plan,
    number: int,
) -> list[Place]:
    """The text of an answer drafted in blocks of BLOCK_TOKENS, each behind keys of the full model
    and token by token, as if all before it had been accepted.

    `target` holds the distributions that tokens were drawn from, `rows` their logits. The first
    token comes with the prompt, nobody drafts it. The cache holds at least the prompt.
    """
    found = []
    for start in range(1, len(tokens), BLOCK_TOKENS):
        rewind(backend, len(prompt) + start - 1)
        block = range(start, min(start + BLOCK_TOKENS, len(tokens)))
        for i in block:
            pick = backend.decode(tokens[i - 1], sampling, plan)
            row = backend.logits(0)
            history = [*prompt, *tokens[:i]]
            chances = agreement(target[i], distribution(row, sampling, history))
            best = int(np.argmax(rows[i])) == int(np.argmax(row))
            found.append(Place(number, i - start, pick.token == tokens[i], *chances, best))
        rewind(backend, len(prompt) + start - 1)
        backend.append(tokens[start - 1 : block[-1]])
    return found


def accepted(
    backend: Backend,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    settings: Mapping[str, Sampling],
    plans: Mapping[str, Plan],
    max_tokens: int,
    show: Show,
) -> list[Acceptance]:
    found = {
        (setting, name): Acceptance(setting, name, len(plan.skipped))
        for setting in settings
        for name, plan in plans.items()
    }
    total, done = len(prompts) * len(settings) * len(seeds), 0
    for number, prompt in enumerate(prompts):
        for setting, base in settings.items():
            for turn, seed in enumerate(seeds if base.temperature > 0.0 else list(seeds)[:1]):
                sampling = _seeded(base, seed)
                recorder = Recorder(backend, lambda _: 0)
                answer = answered(primed(recorder, prompt), prompt, sampling, None, max_tokens)
                tokens = answer.tokens
                rows = [recorder.rows[i] for i in range(len(tokens))]
                target = [
                    distribution(row, sampling, [*prompt, *tokens[:i]])
                    for i, row in enumerate(rows)
                ]
                rewind(backend, len(prompt))
                for name, plan in plans.items():
                    found[setting, name].places += places_of(
                        backend, prompt, tokens, target, rows, sampling, plan,
                        number * len(seeds) + turn,
                    )  # fmt: skip
                session = primed(backend, prompt)
                for name, plan in plans.items():
                    draft = Draft(plan, BLOCK_TOKENS, 0.0)
                    stats = answered(session, prompt, sampling, draft, max_tokens).stats
                    own = found[setting, name]
                    for i, (n, k) in enumerate(zip(stats.tried_at, stats.accepted_at, strict=True)):
                        own.tried[i] += n
                        own.accepted[i] += k
                done += 1
                show("counting acceptance", done / total)
    return [own for own in found.values() if own.places]


def acceptance_table(found: Sequence[Acceptance]) -> list[str]:
    heads = ["setting", "plan", "left out", "places", "matches (± standard error)"]
    heads += ["expected of shared noise", "standard errors apart", "rejection sampling"]
    heads += ["sample and match", "same best token", "by place in the block"]
    heads += ["in the loop (tokens)", "by place"]
    rows = []
    for a in found:
        by_place = [
            np.mean([p.match for p in a.places if p.offset == k])
            for k in sorted({p.offset for p in a.places})
        ]
        in_loop = [k / n for n, k in zip(a.tried, a.accepted, strict=True) if n]
        rows.append(
            [
                SETTING_WORDS.get(a.setting, a.setting),
                a.plan,
                str(a.skipped),
                f"{len(a.places):,}",
                f"{a.mean(lambda p: p.match):.3f} ± {a.error(lambda p: p.match):.3f}",
                f"{a.mean(lambda p: p.gumbel):.3f}",
                f"{a.deviations:+.1f}",
                f"{a.mean(lambda p: p.maximal):.3f}",
                f"{a.mean(lambda p: p.independent):.3f}",
                f"{a.mean(lambda p: p.best):.3f}",
                " ".join(f"{share:.2f}" for share in by_place),
                f"{a.in_loop:.3f} ({sum(a.tried):,})",
                " ".join(f"{share:.2f}" for share in in_loop),
            ]
        )
    return measuring.table(heads, rows)


def acceptance_json(a: Acceptance) -> dict[str, Any]:
    names = ("match", "gumbel", "maximal", "independent", "best")
    return {
        "setting": a.setting,
        "plan": a.plan,
        "skipped": a.skipped,
        "places": len(a.places),
        **{name: a.mean(lambda p, n=name: getattr(p, n)) for name in names},
        **{f"{name}_error": a.error(lambda p, n=name: getattr(p, n)) for name in names},
        "deviations": a.deviations,
        "in_loop": a.in_loop,
        "tried": a.tried,
        "accepted": a.accepted,
    }


# ---------------------------------------------------------------------------------------------
# The program


def parse_names(text: str, known: Sequence[str], option: str) -> list[str]:
    """Names of "a,b", in that order. Raises UsageError."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise UsageError(f"{option} {ascii(text)}: choose of {', '.join(known)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, words: str) -> Any:
        sub = commands.add_parser(
            name, help=words, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        models_of = "paths, or names of the manifest that have been fetched"
        sub.add_argument("models", nargs="+", metavar="MODEL", help=models_of)
        sub.add_argument("--ctx", type=int, default=CTX_TOKENS, help="context, in tokens")
        measuring.add_settings(sub)
        return sub

    def texts(sub: Any, settings: str, seeds: int, tokens: int) -> None:
        add = sub.add_argument
        add("--settings", default=settings, metavar="NAME,...", help=f"of {', '.join(SETTINGS)}")
        add("--plans", default=",".join(PLANS), metavar="NAME,...", help="of the same")
        add("--prompts", type=int, default=len(QUESTIONS), help=f"up to {len(QUESTIONS)}")
        add("--seeds", type=int, default=seeds, help="1..this")
        add("--max-tokens", type=int, default=tokens, help="of each answer")

    one = command("identity", "the same text with drafts and without")
    texts(one, "greedy,paper,t1.0,penalised", 5, 48)
    two = command("acceptance", "how often drafts are right, against what can be expected")
    texts(two, "greedy,t0.7,t1.0,paper", 1, 48)
    three = command("cost", "time of a pick, as a share of a round")
    pick_cost.add_options(three)
    return parser


def _check_options(options: argparse.Namespace) -> None:
    measuring.check_settings(options)
    for name in ("prompts", "seeds"):
        if getattr(options, name, 1) < 1:
            raise UsageError(f"--{name} must be at least 1")
    if getattr(options, "prompts", 1) > len(QUESTIONS):
        raise UsageError(f"--prompts {options.prompts}: there are {len(QUESTIONS)}")
    if getattr(options, "max_tokens", 2) < 2:
        raise UsageError("--max-tokens must be at least 2: the first token is never drafted")
    if options.command == "cost":
        pick_cost.check_options(options)
        return
    parse_names(options.settings, list(SETTINGS), "--settings")
    parse_names(options.plans, list(PLANS), "--plans")


@dataclass
class Opened:
    """A model with a context, plans and prompts."""

    backend: Any
    model: Any
    prompts: list[list[int]]
    plans: dict[str, Plan]
    data: dict[str, Any]
    show: Show

    @property
    def strict(self) -> bool:
        """Whether nothing but rounding of single precision is in its logits."""
        settings = self.backend.settings
        weights = self.data["model_type"].lower() in ("f32", "all f32")
        return weights and settings["kv_type"] == "f32" and settings["flash_attn"] == "off"


@contextmanager
def _opened(options: argparse.Namespace, name: str, terminal: Terminal) -> Iterator[Opened]:
    with (
        measuring.opened_model(options, name, terminal) as (model, info),
        measuring.open_context(options, model, options.ctx) as backend,
    ):
        require_plans(backend, info.path.name)
        prompts = prompts_of(model, choose_template(model), len(QUESTIONS))

        def show(stage: str, share: float) -> None:
            terminal.progress(f"{info.path.name}: {stage}", min(1.0, share))

        with backend.interruptible():
            plans = plans_by_harm(backend, prompts[0], lambda share: show("ranking", share))
            data = measuring.setting(backend, info)
            data["plans"] = {name: plan.skipped for name, plan in plans.items()}
            terminal.text(f"{measuring.setting_line(data)}\n")
            sizes = ", ".join(f"{plan} {len(p.skipped)}" for plan, p in plans.items())
            terminal.text(f"Plans leave out {sizes} of {len(backend.sublayers)} sublayers.\n")
            yield Opened(backend, model, prompts, plans, data, show)


def _words(model: Any) -> Callable[[int], str]:
    def words(token: int) -> str:
        text = "" if token < 0 else model.token_bytes(token, special=True).decode(errors="replace")
        return f"`{ascii(text)[1:-1].replace('|', '/').replace('`', ' ')}` {token}"

    return words


def _identity(options: argparse.Namespace, terminal: Terminal, failures: list[str]) -> Any:
    settings = {n: SETTINGS[n] for n in parse_names(options.settings, list(SETTINGS), "--settings")}
    names = parse_names(options.plans, list(PLANS), "--plans")
    seeds = range(1, options.seeds + 1)
    results = []
    for name in options.models:
        with _opened(options, name, terminal) as opened:
            noise = batch_noise(opened.backend, opened.prompts[0])
            drafts = {
                n: Draft(opened.plans[n], DRAFT_LENGTHS[n], 0.0) for n in names if n in opened.plans
            }
            found = compared(
                opened.backend,
                NativePick(),
                opened.prompts[: options.prompts],
                seeds,
                settings,
                drafts,
                options.max_tokens,
                opened.show,
            )
            lines = ["", *identity_table(found)]
            lines += difference_table(found, _words(opened.model))
            lines += [
                "",
                f"{counted(options.prompts, 'prompt')}, {counted(options.seeds, 'seed')}, up to "
                f"{options.max_tokens} tokens; a margin is that of the pick without drafts.",
                f"A logit of the two best tokens changes by {sig(float(np.median(noise)), 2)} "
                f"(median; at most {sig(float(noise.max()), 2)} at {len(noise)} places) between "
                f"passes of 1 and of {NOISE_WIDTH} tokens.",
                "",
            ]
            terminal.text("\n".join(lines) + "\n")
            label = opened.data["model"]
            problems = [*unproved(found), *broken(found, opened.strict)]
            failures += [f"{label}: {line}" for line in problems]
            results.append(
                {
                    **opened.data,
                    "strict": opened.strict,
                    "noise_median": float(np.median(noise)),
                    "noise_max": float(noise.max()),
                    "found": [asdict(i) for i in found],
                }
            )
    return {"max_tokens": options.max_tokens, "models": results, "failures": failures}


def _acceptance(options: argparse.Namespace, terminal: Terminal, _failures: list[str]) -> Any:
    settings = {n: SETTINGS[n] for n in parse_names(options.settings, list(SETTINGS), "--settings")}
    names = parse_names(options.plans, list(PLANS), "--plans")
    results = []
    for name in options.models:
        with _opened(options, name, terminal) as opened:
            found = accepted(
                opened.backend,
                opened.prompts[: options.prompts],
                range(1, options.seeds + 1),
                settings,
                {n: opened.plans[n] for n in names},
                options.max_tokens,
                opened.show,
            )
            terminal.text("\n".join(["", *acceptance_table(found), "", ""]))
            results.append({**opened.data, "found": [acceptance_json(a) for a in found]})
    terminal.text(
        f"On sampled text of the target, drafted in blocks of {BLOCK_TOKENS}, token by token "
        "behind keys of the full model, as if all before had been accepted; in the loop: real "
        "rounds with the same prompts and seeds.\n"
    )
    return {"max_tokens": options.max_tokens, "block": BLOCK_TOKENS, "models": results}


def _cost(options: argparse.Namespace, terminal: Terminal, _failures: list[str]) -> Any:
    results = []
    for name in options.models:
        with _opened(options, name, terminal) as opened:
            found = pick_cost.measure(
                opened.backend, opened.model, opened.prompts, opened.plans["some"], options,
                opened.show,
            )  # fmt: skip
            terminal.text("\n".join(["", *pick_cost.report(found), ""]) + "\n")
            results.append({**opened.data, **pick_cost.to_json(found)})
    return {"models": results}


_COMMANDS = {"identity": _identity, "acceptance": _acceptance, "cost": _cost}


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    failures: list[str] = []

    def body(terminal: Terminal) -> None:
        _check_options(options)
        data = _COMMANDS[options.command](options, terminal, failures)
        terminal.text(f"\n{measuring.json_line({'command': options.command, **data})}\n")
        for line in failures:
            terminal.error(line)

    return measuring.run_guarded(body) or int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
