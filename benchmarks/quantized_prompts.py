"""Is a quantised model's other answer a near-tie or a defect? Greedy text on prompts, token by token.

    python benchmarks/quantized_prompts.py MODEL --weights int8 int4 --prompts 100 --tokens 16 --json

float32 in torch continues each prompt greedily; every other precision reads that same text (teacher-forced)
and says which token it would have written at each place. Of the places where the two differ, the margin of
float32 between its two likeliest tokens is reported, beside the change that quantising makes to that margin
at all places. A defect would change the order where the margin is many times that change. Bits per byte are
those of the prompts, which no model wrote.

For each kind of `--gguf`, two more: weights rounded as in such a file (exported, read back, run in float32),
and llama.cpp on that file, where the wheel xllamacpp is installed. llama.cpp on an F32 file is the control:
it must say what our float32 says.

Cost: each text is written once, in batches, and read once by each: 80 tokens at full depth. Minutes for
SmolLM2 on one core, and stderr shows how far it is.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from llama_library import LlamaLibrary, library
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
ROWS = 20
"""Prompts that are continued side by side: a matrix is read once for all of them."""
CONTROL = "F32"
T = TypeVar("T")
Reader = Callable[[list[int]], Tensor]
"""(places, vocabulary): the logits behind every token of a text."""


@dataclass(frozen=True)
class Text:
    """A prompt, and what float32 writes behind it."""

    tokens: list[int]
    given: int
    """Tokens of the prompt."""
    bytes_: int
    """Of the prompt but for its first token, which nothing predicts."""


def shown(what: str, items: Sequence[T]) -> Iterator[T]:
    """The items, with a line on stderr for every tenth."""
    for done, item in enumerate(items):
        if done % 10 == 0:
            print(f"{what}: {done} of {len(items)}", file=sys.stderr, flush=True)
        yield item


def prompts_of(session: LoadedTextRun, number: int) -> list[list[int]]:
    """Questions in the model's chat form where it has one, and excerpts of code and prose."""
    source = Prompts(session.tokenizer, read_corpus(None).train, seed=0)
    return [source.row(i, LENGTH).next(False) for i in range(number)]


def written(session: LoadedTextRun, engine: Engine, prompts: int, tokens: int) -> list[Text]:
    """The texts that all precisions read."""
    texts, given = [], prompts_of(session, prompts)
    for start in shown("rows that float32 writes", range(0, prompts, ROWS)):
        some = given[start : start + ROWS]
        for prompt, found in zip(some, generate_batch(FixedDepth(engine), some, tokens), strict=True):
            size = len(session.tokenizer.decode(prompt[1:]).encode())
            texts.append(Text(prompt + [emitted.token for emitted in found], len(prompt), size))
    return texts


@torch.inference_mode()
def ours(engine: Engine, tokens: list[int]) -> Tensor:
    """The model at full depth."""
    stage = engine.plan.predicting()[-1]
    hidden = cached_outputs(engine.runtime, engine.plan, torch.tensor([tokens]), [stage])
    terms = engine.plan.prediction.after(stage)
    return predict(engine.runtime, engine.plan, {k: h[0] for k, h in hidden.items()}, terms)


@dataclass(frozen=True)
class Reading:
    """What is kept of one precision's logits on one text."""

    nats: float
    """Of the prompt's tokens."""
    said: Tensor
    """(places,) the likeliest token at each place that float32 wrote."""
    pair: Tensor
    """(places, 2) the logits there of float32's two likeliest tokens."""


def read(logits: Tensor, text: Text, pair: Tensor | None) -> tuple[Reading, Tensor]:
    """A reading, and the two tokens (places, 2) that it is about: those of float32, its own where None."""
    given = torch.tensor(text.tokens[1 : text.given])
    log_p = logits[: text.given - 1].double().log_softmax(-1).gather(-1, given[:, None])
    own = logits[text.given - 1 : -1]
    pair = own.topk(2, dim=-1).indices if pair is None else pair
    return Reading(-float(log_p.sum()), own.argmax(-1), own.gather(-1, pair)), pair


