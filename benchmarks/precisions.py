"""What each precision costs: bits per byte, top-1 agreement and CORE tasks, ours beside llama.cpp's.

    python benchmarks/precisions.py MODEL --tasks DIR [--items 64] [--windows 16]

    text     windows of people's text: bits per byte, and how often the likeliest token is float32's
    tasks    the first items of CORE tasks, without examples: how many are right, how many are answered as
             float32 answers them, and the difference of the two accuracies

Everybody reads the same tokens: our kernels in every precision, llama.cpp on the model's GGUF files
(`quantized_prompts.py`). float32 is our kernels'; llama.cpp on the F32 file is the control. Intervals are of
a bootstrap over windows or items (95 %); a difference is paired by item. One JSON object a line for each;
nothing is timed.

Limits: a model that was read from a quantised file lies on that file's grid, which favours the same kind.
Cost: SmolLM2 at the default size reads 30,000 tokens for each of eight, a quarter of an hour of one core.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantized_prompts import Reader, llama, ours, shown
from topograd.data.corpus import read_corpus
from topograd.decode.depths import engine_of
from topograd.evaluation.core import judged
from topograd.evaluation.intervals import mean_interval
from topograd.evaluation.prompts import bundle_of
from topograd.evaluation.scoring import Score, TokenRow
from topograd.evaluation.tasks import Item, Task, chosen_tasks, find_files, read_items
from topograd.runs.session import LoadedTextRun, open_session

LENGTH = 256
"""Tokens of a window of text."""
CONTEXT = 512
"""Longer prompts lose their beginning, as llama.cpp's default context asks."""
TASKS = ("arc_easy", "copa", "lambada_openai", "piqa", "winograd")
WEIGHTS = ("float32", "bfloat16", "int8", "int4")
KINDS = ("F32", "Q8_0", "Q4_0", "Q4_1")


@dataclass(frozen=True)
class Question:
    """An item of a task, and the sequences that are scored for it."""

    task: Task
    item: Item
    rows: list[TokenRow]


def questions(session: LoadedTextRun, folder: Path, labels: tuple[str, ...], items: int) -> list[Question]:
    """The first items of each task, in CORE's order."""
    tasks = chosen_tasks(labels)
    files = find_files(folder, tasks)
    return [
        Question(task, item, bundle_of(task, item, [], session.tokenizer, CONTEXT)[0])
        for task in tasks
        for item in read_items(task, files[task.label])[:items]
    ]


def windows(session: LoadedTextRun, count: int) -> list[list[int]]:
    """The beginnings of documents of the usual text that are held out."""
    documents = [document.text[: 16 * LENGTH] for document in read_corpus(None).heldout]
    chosen = documents[:: max(len(documents) // (2 * count), 1)]
    rows = [session.tokenizer.encode(text)[:LENGTH] for text in chosen]
    return [list(row) for row in rows if len(row) == LENGTH][:count]


def score(logits: Tensor, row: TokenRow) -> Score:
    """One depth's score of a row, of its logits (tokens, vocabulary)."""
    wanted = torch.tensor(row.tokens[row.start :])[:, None]
    z = logits[row.start - 1 : len(row.tokens) - 1].double()
    own = z.gather(-1, wanted)
    rank = (z > own).sum(-1) + 1
    found = (own - z.logsumexp(-1, keepdim=True), own, rank[:, None], z.argmax(-1, keepdim=True) == wanted)
    return Score(*(each.T for each in found))


@dataclass(frozen=True, eq=False)
class Readings:
    """What one precision made of everything."""

    nats: list[float]
    """Of each window."""
    said: Tensor
    """(windows, places) the likeliest tokens."""
    answers: list[object]
    """Of each item: the choice, or whether the continuation is the likeliest."""
    right: list[bool]


def read(reader: Reader, texts: list[list[int]], asked: list[Question], name: str) -> Readings:
    """All windows and all items."""
    nats, said, answers, right = [], [], [], []
    for tokens in shown(f"{name}, windows", texts):
        logits = reader(tokens)
        nats.append(-float(score(logits, TokenRow(tokens, 1)).logprob.sum()))
        said.append(logits[:-1].argmax(-1))
    for question in shown(f"{name}, items", asked):
        scores = [score(reader(list(row.tokens)), row) for row in question.rows]
        found = judged(question.task, question.item, question.rows, scores)
        answers.append(found.get("answer", found["correct"])[0])
        right.append(found["correct"][0])
    return Readings(nats, torch.stack(said), answers, right)


def interval(values: Any) -> list[float]:
    """The mean, and its interval over the first dimension."""
    each = np.asarray(values, dtype=np.float64)
    return [float(each.mean()), *mean_interval(each[:, None])[0]]


def summary(plain: Readings, other: Readings, asked: list[Question], bytes_: list[int]) -> dict[str, Any]:
    """One precision beside float32."""
    bits = math.log(2) * np.asarray(bytes_)
    labels = [question.task.label for question in asked]
    right, same = (
        np.asarray(other.right, float),
        [a == b for a, b in zip(plain.answers, other.answers, strict=True)],
    )
    tasks = {}
    for label in [*dict.fromkeys(labels), "all"]:
        here = [i for i, own in enumerate(labels) if label in (own, "all")]
        tasks[label] = {
            "items": len(here),
            "accuracy": interval(right[here]),
            "difference": interval([right[i] - plain.right[i] for i in here]),
            "same_answer": float(np.mean([same[i] for i in here])),
        }
    return {
        "bpb": sum(other.nats) / float(bits.sum()),
        "bpb_difference": interval((np.asarray(other.nats) - plain.nats) / bits.mean()),
        "agreement": interval((other.said == plain.said).double().mean(1)),
        "places": plain.said.numel(),
        "tasks": tasks,
    }


def measure(args: argparse.Namespace) -> None:
    """Every precision in turn; float32 first."""
    session = open_session(args.model)
    texts = windows(session, args.windows)
    bytes_ = [len(session.tokenizer.decode(tokens[1:]).encode()) for tokens in texts]
    asked = questions(session, args.tasks, tuple(args.only), args.items)
    with tempfile.TemporaryDirectory() as place:
        readers: Mapping[str, Any] = {
            f"native {name}": lambda name=name: partial(ours, engine_of(session, "native", name))
            for name in args.weights
        } | {f"llama.cpp {kind}": partial(llama, args.model, kind, Path(place)) for kind in args.gguf}
        plain = None
        for name, make in readers.items():
            found = read(make(), texts, asked, name)
            plain = plain or found
            print(json.dumps({name: summary(plain, found, asked, bytes_)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tasks", type=Path, required=True, help="the folder of CORE's files")
    parser.add_argument("--only", nargs="*", default=TASKS, help="labels of tasks")
    parser.add_argument("--items", type=int, default=64, help="of each task")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument(
        "--weights", nargs="*", default=WEIGHTS, help="float32 first: the others are compared with it"
    )
    parser.add_argument("--gguf", nargs="*", default=KINDS)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
