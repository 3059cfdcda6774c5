"""What a model makes of facts: recall, trust in passages, and how branches are weighted.

    recall          share of facts whose answer is the likeliest continuation, in a wording that was taught
                    and in one that was not
    trust           P(correct) / P(wrong) behind a passage: above 1 it keeps to what it knows ("Product of
                    Experts" §6.6.3, §8.2.1 R4; gullible is below 1)
    weighting       logit and margin of the right answer as the base's branch and the specialist's are given
                    N and M votes (§6.5.6): z = (N z_base + M z_s) / (N + M)

Probabilities are those of the whole answer, token by token. Every path is read from one forward.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from topograd.data.foreign_tokenizer import ForeignTokenizer
from topograd.specialists.attach import Attached
from topograd.specialists.composition import Weights, composed_terms
from topograd.specialists.facts import FRAMINGS, Fact, KnownFact, passage
from topograd.specialists.records import spelled
from topograd.training.forward import predict, stage_outputs

VOTES = ((1, 0), (1, 1), (1, 2), (1, 3), (2, 1), (3, 1), (0, 1))


class Reader:
    """Reads answers behind texts, under several compositions at once."""

    def __init__(self, attached: Attached, paths: Mapping[str, Weights]) -> None:
        self.attached = attached
        self.terms = {name: composed_terms(attached, weights) for name, weights in paths.items()}
        self.stages = sorted({stage for terms in self.terms.values() for stage, _ in terms})

    @torch.no_grad()
    def logits(self, text: str, answer: str) -> tuple[dict[str, Tensor], list[int]]:
        """For each path the logits (n, vocab) that predict the n tokens of the answer."""
        stack, plan = self.attached.stack, self.attached.plan
        begun, target = self.ids(text), self.attached.vocabulary.tokenizer.encode(f" {answer}")
        whole = torch.tensor([[*begun, *target[:-1]]])
        outputs = stage_outputs(stack, plan, whole, self.stages)
        ends = {k: h[:, len(begun) - 1 :] for k, h in outputs.items()}
        return {name: predict(stack, plan, ends, terms)[0] for name, terms in self.terms.items()}, target

    def ids(self, text: str) -> list[int]:
        tokenizer = self.attached.vocabulary.tokenizer
        if isinstance(tokenizer, ForeignTokenizer):
            return self.attached.vocabulary.encode_chat(text)
        return [tokenizer.separator, *tokenizer.encode(text)]

    def probability(self, text: str, answer: str) -> dict[str, float]:
        """P(answer | text) under each path."""
        found, target = self.logits(text, answer)
        places = range(len(target))
        return {name: float(z.log_softmax(-1)[places, target].sum().exp()) for name, z in found.items()}

    def first(self, text: str, answer: str) -> dict[str, tuple[bool, float, float]]:
        """For each path whether the answer's first token is the likeliest, its logit, and its margin."""
        found, target = self.logits(text, answer)
        read = {}
        for name, z in found.items():
            value = float(z[0, target[0]])
            rival = z[0].clone()
            rival[target[0]] = -torch.inf
            margin = value - float(rival.max())
            read[name] = (margin > 0, value, margin)
        return read


def asked(attached: Attached, facts: Sequence[Fact], wording: int) -> list[str]:
    """Each fact as a question in a chat, with the beginning of the answer."""
    texts = spelled(attached.vocabulary, [fact.question(wording) for fact in facts])
    plain = not isinstance(attached.vocabulary.tokenizer, ForeignTokenizer)
    return [f"{text}{' ' if plain else ''}{fact.prompt}" for text, fact in zip(texts, facts, strict=True)]


def hits(reader: Reader, facts: Sequence[Fact], wording: int) -> dict[str, list[bool]]:
    """For each path which of the facts it recalls when asked in that wording."""
    found: dict[str, list[bool]] = {name: [] for name in reader.terms}
    for text, fact in zip(asked(reader.attached, facts, wording), facts, strict=True):
        for name, (hit, _, _) in reader.first(text, fact.answer).items():
            found[name].append(hit)
    return found


def recall(reader: Reader, facts: Sequence[Fact], wording: int) -> dict[str, float]:
    """Share of the facts that each path recalls when asked in that wording."""
    return {name: sum(found) / len(facts) for name, found in hits(reader, facts, wording).items()}


def trust(reader: Reader, facts: Sequence[KnownFact]) -> list[dict[str, Any]]:
    """Median P(correct), P(wrong) and their ratio on each path, for every kind and framing of passage; and
    log P(correct) - log P(wrong) of each fact."""
    kinds = [("none", ""), ("right", ""), ("irrelevant", ""), *(("wrong", framing) for framing in FRAMINGS)]
    rows = []
    for kind, framing in kinds:
        correct: dict[str, list[float]] = {name: [] for name in reader.terms}
        wrong: dict[str, list[float]] = {name: [] for name in reader.terms}
        for i, fact in enumerate(facts):
            front = "" if kind == "none" else passage(fact, kind, framing or "plain", i) + "\n"  # type: ignore[arg-type]
            for into, answer in ((correct, fact.answer), (wrong, fact.wrong)):
                for name, p in reader.probability(front + fact.prompt, answer).items():
                    into[name].append(max(p, 1e-30))
        for name in reader.terms:
            ratios = [c / w for c, w in zip(correct[name], wrong[name], strict=True)]
            rows.append(
                {
                    "passage": kind,
                    "framing": framing,
                    "path": name,
                    "correct": statistics.median(correct[name]),
                    "wrong": statistics.median(wrong[name]),
                    "ratio": statistics.median(ratios),
                    "gullible": sum(ratio < 1 for ratio in ratios) / len(ratios),
                    "log_ratios": [math.log(ratio) for ratio in ratios],
                }
            )
    return rows


def weighting(attached: Attached, name: str, facts: Sequence[Fact | KnownFact]) -> list[dict[str, Any]]:
    """Mean logit and margin of the right answers as base and specialist are given votes."""
    paths = {f"{n}:{m}": {name: m / (n + m)} for n, m in VOTES}
    reader = Reader(attached, paths)
    found = [reader.first(fact.prompt, fact.answer) for fact in facts]
    rows = []
    for path in paths:
        read = [each[path] for each in found]
        rows.append(
            {
                "votes": path,
                "right": sum(hit for hit, _, _ in read) / len(read),
                "logit": statistics.mean(value for _, value, _ in read),
                "margin": statistics.mean(margin for _, _, margin in read),
            }
        )
    return rows


def by_stage(attached: Attached, facts: Sequence[KnownFact]) -> list[dict[str, Any]]:
    """Median rank and mean logit of known answers at each stage of the base: where facts live (§6.3)."""
    from topograd.specialists.probe import probe

    tokenizer = attached.vocabulary.tokenizer
    reader = Reader(attached, {"base": {}})
    ranks: dict[int, list[int]] = {}
    logits: dict[int, list[float]] = {}
    for fact in facts:
        for row in probe(attached, reader.ids(fact.prompt), tokenizer.encode(f" {fact.answer}"))["stages"]:
            ranks.setdefault(row["stage"], []).append(row["rank"])
            logits.setdefault(row["stage"], []).append(row["logit"])
    return [
        {
            "stage": stage,
            "median_rank": statistics.median(ranks[stage]),
            "first": sum(rank == 1 for rank in ranks[stage]) / len(facts),
            "mean_logit": statistics.mean(logits[stage]),
        }
        for stage in ranks
    ]
