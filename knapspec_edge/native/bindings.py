"""Declarations of the functions that the patch adds to libllama (patches/overlay/knapspec.h).

Unstable by nature: they follow the ABI number, not a release. Each binding stands below its C
declaration.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from .. import records
from ..errors import LibraryError
from ..records import ModeKind

# enum ggml_log_level
LOG_LEVELS = {"": 0, "none": 0, "debug": 1, "info": 2, "warn": 3, "error": 4}

# enum knapspec_mode
MODES = {ModeKind.FULL: 0, ModeKind.SKIP: 1, ModeKind.WINDOW: 2}

# return codes of knapspec_eval
OK = 0
NO_SLOT = 1
ABORTED = 2
BAD_ARGUMENT = -10
BAD_LOGITS = -11
DEAD_END = -12
COMPLETE = -13
UNREADABLE = -14


class LogitBias(ctypes.Structure):
    """struct llama_logit_bias { llama_token token; float bias; };"""

    _fields_ = [("token", ctypes.c_int32), ("bias", ctypes.c_float)]  # noqa: RUF012


class Sampling(ctypes.Structure):
    """struct knapspec_sampling, see knapspec.h. Made without values, nothing is filtered and the
    pick is the argmax."""

    _fields_ = [  # noqa: RUF012 - the form ctypes asks for
        ("temperature", ctypes.c_float),
        ("min_p", ctypes.c_float),
        ("seed", ctypes.c_uint64),
        ("top_p", ctypes.c_float),
        ("typical_p", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("temperature_first", ctypes.c_int32),
        ("repeat_penalty", ctypes.c_float),
        ("presence_penalty", ctypes.c_float),
        ("frequency_penalty", ctypes.c_float),
        ("penalty_last_n", ctypes.c_int32),
        ("n_bias", ctypes.c_int32),
        ("answer_start", ctypes.c_int32),
        ("bias", ctypes.POINTER(LogitBias)),
        ("grammar", ctypes.c_void_p),
    ]

    def __init__(self, **values: Any) -> None:
        off = {"top_p": 1.0, "typical_p": 1.0, "repeat_penalty": 1.0}
        super().__init__(**(off | values))

    def set(self, sampling: records.Sampling) -> None:
        """Take over everything but the grammar, which is a native object of its own."""
        for name in _SAME_NAME:
            setattr(self, name, getattr(sampling, name))
        self.seed = sampling.seed & 0xFFFFFFFFFFFFFFFF
        biases = sorted(sampling.logit_bias)
        self.n_bias = len(biases)
        self._biases = (LogitBias * len(biases))(
            *(LogitBias(*b) for b in biases)
        )  # stays alive as long as this
        self.bias = ctypes.cast(self._biases, ctypes.POINTER(LogitBias))


_SAME_NAME = (
    "temperature",
    "min_p",
    "top_p",
    "typical_p",
    "top_k",
    "temperature_first",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "penalty_last_n",
)

GRAPH_STATS = ("n_builds", "n_reuses", "n_evicted", "n_nodes", "n_kept")


class GraphStats(ctypes.Structure):
    """struct knapspec_graph_stats: int64_t n_builds, n_reuses, n_evicted, n_nodes, n_kept"""

    _fields_ = [(name, ctypes.c_int64) for name in GRAPH_STATS]  # noqa: RUF012


class Traits(ctypes.Structure):
    """struct knapspec_traits, see knapspec.h"""

    _fields_ = [  # noqa: RUF012
        ("signature", ctypes.c_uint64),
        ("weight_bytes", ctypes.c_int64),
        ("cell_bytes", ctypes.c_int64),
        ("n_cells", ctypes.c_int32),
        ("n_experts", ctypes.c_int32),
        ("n_experts_used", ctypes.c_int32),
        ("device", ctypes.c_char * 36),
    ]


class Window(ctypes.Structure):
    """struct knapspec_window, see knapspec.h"""

    _fields_ = [("n_sinks", ctypes.c_int32), ("n_recent", ctypes.c_int32)]  # noqa: RUF012


_p = ctypes.c_void_p
_i32 = ctypes.c_int32
_i32s = ctypes.POINTER(ctypes.c_int32)
_f32s = ctypes.POINTER(ctypes.c_float)

# name -> (result, arguments)
_FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    # int32_t knapspec_abi(void);
    "knapspec_abi": (_i32, []),
    # int32_t knapspec_n_sublayers(struct llama_context * ctx);
    "knapspec_n_sublayers": (_i32, [_p]),
    # const char * knapspec_refusal(struct llama_context * ctx);
    "knapspec_refusal": (ctypes.c_char_p, [_p]),
    # int32_t knapspec_sublayer(struct llama_context * ctx, int32_t i,
    #     int32_t * layer, int32_t * kind);
    "knapspec_sublayer": (_i32, [_p, _i32, _i32s, _i32s]),
    # int32_t knapspec_sublayer_traits(struct llama_context * ctx, int32_t i,
    #     struct knapspec_traits * out);
    "knapspec_sublayer_traits": (_i32, [_p, _i32, ctypes.POINTER(Traits)]),
    # int32_t knapspec_learned_positions(struct llama_context * ctx);
    "knapspec_learned_positions": (_i32, [_p]),
    # int32_t knapspec_set_plan(struct llama_context * ctx, const int32_t * modes, int32_t n,
    #     const struct knapspec_window * windows);
    "knapspec_set_plan": (_i32, [_p, _i32s, _i32, ctypes.POINTER(Window)]),
    # const char * knapspec_window_refusal(struct llama_context * ctx, int32_t i);
    "knapspec_window_refusal": (ctypes.c_char_p, [_p, _i32]),
    # void knapspec_set_repair(struct llama_context * ctx, int32_t interval);
    "knapspec_set_repair": (None, [_p, _i32]),
    # int64_t knapspec_get_repair(struct llama_context * ctx, float * out);
    "knapspec_get_repair": (ctypes.c_int64, [_p, _f32s]),
    # void knapspec_keep_graphs(struct llama_context * ctx, int32_t n);
    "knapspec_keep_graphs": (None, [_p, _i32]),
    # void knapspec_get_graph_stats(struct llama_context * ctx,
    #     struct knapspec_graph_stats * out);
    "knapspec_get_graph_stats": (None, [_p, ctypes.POINTER(GraphStats)]),
    # int32_t knapspec_eval(struct llama_context * ctx, const llama_token * tokens,
    #     int32_t n_tokens, llama_pos pos, int32_t n_outputs,
    #     const struct knapspec_sampling * sampling,
    #     llama_token * tokens_out, float * probs_out, float * margins_out);
    "knapspec_eval": (
        _i32,
        [_p, _i32s, _i32, _i32, _i32, ctypes.POINTER(Sampling), _i32s, _f32s, _f32s],
    ),
    # int32_t knapspec_beside(struct llama_context * ctx, const llama_token * tokens,
    #     int32_t n_blocks, const llama_pos * starts, const int32_t * lengths,
    #     const llama_token * expected, const struct knapspec_sampling * sampling,
    #     llama_token * tokens_out, float * probs_out, float * margins_out);
    "knapspec_beside": (
        _i32,
        [_p, _i32s, _i32, _i32s, _i32s, _i32s, ctypes.POINTER(Sampling), _i32s, _f32s, _f32s],
    ),
    # int32_t knapspec_n_hidden(struct llama_context * ctx);
    "knapspec_n_hidden": (_i32, [_p]),
    # int32_t knapspec_capture(struct llama_context * ctx, bool enable);
    "knapspec_capture": (_i32, [_p, ctypes.c_bool]),
    # int32_t knapspec_captured(struct llama_context * ctx, float * out, int32_t n_tokens);
    "knapspec_captured": (_i32, [_p, _f32s, _i32]),
    # const char * knapspec_branch_refusal(struct llama_context * ctx);
    "knapspec_branch_refusal": (ctypes.c_char_p, [_p]),
    # int32_t knapspec_branch_begin(struct llama_context * ctx, llama_pos start,
    #     const llama_token * tokens, int32_t n_tokens, int32_t n_branches);
    "knapspec_branch_begin": (_i32, [_p, _i32, _i32s, _i32, _i32]),
    # int32_t knapspec_branch_embed(struct llama_context * ctx, int32_t last,
    #     float * states_out);
    "knapspec_branch_embed": (_i32, [_p, _i32, _f32s]),
    # int32_t knapspec_branch_apply(struct llama_context * ctx, int32_t sublayer,
    #     int32_t n_branches, const float * states, float * states_out);
    "knapspec_branch_apply": (_i32, [_p, _i32, _i32, _f32s, _f32s]),
    # int32_t knapspec_branch_head(struct llama_context * ctx, int32_t n_branches,
    #     const float * states, llama_token * tokens_out, float * probs_out);
    "knapspec_branch_head": (_i32, [_p, _i32, _f32s, _i32s, _f32s]),
    # void knapspec_branch_end(struct llama_context * ctx);
    "knapspec_branch_end": (None, [_p]),
    # int32_t knapspec_fill(struct llama_context * ctx, int32_t n_tokens, llama_pos pos);
    "knapspec_fill": (_i32, [_p, _i32, _i32]),
    # int32_t knapspec_pick(const float * logits, int32_t n_vocab,
    #     const struct knapspec_sampling * sampling, int64_t position,
    #     const llama_token * history, int32_t n_history,
    #     llama_token * token_out, float * prob_out, float * margin_out);
    "knapspec_pick": (
        _i32,
        [
            _f32s,
            _i32,
            ctypes.POINTER(Sampling),
            ctypes.c_int64,
            _i32s,
            _i32,
            _i32s,
            _f32s,
            _f32s,
        ],
    ),
    # int32_t knapspec_logprobs(struct llama_context * ctx, int32_t row, llama_token token,
    #     int32_t n_top, float * logprob_out, llama_token * tokens_out, float * logprobs_out);
    "knapspec_logprobs": (_i32, [_p, _i32, _i32, _i32, _f32s, _i32s, _f32s]),
    # struct knapspec_grammar * knapspec_grammar_init(const struct llama_model * model,
    #     const char * text, const char * root, const llama_token * ends, int32_t n_ends);
    "knapspec_grammar_init": (_p, [_p, ctypes.c_char_p, ctypes.c_char_p, _i32s, _i32]),
    # void knapspec_grammar_free(struct knapspec_grammar * grammar);
    "knapspec_grammar_free": (None, [_p]),
    # bool knapspec_grammar_allows(struct knapspec_grammar * grammar,
    #     const llama_token * answer, int32_t n_answer, llama_token token);
    "knapspec_grammar_allows": (ctypes.c_bool, [_p, _i32s, _i32, _i32]),
    # void knapspec_set_kernels(bool enable);
    "knapspec_set_kernels": (None, [ctypes.c_bool]),
    # bool knapspec_get_kernels(void);
    "knapspec_get_kernels": (ctypes.c_bool, []),
    # int32_t knapspec_n_varying_weights(struct llama_context * ctx);
    "knapspec_n_varying_weights": (_i32, [_p]),
    # const char * knapspec_varying_weight(struct llama_context * ctx, int32_t i);
    "knapspec_varying_weight": (ctypes.c_char_p, [_p, _i32]),
    # const char * knapspec_head_weight(struct llama_context * ctx);
    "knapspec_head_weight": (ctypes.c_char_p, [_p]),
    # const char * knapspec_head_refusal(struct llama_context * ctx);
    "knapspec_head_refusal": (ctypes.c_char_p, [_p]),
    # int32_t knapspec_head_reserve(struct llama_context * ctx, int32_t n_rows, const char * path);
    "knapspec_head_reserve": (_i32, [_p, _i32, ctypes.c_char_p]),
    # int32_t knapspec_head_set(struct llama_context * ctx, const int32_t * places,
    #     const llama_token * tokens, int32_t n);
    "knapspec_head_set": (_i32, [_p, _i32s, _i32s, _i32]),
    # int32_t knapspec_use_head(struct llama_context * ctx, int32_t n_rows);
    "knapspec_use_head": (_i32, [_p, _i32]),
    # int32_t knapspec_head_logits(struct llama_context * ctx, int32_t row, float * out,
    #     int32_t n_rows);
    "knapspec_head_logits": (_i32, [_p, _i32, _f32s, _i32]),
    # void knapspec_interrupt(struct llama_context * ctx);
    "knapspec_interrupt": (None, [_p]),
    # void knapspec_interrupt_clear(struct llama_context * ctx);
    "knapspec_interrupt_clear": (None, [_p]),
    # int32_t knapspec_sigint_guard(struct llama_context * ctx, bool enable);
    "knapspec_sigint_guard": (_i32, [_p, ctypes.c_bool]),
    # void knapspec_log_install(int32_t level);
    "knapspec_log_install": (None, [_i32]),
    # int32_t knapspec_last_error(char * buf, int32_t size);
    "knapspec_last_error": (_i32, [ctypes.c_char_p, _i32]),
    # void knapspec_clear_error(void);
    "knapspec_clear_error": (None, []),
}


def declare(library: ctypes.CDLL, folder: Path) -> None:
    """Set result and argument types on `library`.

    Raises LibraryError naming every function that is missing.
    """
    missing = [name for name in _FUNCTIONS if not hasattr(library, name)]
    if missing:
        raise LibraryError(
            f"the libllama in {folder} is not the patched one (missing: {', '.join(missing)}): "
            "install the package again (pip install .)"
        )
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments


def last_error(library: ctypes.CDLL) -> str:
    """The latest error line of llama.cpp or ggml, without its newline; "" if there was none."""
    return next(reversed(_error_lines(library)), "")


def first_error(library: ctypes.CDLL) -> str:
    """The first error line since knapspec_clear_error: of a failure in steps, the cause."""
    return next(iter(_error_lines(library)), "")


def _error_lines(library: ctypes.CDLL) -> list[str]:
    buffer = ctypes.create_string_buffer(8192)
    library.knapspec_last_error(buffer, len(buffer))
    lines = buffer.value.decode(errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()]
