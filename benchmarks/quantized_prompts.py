"""Is a quantised model's other answer a near-tie or a defect? Greedy text on prompts, token by token.

    python benchmarks/quantized_prompts.py MODEL --weights int8 int4 --prompts 100 --tokens 16 --json

float32 continues each prompt greedily; every other precision reads that same text (teacher-forced) and says
which token it would have written at each place. Of the places where the two differ, the margin of float32
between its two likeliest tokens is reported, beside the change that quantising makes to that margin at all
places. A defect would change the order where the margin is many times that change. With `--gguf Q8_0`,
weights rounded as llama.cpp's Q8_0 (exported, read back, run in float32) are compared too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from topograd.convert.export import export_model
from topograd.convert.importing import import_model
from topograd.convert.prompts import Prompts
from topograd.data.corpus import read_corpus
from topograd.decode.calibration.measure import cached_outputs
from topograd.decode.depths import engine_of
from topograd.decode.engine import Engine
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.exec.forward import predict
from topograd.runs.session import LoadedTextRun, open_session

LENGTH = 256
"""Excerpts have at most a quarter of so many tokens."""


def prompts_of(session: LoadedTextRun, number: int) -> list[list[int]]:
    """Questions in the model's chat form where it has one, and excerpts of code and prose."""
    source = Prompts(session.tokenizer, read_corpus(None).train, seed=0)
    return [source.row(i, LENGTH).next(False) for i in range(number)]


@torch.inference_mode()
def logits(engine: Engine, tokens: list[int], first: int) -> Tensor:
    """(places, vocabulary) of the model at full depth, from the place before token `first` on."""
    stage = engine.plan.predicting()[-1]
    hidden = cached_outputs(engine.runtime, engine.plan, torch.tensor([tokens]), [stage])
    terms = engine.plan.prediction.after(stage)
    return predict(engine.runtime, engine.plan, {k: h[0][first - 1 : -1] for k, h in hidden.items()}, terms)


def compared(plain: Tensor, other: Tensor) -> dict[str, Tensor]:
    """Per place: whether the likeliest token is the same, float32's margin, and the change of that margin."""
    top = plain.topk(2, dim=-1)
    margin = top.values[:, 0] - top.values[:, 1]
    theirs = other.gather(-1, top.indices)
    return {
        "same": other.argmax(-1) == top.indices[:, 0],
        "margin": margin,
        "change": (theirs[:, 0] - theirs[:, 1] - margin).abs(),
    }


def summary(parts: list[dict[str, Tensor]]) -> dict[str, float]:
    """Over all places of all prompts, and over the first place of each."""
    same, margin, change = (
        torch.cat([part[name] for part in parts]) for name in ("same", "margin", "change")
    )
    first = torch.stack([part["same"][0] for part in parts])
    lost = margin[~same]
    return {
        "places": same.numel(),
        "agreement": float(same.double().mean()),
        "first_token_agreement": float(first.double().mean()),
        "change_median": float(change.median()),
        "change_p99": float(change.double().quantile(0.99)),
        "margin_median": float(margin.median()),
        "lost_margin_median": float(lost.median()) if len(lost) else 0.0,
        "lost_margin_max": float(lost.max()) if len(lost) else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--weights", nargs="*", default=["int8", "int4"])
    parser.add_argument("--gguf", nargs="*", default=["Q8_0"])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    session = open_session(args.model)
    plain = engine_of(session, "torch")
    texts: list[tuple[list[int], int]] = []
    for prompt in prompts_of(session, args.prompts):
        written = generate_batch(FixedDepth(plain), [prompt], args.tokens)[0]
        texts.append((prompt + [emitted.token for emitted in written], len(prompt)))
    with tempfile.TemporaryDirectory() as place:
        engines: dict[str, Callable[[], Engine]] = {
            name: partial(engine_of, session, "onnx", name) for name in args.weights
        }
        for kind in args.gguf:
            engines[kind] = partial(rounded, args.model, kind, Path(place))
        results = {name: measured(plain, make(), texts) for name, make in engines.items()}
    if args.json:
        print(json.dumps(results))
        return
    for name, row in results.items():
        print(name, *(f"{key} {value:.4g}" for key, value in row.items()), sep="  ")


def rounded(model: Path, kind: str, place: Path) -> Engine:
    """The model with the weights of a GGUF file of some kind, in float32."""
    export_model(model, place / kind, "gguf", kind)
    import_model(next((place / kind).glob("*.gguf")), place / f"{kind}-run")
    return engine_of(open_session(place / f"{kind}-run"), "torch")


def measured(plain: Engine, other: Engine, texts: list[tuple[list[int], int]]) -> dict[str, Any]:
    """One precision on all texts."""
    return summary([compared(logits(plain, *text), logits(other, *text)) for text in texts])


if __name__ == "__main__":
    main()
