"""How much likelier a passage makes an answer, in other words than the question's and word for word.

    python benchmarks/passages.py [RUN] [--people 6] [--json]

RUN is a run of text, by default the reference model. Invented people (`papers/product_of_experts/facts.py`):
no model knows them, so what it answers behind a passage is from the passage. The gain is log P(answer) behind
the passage less log P(answer) without, in nats, with a 90 % interval over facts:

    right       the fact in other words, in which nothing that the prompt ends with stands before the answer
    verbatim    the prompt and the answer themselves: what copying gives
    irrelevant  another sentence
    wrong       the fact in other words with a wrong answer

and `gullible` is the share of facts whose wrong answer is the likelier one behind a wrong passage.
"Product of Experts" §8.2.1, R1 (712-fold, 6.6 nats), R2, R4. Limits: one prompt for each fact; intervals are
over facts, and not over models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

import clone  # noqa: F401  (for what is not installed)
from papers.product_of_experts.fact_readings import Reader
from papers.product_of_experts.facts import Fact, World, passage
from papers.verdicts import Interval
from topograd.pretrained import REFERENCE
from topograd.runs.session import open_session
from topograd.specialists.attach import attach

FRONTS: dict[str, Callable[[Fact, int], str]] = {
    "right": lambda fact, i: passage(fact, "right", seed=i),
    "verbatim": lambda fact, i: fact.statement(0),
    "irrelevant": lambda fact, i: passage(fact, "irrelevant", seed=i),
    "wrong": lambda fact, i: passage(fact, "wrong", seed=i),
}


@dataclass(frozen=True)
class Settings:
    """What is read."""

    run: tyro.conf.Positional[Path] = REFERENCE
    people: int = 6
    """Three facts each."""
    json: bool = False


def measure(settings: Settings) -> dict[str, Any]:
    """The gain of every kind of passage."""
    reader = Reader(attach(open_session(settings.run), []), {"base": {}})
    facts = World.make(settings.people).facts
    bare = _logs(reader, [(fact.prompt, fact.answer) for fact in facts])
    found: dict[str, Any] = {"run": str(settings.run), "facts": len(facts), "gain": {}}
    for name, front in FRONTS.items():
        texts = [f"{front(fact, i)}\n{fact.prompt}" for i, fact in enumerate(facts)]
        behind = _logs(reader, [(text, fact.answer) for text, fact in zip(texts, facts, strict=True)])
        span = Interval.of([a - b for a, b in zip(behind, bare, strict=True)])
        found["gain"][name] = {"nats": span.mean, "low": span.low, "high": span.high}
        if name == "wrong":
            other = _logs(reader, [(text, fact.wrong) for text, fact in zip(texts, facts, strict=True)])
            found["gullible"] = sum(w > c for w, c in zip(other, behind, strict=True)) / len(facts)
    return found


def _logs(reader: Reader, pairs: list[tuple[str, str]]) -> list[float]:
    return [each["base"] for each in reader.log_probability(pairs)]


def main() -> None:
    """Print the table, or one JSON object."""
    settings = tyro.cli(Settings)
    found = measure(settings)
    if settings.json:
        print(json.dumps(found))
        return
    for name, span in found["gain"].items():
        times = f"{math.exp(span['nats']):.3g}-fold"
        print(f"{name:12} {span['nats']:+.2f} [{span['low']:+.2f}, {span['high']:+.2f}] nats, {times}")
    print(f"gullible     {found['gullible']:.2f} of {found['facts']} facts")


if __name__ == "__main__":
    main()
