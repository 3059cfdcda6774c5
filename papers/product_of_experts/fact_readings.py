"""What a model makes of facts: recall, trust in passages, and how branches are weighted.

    recall          share of facts that a model names when it answers a question in its own words, greedily:
                    of all answers of the fact's kind the right one has to come first. Nothing of the answer
                    is given, so the question alone says which fact is meant
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

from papers.product_of_experts.facts import FRAMINGS, POOLS, Fact, KnownFact, first_named, passage
from topograd.exec.forward import predict, stage_outputs
from topograd.specialists.attach import Attached
from topograd.specialists.composition import Weights, composed_terms
from topograd.specialists.model import SpecialistPool
from topograd.specialists.records import spelled

Pair = tuple[str, str]
"""A text, and the answer that may follow it."""
ANSWER_TOKENS = 24
AT_ONCE = 10
VOTES = ((1, 0), (1, 1), (1, 2), (1, 3), (2, 1), (3, 1), (0, 1))


class Reader:
    """Reads answers behind texts, under several compositions at once."""

    def __init__(self, attached: Attached, paths: Mapping[str, Weights]) -> None:
        self.attached = attached
        self.terms = {name: composed_terms(attached, weights) for name, weights in paths.items()}
        self.stages = sorted({stage for terms in self.terms.values() for stage, _ in terms})

    @torch.no_grad()
    def logits(self, pairs: Sequence[Pair]) -> list[tuple[dict[str, Tensor], list[int]]]:
        """For each text and answer: by path the logits (n, vocab) that predict the answer's n tokens, and
        these tokens. One batch, padded behind the rows, where a causal model does not look."""
        stack, plan = self.attached.stack, self.attached.plan
        begun = [self.ids(text) for text, _ in pairs]
        targets = [self.attached.vocabulary.tokenizer.encode(f" {answer}") for _, answer in pairs]
        rows = [[*ids, *target[:-1]] for ids, target in zip(begun, targets, strict=True)]
        device = next(stack.parameters()).device
        inputs = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long, device=device)
        for i, row in enumerate(rows):
            inputs[i, : len(row)] = torch.tensor(row, device=device)
        outputs = stage_outputs(stack, plan, inputs, self.stages)
        results = []
        for i, (ids, row) in enumerate(zip(begun, rows, strict=True)):
            ends = {k: h[i : i + 1, len(ids) - 1 : len(row)] for k, h in outputs.items()}
            results.append({name: predict(stack, plan, ends, terms)[0] for name, terms in self.terms.items()})
        return list(zip(results, targets, strict=True))

    def ids(self, text: str) -> list[int]:
        vocabulary = self.attached.vocabulary
        begin = vocabulary.tokenizer.start_tokens if vocabulary.tokenizer.chat_template is None else []
        return [*begin, *vocabulary.encode_chat(text)]

    def log_probability(self, pairs: Sequence[Pair]) -> list[dict[str, float]]:
        """log P(answer | text) under each path."""
        return [
            {name: float(z.log_softmax(-1)[range(len(to)), to].sum()) for name, z in result.items()}
            for result, to in self.logits(pairs)
        ]

    def first(self, pairs: Sequence[Pair]) -> list[dict[str, tuple[bool, float, float]]]:
        """For each path whether an answer's first token is the likeliest, its logit, and its margin."""
        read = []
        for result, (token, *_) in self.logits(pairs):
            best = {name: z[0].topk(2) for name, z in result.items()}
            each = {}
            for name, z in result.items():
                value, (one, two) = float(z[0, token]), best[name].values.tolist()
                rival = two if int(best[name].indices[0]) == token else one
                each[name] = (value > rival, value, value - rival)
            read.append(each)
        return read


def answers(pool: SpecialistPool, prompts: Sequence[str], weights: Weights) -> list[str]:
    """Greedy answers to user messages, some at a time."""
    vocabulary = pool.attached.vocabulary
    texts = []
    ids = [vocabulary.encode_chat(text) for text in spelled(vocabulary, prompts)]
    for start in range(0, len(ids), AT_ONCE):
        some = ids[start : start + AT_ONCE]
        texts += [
            vocabulary.tokenizer.decode(row)
            for row in pool.generate(some, [weights] * len(some), ANSWER_TOKENS)
        ]
    return texts


def hits(pool: SpecialistPool, weights: Weights, facts: Sequence[Fact], wording: int) -> list[bool]:
    """Which of the facts are named right when asked in that wording."""
    written = answers(pool, [fact.question(wording) for fact in facts], weights)
    return [
        first_named(text, POOLS[fact.relation]) == fact.answer
        for text, fact in zip(written, facts, strict=True)
    ]


def recall(pool: SpecialistPool, weights: Weights, facts: Sequence[Fact], wordings: Sequence[int]) -> float:
    """The share of facts that are named right, over wordings."""
    found = [hit for wording in wordings for hit in hits(pool, weights, facts, wording)]
    return sum(found) / len(found)


def trust(reader: Reader, facts: Sequence[Fact | KnownFact]) -> list[dict[str, Any]]:
    """Median P(correct), P(wrong) and their ratio on each path, for every kind and framing of passage; and
    log P(correct) and log P(correct) - log P(wrong) of each fact."""
    kinds = [("none", ""), ("right", ""), ("irrelevant", ""), *(("wrong", framing) for framing in FRAMINGS)]
    rows = []
    for kind, framing in kinds:
        texts = []
        for i, fact in enumerate(facts):
            front = "" if kind == "none" else passage(fact, kind, framing or "plain", i) + "\n"  # type: ignore[arg-type]
            texts.append(front + fact.prompt)
        pairs = [(text, fact.answer) for text, fact in zip(texts, facts, strict=True)]
        pairs += [(text, fact.wrong) for text, fact in zip(texts, facts, strict=True)]
        read = reader.log_probability(pairs)
        for name in reader.terms:
            logs = [each[name] for each in read]
            correct, wrong = logs[: len(facts)], logs[len(facts) :]
            ratios = [c - w for c, w in zip(correct, wrong, strict=True)]
            rows.append(
                {
                    "passage": kind,
                    "framing": framing,
                    "path": name,
                    "correct": math.exp(statistics.median(correct)),
                    "wrong": math.exp(statistics.median(wrong)),
                    "ratio": math.exp(statistics.median(ratios)),
                    "gullible": sum(ratio < 0 for ratio in ratios) / len(ratios),
                    "log_correct": correct,
                    "log_ratios": ratios,
                }
            )
    return rows


def weighting(attached: Attached, name: str, facts: Sequence[Fact | KnownFact]) -> list[dict[str, Any]]:
    """Logits and margins of the right answers as base and specialist are given votes, and their means."""
    paths = {f"{n}:{m}": {name: m / (n + m)} for n, m in VOTES}
    reader = Reader(attached, paths)
    result = reader.first([(fact.prompt, fact.answer) for fact in facts])
    rows = []
    for path in paths:
        right, logits, margins = zip(*(each[path] for each in result), strict=True)
        rows.append(
            {
                "votes": path,
                "right": sum(right) / len(right),
                "logit": statistics.mean(logits),
                "margin": statistics.mean(margins),
                "logits": list(logits),
                "margins": list(margins),
            }
        )
    return rows


def by_stage(attached: Attached, facts: Sequence[KnownFact]) -> list[dict[str, Any]]:
    """Median rank and mean logit of known answers at each stage, the last being what was added to the base:
    where facts live (§6.3), and what training left of them."""
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
