"""Statistics of an answer, for people (one line, a few lines) and for programs (JSON)."""

from __future__ import annotations

from typing import Any

from .. import policies
from ..decode.stats import acceptance_by_place, timings
from ..engine import Answer
from ..records import Draft, SubLayer, TokenEvent
from ..sampling import differences
from ..sampling import to_json as sampling_json
from ..text.vocabulary import Vocabulary

_EXACTNESS = {
    True: "bit for bit the text of plain decoding",
    False: "rounding may decide a close call otherwise than in plain decoding",
}


def statistics_line(answer: Answer) -> str:
    """One line after an answer: how fast, and what speculation did or why it is off."""
    stats = answer.stats
    parts = [f"{counted(stats.completion_tokens, 'token')}"]
    if stats.predicted_ms > 0.0:
        parts[0] += f", {stats.predicted_per_second:.1f} tokens/s"
    prompt = f"prompt {stats.prompt_tokens}"
    if stats.cached_tokens:
        prompt += f" ({stats.cached_tokens} cached)"
    parts.append(prompt)
    if stats.draft_n:
        share = 100.0 * stats.draft_n_accepted / stats.draft_n
        looked_up = _looked_up(answer)
        found = f", {looked_up} looked up" if looked_up else ""
        accepted = f"accepted {stats.draft_n_accepted} ({share:.0f} %{found})"
        parts.append(f"drafted {stats.draft_n}, {accepted}")
        if stats.speculation_stopped:
            parts.append(stats.speculation_stopped)
    elif answer.speculation.state == "on":
        parts.append("speculation on, nothing drafted")
    else:
        parts.append(f"speculation {answer.speculation}")
    if stats.drift:
        parts.append(stats.drift)
    if answer.sampling.temperature > 0.0:
        parts.append(f"seed {answer.sampling.seed}")
    return " · ".join(parts)


def _looked_up(answer: Answer) -> int:
    """Tokens of the answer that stood in the text before and were proposed."""
    by_model = "draft model" in policies.needs_of(answer.speculation.policy)
    return 0 if by_model else answer.stats.proposed_n_accepted


def statistics_table(answer: Answer) -> list[tuple[str, str]]:
    """(name, value) rows about one answer, times in milliseconds."""
    stats = answer.stats
    spec = answer.speculation
    rows = [
        ("prompt tokens", f"{stats.prompt_tokens} ({stats.cached_tokens} from the KV cache)"),
        ("prompt time", f"{stats.prompt_ms:.0f} ms"),
        ("answer tokens", str(stats.completion_tokens)),
        ("answer time", f"{stats.predicted_ms:.0f} ms"),
        ("speed", f"{stats.predicted_per_second:.1f} tokens/s"),
        ("finish reason", stats.finish_reason or "closed"),
        ("context used", f"{stats.prompt_tokens + stats.completion_tokens} of {answer.n_ctx}"),
        ("speculation", str(spec)),
    ]
    if stats.draft_n:
        proposed = f"{stats.proposed_n}, accepted {stats.proposed_n_accepted}"
        proposals = [("looked up", proposed)] if _looked_up(answer) else []
        rows += [
            ("drafted", str(stats.draft_n)),
            ("accepted", f"{stats.draft_n_accepted} ({100 * (stats.acceptance or 0):.0f} %)"),
            ("rounds", str(stats.rounds)),
            *proposals,
            ("draft time", f"{stats.draft_ms:.0f} ms"),
            ("verify time", f"{stats.verify_ms:.0f} ms"),
            ("overhead", f"{stats.overhead_ms:.0f} ms"),
            (
                "accepted per round",
                ", ".join(f"{k}: {n}" for k, n in sorted(stats.accepted_lengths.items())),
            ),
            (
                "accepted by place",
                ", ".join(f"{share:.2f}" for share in acceptance_by_place(stats)),
            ),
        ]
    if spec.bit_exact is not None:
        rows.append(("exactness", _EXACTNESS[spec.bit_exact]))
    if stats.drift:
        rows.append(("drift", stats.drift))
    if spec.baseline_per_second is not None:
        rows.append(("plain decoding", f"{spec.baseline_per_second:.1f} tokens/s (measured)"))
    rows += [("preset", answer.settings.preset), *differences(answer.sampling)]
    if answer.sampling.grammar is not None:
        rows.append(("form", form_name(answer)))
    rows.append(("seed", str(answer.sampling.seed)))
    return rows


def form_name(answer: Answer) -> str:
    """What the answer's form was given by."""
    return "grammar" if answer.settings.json_schema is None else "JSON schema"


def form_notice(answer: Answer) -> str | None:
    """What to say where an answer was cut before its form was complete; None otherwise."""
    if answer.sampling.grammar is None or answer.finish_reason != "length":
        return None
    return f"the answer was cut before it was all that the {form_name(answer)} asks for"


def answer_json(answer: Answer, sublayers: tuple[SubLayer, ...]) -> dict[str, Any]:
    """The object of `run --json`; llama.cpp's names where it has one."""
    stats = answer.stats
    spec = answer.speculation
    return {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": stats.finish_reason,
        "seed": answer.sampling.seed,
        "sampling": sampling_json(answer.settings, answer.sampling),
        "usage": {
            "prompt_tokens": stats.prompt_tokens,
            "completion_tokens": stats.completion_tokens,
            "cached_tokens": stats.cached_tokens,
            "total_tokens": stats.prompt_tokens + stats.completion_tokens,
        },
        "speculation": {
            "state": spec.state,
            "reason": spec.reason,
            "policy": spec.policy,
            "plan": None if spec.draft is None else plan_json(spec.draft, sublayers),
            "predicted_ratio": spec.predicted_ratio,
            "lookup": spec.lookup,
            "bit_exact": spec.bit_exact,
            "drift": stats.drift,
        },
        "timings": timings(stats, spec.baseline_per_second),
        "notices": list(answer.notices),
    }


# JSON has no infinity; OpenAI's number for "never"
_LEAST_LOGPROB = -9999.0


def logprobs_json(answer: Answer, vocabulary: Vocabulary) -> dict[str, Any]:
    """OpenAI's `logprobs` object: one entry per token of the answer, each with the most probable.

    `bytes` are the token's own, also where they are no whole character; `token` is their text.
    """

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        data = vocabulary.token_bytes(token, special=True)
        return {
            "id": token,
            "token": data.decode("utf-8", "replace"),
            "bytes": list(data),
            "logprob": None if logprob is None else max(logprob, _LEAST_LOGPROB),
        }

    def with_top(event: TokenEvent) -> dict[str, Any]:
        top = [entry(token, logprob) for token, logprob in event.top]
        return {**entry(event.token, event.logprob), "top_logprobs": top}

    return {"content": [with_top(event) for event in answer.tokens]}


def plan_json(draft: Draft, sublayers: tuple[SubLayer, ...]) -> dict[str, Any]:
    """A draft plan: which sublayers do not run fully, γ, and the threshold that ends a draft."""
    modes = zip(sublayers, draft.plan.modes, strict=True)
    return {
        "reduced": {str(sub): str(mode) for sub, mode in modes if str(mode) != "full"},
        "n_sublayers": len(draft.plan.modes),
        "head_rows": draft.plan.head_rows,
        "draft_max_tokens": draft.max_tokens,
        "draft_min_probability": draft.min_probability,
    }


def counted(n: int, noun: str) -> str:
    """ "1 token", "2 tokens"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
