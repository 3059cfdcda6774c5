"""Quantisation cost: bits per byte and top-1 agreement of every exit, against float32.

    bpb          total nats of the targets / (ln 2 · bytes that they decode to), of each exit
    agreement    share of held-out tokens, teacher-forced, where an exit's likeliest token is float32's

Both models read the same windows whole; the quantised one in its own runtime, activations included. Limits:
windows are read at once, so sums of 8-bit products round in another order than token by token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from topograd.data.windows import Text
from topograd.decode.calibration.measure import cached_outputs
from topograd.decode.engine import Engine
from topograd.exec.forward import predict, stage_outputs
from topograd.runs.session import LoadedTextRun


@torch.inference_mode()
def precision_cost(
    session: LoadedTextRun, engine: Engine, text: Text, on_batch: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """The engine's weights against the session's, as plain numbers."""
    stack, plan, runtime = session.stack, session.plan, engine.runtime
    stages = plan.predicting()
    nats = torch.zeros(2, len(stages), dtype=torch.float64)
    agree, tokens = torch.zeros(len(stages), dtype=torch.float64), 0
    for row in range(len(text.inputs)):
        inputs, targets = text.inputs[row : row + 1], text.targets[row]
        counted = targets != -100
        own = stage_outputs(stack, plan, inputs, stages)
        other = cached_outputs(runtime, plan, inputs, stages)
        for k, stage in enumerate(stages):
            terms = plan.prediction.after(stage)
            z = [
                predict(reader, plan, {j: h[0][counted] for j, h in outputs.items()}, terms)
                for reader, outputs in ((stack, own), (runtime, other))
            ]
            for which, logits in enumerate(z):
                nats[which, k] += F.cross_entropy(logits, targets[counted], reduction="sum").double()
            agree[k] += (z[0].argmax(-1) == z[1].argmax(-1)).sum()
        tokens += int(counted.sum())
        if on_batch is not None:
            on_batch(row + 1, len(text.inputs))
    bpb = (nats / (math.log(2) * max(text.nbytes, 1))).tolist()
    return {
        "runtime": runtime.name,
        "weights": runtime.precision,
        "bpb": bpb[1],
        "float32_bpb": bpb[0],
        "agreement": (agree / max(tokens, 1)).tolist(),
        "tokens": tokens,
    }
