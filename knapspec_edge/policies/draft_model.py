"""A separate small model drafts: speculative decoding as llama.cpp does it with --draft.

The draft model has a context of its own with the text's keys, so it needs memory beside the target
and computes the prompt once more, which counts as the prompt's time. Its tokens have to be the
target's. Both draw with the same noise, so that sampling accepts as much as it can. A draft ends
before a token less probable than 0.75.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

from .. import gguf_check, models, native
from ..backend import Backend
from ..decode.policy import Guess, Policy
from ..decode.rollback import rewind
from ..errors import ModelError, NoTokenError, PlanError, UsageError
from ..records import GREEDY, Pick, Sampling
from ..text.fitting import common_length
from ..text.vocabulary import Vocabulary
from .lookup import Proposing
from .masked import check_cut
from .setting import Setting

# llama.cpp's: vocabularies of one family may be padded differently
_MOST_UNLIKE_TOKENS = 128


def create(setting: Setting) -> Policy:
    """Opens the draft model, with as much context as the target has.

    Raises UsageError without one, PlanError for a model whose cache cannot be cut back, ModelError
    for a file that is no such model or has another vocabulary, ContextError.
    """
    check_cut("draft-model", setting)
    if setting.draft_model is None or setting.vocabulary is None:
        raise UsageError("--policy draft-model needs --draft-model MODEL, a small one")
    info = gguf_check.inspect(models.resolve(setting.draft_model))
    target = dict(getattr(setting.backend, "settings", {}))
    gpu_layers = int(target.get("gpu_layers", -1))  # -1: the library decided
    with ExitStack() as resources:
        model = resources.enter_context(
            native.open_model(info.path, gpu_layers=gpu_layers if gpu_layers >= 0 else None)
        )
        name = info.name or info.path.stem
        if model.is_recurrent:
            raise PlanError(
                f"{name} cannot draft: it keeps a recurrent state, which cannot be cut back"
            )
        check_vocabulary(name, model, setting.vocabulary)
        same = ("threads", "threads_batch", "flash_attn")
        backend = resources.enter_context(
            native.open_context(
                model,
                ctx_tokens=setting.backend.n_ctx,
                **{key: target[key] for key in same if key in target},
                beside_tokens=0,
            )
        )
        config = setting.config
        return DraftModel(
            backend,
            setting.vocabulary.n_vocab,
            config.draft_model_max_draft,
            config.draft_model_min_probability,
            resources.pop_all().close,
        )


def check_vocabulary(name: str, draft: Vocabulary, target: Vocabulary) -> None:
    """Raises ModelError unless the tokens of both are the same, but for padding at the end."""

    def refuse(reason: str) -> ModelError:
        return ModelError(
            f"--draft-model {name} has another vocabulary than the model ({reason}); choose a "
            "small model of the same family"
        )

    if draft.vocab_type != target.vocab_type:
        raise refuse(f"{draft.vocab_type} in place of {target.vocab_type}")
    sizes = draft.n_vocab, target.n_vocab
    if abs(sizes[0] - sizes[1]) > _MOST_UNLIKE_TOKENS:
        raise refuse(f"{sizes[0]} tokens in place of {sizes[1]}")
    for token in range(min(sizes)):
        ours, theirs = draft.token_text(token), target.token_text(token)
        if ours != theirs:
            raise refuse(f"token {token} is {ours!r} in place of {theirs!r}")


class DraftModel(Proposing):
    """One per session. `backend`: the draft model's; its cache follows the text."""

    def __init__(
        self,
        backend: Backend,
        n_vocab: int,
        max_tokens: int,
        min_probability: float,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """`n_vocab` of the target: no other token is proposed."""
        self._backend = backend
        self._n_vocab = n_vocab
        self._max_tokens = max_tokens
        self._min_probability = min_probability
        self.close = close
        self._ids: list[int] = []  # in its cache
        self._n_prompt = 0
        self._n_answer = 0  # tokens of the answer that are known to be in it
        self._sampling = GREEDY

    def begin(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        """Raises what the backend raises."""
        # probabilities are not asked of a draft
        self._sampling = replace(sampling, n_probs=None)
        self._n_prompt, self._n_answer = len(prompt), 0
        shared = common_length(self._ids, prompt[:-1])
        self._cut(shared)
        backend = self._backend
        with _interruptible(backend):
            try:
                backend.prefill(prompt[shared:], self._sampling)
            except NoTokenError:
                pass  # whether the text can go on is for the target to say
            finally:
                self._ids = list(prompt[: backend.n_past])

    def propose(self, emitted: Sequence[int], most: int) -> list[Guess]:
        backend, sampling = self._backend, self._sampling
        # the last token has to be computed for the pick after it
        known = self._n_answer
        known += common_length(self._ids[self._n_prompt + known :], emitted[known:-1])
        self._cut(self._n_prompt + known)
        self._n_answer = known
        guesses: list[Guess] = []
        with _interruptible(backend):
            try:
                pick = self._catch_up(emitted[known:])
                while True:
                    if not 0 <= pick.token < self._n_vocab:
                        break
                    if pick.probability < self._min_probability:
                        break
                    guesses.append(Guess(pick.token, pick.probability))
                    if len(guesses) >= min(most, self._max_tokens) or backend.is_end(pick.token):
                        break
                    pick = backend.decode(pick.token, sampling)
                    self._ids.append(guesses[-1].token)
            except NoTokenError:
                pass
        return guesses

    def _catch_up(self, missing: Sequence[int]) -> Pick:
        """The pick after the text, of which the cache lacks these tokens."""
        backend = self._backend
        for start in range(0, len(missing), backend.max_verify_tokens):
            part = missing[start : start + backend.max_verify_tokens]
            picks = backend.verify(part, self._sampling)
            self._ids += part
        return picks[-1]

    def _cut(self, n_tokens: int) -> None:
        rewind(self._backend, n_tokens)
        del self._ids[n_tokens:]


def _interruptible(backend: Backend) -> AbstractContextManager[Any]:
    """Ctrl-C stops whatever computes: in here, the draft model."""
    guard = getattr(backend, "interruptible", None)
    return nullcontext() if guard is None else guard()
