"""Embeddings of texts by depth: the states of an exit, pooled over a text and scaled to length 1.

    e = m / |m|     m the mean of the states h_1, ..., h_n after the exit's stage, or the last of them, h_n

The states are a stage's output (width,), before any norm of its head. `prefix:J` needs the first J stages
only, so an embedding of a shallow exit costs a part of the model. Sums are in float64. A model was trained to
predict with these states, not to compare texts with them: they are what it is, at every depth.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from torch import Tensor

from topograd.serve.request_schema import RequestError, unsupported
from topograd.serve.texts import ServedModel

Pooling = Literal["mean", "last"]


def pooled(states: Tensor, pooling: Pooling) -> tuple[float, ...]:
    """The embedding of a text with states (n, width)."""
    h = states.detach().cpu().double()
    mean = h.mean(0) if pooling == "mean" else h[-1]
    length = float(mean.norm())
    return tuple((mean / length if length > 0 else mean).tolist())


def depth_of(served: ServedModel, params: Mapping[str, Any]) -> str:
    """The depth of a request; speculation has the states of full depth."""
    depth = served.depth(params)
    kind = depth.partition(":")[0]
    if kind not in ("full", "prefix", "speculate"):
        raise RequestError(f"depth {depth} has no states of its own; use full or prefix:J", "depth")
    return "full" if kind == "speculate" else depth


def check(params: Mapping[str, Any]) -> None:
    """Whether a request can be done."""
    if params["dimensions"] is not None:
        raise unsupported("dimensions", "null: an embedding has the model's width")


def body(
    served: ServedModel,
    params: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    embeddings: Sequence[Sequence[float]],
) -> dict[str, Any]:
    """The response in OpenAI's format."""

    def spelled(values: Sequence[float]) -> Any:
        if params["encoding_format"] == "float":
            return list(values)
        return base64.b64encode(np.asarray(values, dtype="<f4").tobytes()).decode()

    tokens = sum(map(len, prompts))
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": spelled(values)}
            for index, values in enumerate(embeddings)
        ],
        "model": params["model"] or served.name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