def summary(texts: list[Text], plain: list[Reading], other: list[Reading]) -> dict[str, float]:
    """Over all places of all prompts, and over the first place of each."""
    same = torch.cat([a.said == b.said for a, b in zip(plain, other, strict=True)])
    first = torch.stack([a.said[0] == b.said[0] for a, b in zip(plain, other, strict=True)])
    margin, theirs = (torch.cat([r.pair[:, 0] - r.pair[:, 1] for r in each]) for each in (plain, other))
    change, lost = (theirs - margin).abs(), margin[~same]
    bits = math.log(2) * sum(text.bytes_ for text in texts)
    return {
        "places": same.numel(),
        "agreement": float(same.double().mean()),
        "first_token_agreement": float(first.double().mean()),
        "bpb": sum(reading.nats for reading in other) / bits,
        "bpb_float32": sum(reading.nats for reading in plain) / bits,
        "change_median": float(change.median()),
        "change_p99": float(change.double().quantile(0.99)),
        "margin_median": float(margin.median()),
        "lost_margin_median": float(lost.median()) if len(lost) else 0.0,
        "lost_margin_max": float(lost.max()) if len(lost) else 0.0,
    }


def exported(model: Path, kind: str, place: Path) -> Path:
    """The model as a GGUF file of some kind."""
    if not (place / kind).exists():
        export_model(model, place / kind, "gguf", kind)
    return next((place / kind).glob("*.gguf"))


def rounded(model: Path, kind: str, place: Path) -> Reader:
    """The model with the weights of a GGUF file of some kind, in float32."""
    import_model(exported(model, kind, place), place / f"{kind}-run")
    return partial(ours, engine_of(open_session(place / f"{kind}-run"), "torch"))


def llama(model: Path, kind: str, place: Path) -> Reader:
    """llama.cpp on a GGUF file of some kind."""
    opened = LlamaLibrary(exported(model, kind, place), torch.get_num_threads())
    return lambda tokens: torch.from_numpy(opened.logits(tokens))


def readers(args: argparse.Namespace, session: LoadedTextRun, place: Path) -> dict[str, Callable[[], Reader]]:
    """Everybody who is compared with float32, made when it is their turn."""
    found: dict[str, Callable[[], Reader]] = {
        name: lambda name=name: partial(ours, engine_of(session, args.runtime, name))  # type: ignore[misc]
        for name in args.weights
    }
    kinds = [CONTROL, *args.gguf] if args.gguf else []
    if library() is None:
        print("llama.cpp is left out: the wheel xllamacpp is not installed", file=sys.stderr)
        kinds = []
    found |= {f"llama.cpp {kind}": partial(llama, args.model, kind, place) for kind in kinds}
    return found | {f"{kind} rounded": partial(rounded, args.model, kind, place) for kind in args.gguf}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every precision on the same texts."""
    session = open_session(args.model)
    engine = engine_of(session, "torch")
    texts = written(session, engine, args.prompts, args.tokens)
    plain = [read(ours(engine, text.tokens), text, None) for text in shown("float32 reads", texts)]
    results = {}
    with tempfile.TemporaryDirectory() as place:
        for name, make in readers(args, session, Path(place)).items():
            reader = make()
            pairs = list(zip(texts, plain, strict=True))
            other = [
                read(reader(text.tokens), text, pair)[0] for text, (_, pair) in shown(f"{name} reads", pairs)
            ]
            results[name] = summary(texts, [reading for reading, _ in plain], other)
            print(f"{name}: {json.dumps(results[name])}", file=sys.stderr, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--runtime", default="native", help="of the quantised weights")
    parser.add_argument("--weights", nargs="*", default=["int8", "int4"])
    parser.add_argument("--gguf", nargs="*", default=["Q8_0"])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = measure(args)
    if args.json:
        print(json.dumps(results))
        return
    for name, row in results.items():
        print(name, *(f"{key} {value:.4g}" for key, value in row.items()), sep="  ")


if __name__ == "__main__":
    main()
