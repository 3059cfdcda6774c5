"""llama.cpp behind a pipe: one JSON request a line on stdin, one answer a line on stdout.

    python llama_worker.py MODEL.gguf THREADS CONTEXT wall|cpu
    {"prompt": [1, 2, 3], "tokens": 32}  ->  {"prefill": seconds, "decode": seconds, "tokens": [...]}

The prompt is read as one batch; then each token is the likeliest one, evaluated by itself. `benchmarks/
llama_cpp.py` starts it with the Python that has llama-cpp-python.
"""

import importlib
import json
import sys
import time
from typing import Any

import numpy as np


def main() -> None:
    make: Any = importlib.import_module("llama_cpp").Llama
    file, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    llama = make(file, n_ctx=context, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)
    vocab = llama.n_vocab()
    now = time.process_time if sys.argv[4] == "cpu" else time.perf_counter

    def likeliest() -> int:
        logits = np.ctypeslib.as_array(llama._ctx.get_logits_ith(-1), shape=(vocab,))
        return int(logits.argmax())

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        llama.reset()
        began = now()
        llama.eval(asked["prompt"])
        tokens = [likeliest()]
        read = now()
        for _ in range(asked["tokens"]):
            llama.eval(tokens[-1:])
            tokens.append(likeliest())
        done = now()
        print(json.dumps({"prefill": read - began, "decode": done - read, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
