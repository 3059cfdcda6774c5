"""llama.cpp behind a pipe: one JSON request a line on stdin, one answer a line on stdout.

    python llama_worker.py MODEL.gguf THREADS CONTEXT wall|cpu
    {"prompt": [1, 2, 3], "tokens": 32}  ->  {"prefill": seconds, "decode": seconds, "tokens": [...]}

The prompt is read as one batch; then each token is the likeliest one, evaluated by itself. llama.cpp is the
one of the wheel xllamacpp, called through its C API; everything but context and threads is its default.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
import time
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int32, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "xllamacpp"


class Params(ctypes.Structure):
    """Parameters as llama.cpp's default functions give them, of any length: they are passed on the stack,
    where what lies behind them is not read. The first number of a context's is its length."""

    _fields_ = (("words", c_uint32 * 256),)


class Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", c_int32),
        *((name, c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")),
    )


def library() -> Any:
    """The wheel's extension as a library of C functions."""
    found = importlib.util.find_spec(PACKAGE)
    assert found is not None, f"pip install {PACKAGE}"
    assert found.origin is not None
    (file,) = (f for f in Path(found.origin).parent.glob("*.so") if PACKAGE in f.name)
    llama = ctypes.CDLL(str(file))
    for name, result, given in (
        ("llama_backend_init", None, []),
        ("llama_log_set", None, [c_void_p, c_void_p]),
        ("llama_model_default_params", Params, []),
        ("llama_context_default_params", Params, []),
        ("llama_model_load_from_file", c_void_p, [c_char_p, Params]),
        ("llama_init_from_model", c_void_p, [c_void_p, Params]),
        ("llama_set_n_threads", None, [c_void_p, c_int32, c_int32]),
        ("llama_n_threads", c_int32, [c_void_p]),
        ("llama_n_ctx", c_uint32, [c_void_p]),
        ("llama_model_get_vocab", c_void_p, [c_void_p]),
        ("llama_vocab_n_tokens", c_int32, [c_void_p]),
        ("llama_batch_get_one", Batch, [c_void_p, c_int32]),
        ("llama_decode", c_int32, [c_void_p, Batch]),
        ("llama_get_logits_ith", POINTER(c_float), [c_void_p, c_int32]),
        ("llama_get_memory", c_void_p, [c_void_p]),
        ("llama_memory_clear", None, [c_void_p, c_bool]),
    ):
        function = getattr(llama, name)
        function.restype, function.argtypes = result, given
    return llama


@ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)
def _silent(level: int, text: bytes, data: int) -> None:
    """What llama.cpp says goes nowhere."""


class Llama:
    """A model with one sequence."""

    def __init__(self, file: str, threads: int, context: int) -> None:
        self.llama = llama = library()
        llama.llama_log_set(_silent, None)
        llama.llama_backend_init()
        model = llama.llama_model_load_from_file(file.encode(), llama.llama_model_default_params())
        assert model, f"llama.cpp cannot read {file}"
        params = llama.llama_context_default_params()
        params.words[0] = context
        self.context = llama.llama_init_from_model(model, params)
        llama.llama_set_n_threads(self.context, threads, threads)
        assert llama.llama_n_threads(self.context) == threads
        assert llama.llama_n_ctx(self.context) >= context
        self.vocab: int = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    def clear(self) -> None:
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), True)

    def next(self, tokens: list[int]) -> int:
        """The likeliest token behind these."""
        ids = (c_int32 * len(tokens))(*tokens)
        batch = self.llama.llama_batch_get_one(ctypes.cast(ids, c_void_p), len(tokens))
        assert self.llama.llama_decode(self.context, batch) == 0
        logits = self.llama.llama_get_logits_ith(self.context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab,)).argmax())


def main() -> None:
    llama = Llama(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    now = time.process_time if sys.argv[4] == "cpu" else time.perf_counter
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        llama.clear()
        began = now()
        tokens = [llama.next(asked["prompt"])]
        read = now()
        for _ in range(asked["tokens"]):
            tokens.append(llama.next(tokens[-1:]))
        done = now()
        print(json.dumps({"prefill": read - began, "decode": done - read, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
