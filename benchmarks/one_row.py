"""One matrix, one to eight rows: the bytes that ONNX Runtime reads a second, packed and not packed.

    python benchmarks/one_row.py [--threads 1] [--rounds 12]

The matrix is SmolLM2's head (49,152 × 576, float32). Three forms take turns: packed (what `runtime/graph.py`
has), as it lies in the model (out, in), and transposed (in, out); the latter two without packing. Times are
lower quartiles of the process's own, so they hold on a machine that others use too, for one thread.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

OUT, IN = 49_152, 576


def session(kind: str, weight: np.ndarray, threads: int) -> onnxruntime.InferenceSession:
    """x times a matrix, in one of the forms."""
    if kind == "transposed":
        node, weight = helper.make_node("MatMul", ["x", "w"], ["y"]), np.ascontiguousarray(weight.T)
    else:
        node = helper.make_node("FusedMatMul", ["x", "w"], ["y"], transB=1, domain="com.microsoft")
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["r", w]) for n, w in (("x", IN), ("y", OUT))]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:], [onnx.numpy_helper.from_array(weight, "w")])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    if kind != "packed":
        options.add_session_config_entry("session.disable_prepacking", "1")
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12)
    asked = parser.parse_args()
    random = np.random.default_rng(0)
    weight = random.standard_normal((OUT, IN), dtype=np.float32)
    sessions = {kind: session(kind, weight, asked.threads) for kind in ("packed", "as it lies", "transposed")}
    found: dict[str, Any] = {kind: {} for kind in sessions}
    for rows in (1, 2, 4, 8):
        x = random.standard_normal((rows, IN), dtype=np.float32)
        seconds: dict[str, list[float]] = {kind: [] for kind in sessions}
        for _ in range(asked.rounds):
            for kind, each in sessions.items():
                began = time.process_time()
                each.run(None, {"x": x})
                seconds[kind].append(time.process_time() - began)
        for kind, taken in seconds.items():
            found[kind][str(rows)] = weight.nbytes / sorted(taken)[len(taken) // 4] / 1e9
    print(json.dumps({"threads": asked.threads, "gigabytes_per_second": found}))


if __name__ == "__main__":
    main()
