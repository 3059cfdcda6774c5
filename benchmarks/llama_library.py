"""llama.cpp inside this process, by ctypes: logits of a text at every place, from a GGUF file.

The wheel xllamacpp has llama.cpp's C functions in its extension module. Structures of parameters differ from
version to version, so they are never looked into: they are asked for (`..._default_params`) and handed back
in a buffer that is larger than any of them, which x86-64 and AArch64 Linux allow where a structure is the
last argument, as it is here. `llama_batch` has kept its layout.

Limits: a CPU, texts of at most CONTEXT tokens (llama.cpp's default).
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_float, c_int8, c_int32, c_void_p
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

CONTEXT = 512
"""llama.cpp's default."""


class _Parameters(ctypes.Structure):
    _fields_ = (("content", ctypes.c_byte * 4096),)


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


_FUNCTIONS = {
    "llama_model_default_params": (_Parameters, ()),
    "llama_context_default_params": (_Parameters, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, _Parameters)),
    "llama_init_from_model": (c_void_p, (c_void_p, _Parameters)),
    "llama_set_n_threads": (None, (c_void_p, c_int32, c_int32)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_batch_init": (_Batch, (c_int32, c_int32, c_int32)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_memory_clear": (None, (c_void_p, ctypes.c_bool)),
    "llama_decode": (c_int32, (c_void_p, _Batch)),
    "llama_get_logits_ith": (POINTER(c_float), (c_void_p, c_int32)),
    "llama_log_set": (None, (c_void_p, c_void_p)),
}
_Log = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)
_silent = _Log(lambda level, text, data: None)


def library() -> Path | None:
    """Where llama.cpp's functions are; None where the wheel is not installed."""
    found = importlib.util.find_spec("xllamacpp")
    places = list(found.submodule_search_locations or ()) if found is not None else []
    return next((file for place in places for file in Path(place).glob("xllamacpp*.so")), None)


class LlamaLibrary:
    """llama.cpp with one file."""

    def __init__(self, file: Path, threads: int) -> None:
        path = library()
        if path is None:
            raise RuntimeError("the wheel xllamacpp is not installed")
        self._c = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            getattr(self._c, name).restype, getattr(self._c, name).argtypes = result, arguments
        self._c.llama_log_set(ctypes.cast(_silent, c_void_p), None)
        self._c.llama_backend_init()
        model = self._c.llama_model_load_from_file(str(file).encode(), self._c.llama_model_default_params())
        context = model and self._c.llama_init_from_model(model, self._c.llama_context_default_params())
        if not context:
            raise RuntimeError(f"llama.cpp cannot open {file}")
        self._context = c_void_p(context)
        self._c.llama_set_n_threads(self._context, threads, threads)
        self._vocabulary = self._c.llama_vocab_n_tokens(self._c.llama_model_get_vocab(model))
        self._batch = self._c.llama_batch_init(CONTEXT, 0, 1)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """(tokens, vocabulary), of a text that is read as one batch."""
        if not 0 < len(tokens) <= CONTEXT:
            raise ValueError(f"a text of {len(tokens)} tokens; 1 to {CONTEXT} are read")
        batch = self._batch
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, place
            batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, 1
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), True)
        if self._c.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp did not read the text")
        rows = [self._c.llama_get_logits_ith(self._context, place) for place in range(len(tokens))]
        return np.stack([np.ctypeslib.as_array(row, shape=(self._vocabulary,)).copy() for row in rows])
