"""The output projection of a GGUF model as f32 rows, dequantised when they are asked for.

These are the weights as the file means them. llama.cpp multiplies quantised weights with
activations that it rounds to 8 bits first, so its logits differ from products with these rows by
that rounding.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .errors import ModelError
from .gguf_check import GgufInfo, Tensor, find_tensor, show


class GgufHead:
    """Implements `search.certificate.Head` on a file that stays on disk.

    The head is output.weight, or the token embedding where the model ties them.
    """

    def __init__(self, info: GgufInfo) -> None:
        """Raises ModelError where there is no head, or one of a type that cannot be dequantised."""
        name = "token_embd.weight" if info.tied_embeddings else "output.weight"
        weight = find_tensor(info, name)
        if weight is None or len(weight.shape) != 2 or not weight.n_bytes:
            raise ModelError(f"{show(info.path)} has no output projection ({name})")
        self.tied = info.tied_embeddings
        self.type_name = weight.type_name
        self.n_embd, self.n_vocab = weight.shape
        self._kind = weight.kind
        self._data = _map(weight)  # u8 [n_vocab, bytes of a row]
        self.rows(0, 1)
        bias = find_tensor(info, "output.bias")
        self.bias: NDArray[np.float32] | None = None
        if bias is not None:
            self.bias = _dequantise(_map(bias), bias.kind, bias.type_name).reshape(-1)

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """f32 [stop - start, n_embd]"""
        return _dequantise(self._data[start:stop], self._kind, self.type_name)

    def take(self, indices: NDArray[np.intp]) -> NDArray[np.float32]:
        """f32 [len(indices), n_embd]"""
        return _dequantise(self._data[indices], self._kind, self.type_name)


def _map(tensor: Tensor) -> NDArray[np.uint8]:
    """u8 [rows, bytes of a row], read when looked at."""
    n_rows = int(np.prod(tensor.shape[1:], dtype=np.int64))
    shape = (n_rows, tensor.n_bytes // n_rows)
    try:
        return np.memmap(
            tensor.path, dtype=np.uint8, mode="r", offset=tensor.offset_bytes, shape=shape
        )
    except OSError as error:
        raise ModelError(f"cannot read {show(tensor.path)}: {error.strerror or error}") from error


def _dequantise(data: NDArray[np.uint8], kind: int, type_name: str) -> NDArray[np.float32]:
    import gguf

    try:
        return np.asarray(gguf.quants.dequantize(data, gguf.GGMLQuantizationType(kind)), np.float32)
    except (NotImplementedError, ValueError) as error:
        raise ModelError(f"weights of type {type_name} cannot be dequantised here") from error
