"""Which drafters pay on this host, together: guesses on known text, judged, replayed and priced.

    judged      at every place of some texts, what each drafter guesses there and whether it is right: the
                acceptance by score (`policy.Acceptance`)
    replayed    rounds as a speculation goes, with a policy that has those acceptances and the measured
                seconds of rows: tokens written over seconds taken
    chosen      the combination of drafters with the largest speedup over full depth, or none

The text is the model's own greedy text for greedy drafts, and people's text, which sampled text is more like,
for sampled ones. Guesses are made on the text itself: behind a wrong guess the round is over, so that is
exact.

Cost: one pass over the texts at full depth, a search of each place, a second of timing for each size. Limits:
the best of a few combinations, on the text that chose it, is optimistic. A sampled guess that is drawn is
kept more often than one that must be equal, so sampled speedups are underestimated.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from topograd.decode.autotune import WORTHWHILE, RowCosts, low
from topograd.decode.cache import Batch
from topograd.decode.drafters import AutoregressiveDrafter, Draft, Guess, LookupDrafter
from topograd.decode.engine import Engine
from topograd.decode.policy import Acceptance, ExpectedGainPolicy
from topograd.runtime.protocol import single_threaded_torch

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
ROUNDS = 7
TIMED_LENGTH = 256
"""Positions before the timed ones, where the context has them."""
FIXED_POINT = 4


@dataclass(frozen=True)
class Choice:
    """Drafters that pay together, and the policy that says when."""

    drafters: tuple[str, ...]
    policy: ExpectedGainPolicy
    predicted: float
    """Speedup over full depth in the replay."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "drafters": list(self.drafters),
            "policy": self.policy.as_dict(),
            "predicted": self.predicted,
        }

    @classmethod
    def from_dict(cls, values: Any) -> Choice:
        names = tuple(str(name) for name in values["drafters"])
        return cls(names, ExpectedGainPolicy.from_dict(values["policy"]), float(values["predicted"]))


@dataclass(frozen=True)
class Known:
    """Texts whose guesses are known."""

    rows: Sequence[Sequence[int]]
    start: int
    """Tokens of each that are given, and not drafted."""
    looked: Mapping[str, list[list[list[Guess]]]]
    """By drafter, row and place (tokens known): what it finds behind them."""
    stepped: Mapping[str, tuple[list[Any], list[Any]]]
    """By drafter: tokens and scores [step][row][place] of its guess for the token at that place."""


def known_texts(
    rows: Sequence[Sequence[int]],
    start: int,
    sources: Sequence[LookupDrafter],
    steps: AutoregressiveDrafter | None = None,
    recorded: tuple[Tensor, Tensor] | None = None,
) -> Known:
    """What the drafters guess at every place of these texts."""
    looked: dict[str, list[list[list[Guess]]]] = {}
    for source in sources:
        looked[source.name] = [_looked(source, row, start) for row in rows]
    stepped = {}
    if steps is not None and recorded is not None:
        tokens, scores = (  # a guess behind position t is for the token at t + 1
            torch.nn.functional.pad(part[..., :-1], (1, 0)).tolist() for part in recorded
        )
        stepped[steps.name] = tokens, scores
    return Known(rows, start, looked, stepped)


class _Text:
    """A text that grows, as a lookup sees it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.drafter_state: dict[str, Any] = {}


def _looked(source: LookupDrafter, row: Sequence[int], start: int) -> list[list[Guess]]:
    text: Any = _Text()
    found: list[list[Guess]] = [[] for _ in range(start)]
    for place in range(start, len(row)):
        text.tokens = list(row[:place])
        source.begin(text)
        found.append(source.find(text, [], source.rule.longest))
    return found


def acceptances(known: Known) -> dict[str, Acceptance]:
    """How often each drafter's guesses are right, behind right ones, by score."""
    judged: dict[str, tuple[list[float], list[bool]]] = {}
    for name, texts in known.looked.items():
        scores, kept = judged.setdefault(name, ([], []))
        for row, places in zip(known.rows, texts, strict=True):
            for place, guesses in enumerate(places):
                for i, (token, score) in enumerate(guesses[: len(row) - place]):
                    scores.append(score)
                    kept.append(token == row[place + i])
                    if not kept[-1]:
                        break
    for name, (tokens, sure) in known.stepped.items():
        scores, kept = judged.setdefault(name, ([], []))
        for index, row in enumerate(known.rows):
            for place in range(known.start, len(row)):
                for step in range(min(len(tokens), len(row) - place)):
                    scores.append(sure[step][index][place + step])
                    kept.append(tokens[step][index][place + step] == row[place + step])
                    if not kept[-1]:
                        break
    return {name: Acceptance.of(*both) for name, both in judged.items()}


def replay(known: Known, policy: ExpectedGainPolicy, names: Sequence[str]) -> float:
    """The speedup over full depth of rounds with these drafters."""
    tokens, seconds = 0, 0.0
    for index, row in enumerate(known.rows):
        place = known.start
        while place < len(row):
            drafted, accepted, computed = _round(known, policy, names, index, place)
            seconds += policy.costs.deep_seconds(drafted + 1) + computed * policy.costs.draft
            tokens += accepted + 1
            place += accepted + 1
    return tokens * policy.costs.full / seconds if seconds else 1.0


def _round(
    known: Known, policy: ExpectedGainPolicy, names: Sequence[str], index: int, start: int
) -> tuple[int, int, int]:
    """Drafted, accepted and computed guesses of one round that begins with `start` tokens known."""
    row = known.rows[index]
    drafted = accepted = computed = 0
    chance, right = 1.0, True
    steps: str | None = next((name for name in names if name in known.stepped), None)
    while start + drafted < len(row):
        place = start + drafted
        found = {name: known.looked[name][index][place] for name in names if name in known.looked}
        who, count = policy.choose(drafted, chance, found, steps, 1)
        if who is None:
            break
        if who == steps:
            step = min(drafted, len(known.stepped[who][0]) - 1)
            token, score = (part[step][index][place] for part in known.stepped[who])
            computed += 1
            kept = policy.accept(who, score, drafted, chance, 1, True)
            if kept is None:
                steps = None
                continue
            guesses = [(token, score)]
        else:
            guesses = found[who][: min(count, len(row) - place)]
        for token, score in guesses:
            chance = policy.accept(who, score, drafted, chance, 1, who == steps) or chance
            right = right and token == row[start + drafted]
            drafted, accepted = drafted + 1, accepted + right
        if who != steps:
            break
    return drafted, accepted, computed


def choose_drafters(
    known: Known, costs: RowCosts, sources: Sequence[str], steps: str | None
) -> Choice | None:
    """The combination that pays most, or None; `costs.draft` is what one step costs."""
    rates = acceptances(known)
    best: Choice | None = None
    for some in itertools.chain.from_iterable(
        itertools.combinations(sources, n) for n in range(len(sources) + 1)
    ):
        for last in (None, steps) if steps else (None,):
            names = (*some, *([last] if last else []))
            if not names:
                continue
            policy, found = tune_speedup(known, ExpectedGainPolicy(rates, costs, 1.0), names)
            if found > (best.predicted if best else WORTHWHILE):
                mine = {name: rates[name] for name in names}
                best = Choice(names, replace(policy, acceptance=mine), found)
    return best


def tune_speedup(
    known: Known, policy: ExpectedGainPolicy, names: Sequence[str]
) -> tuple[ExpectedGainPolicy, float]:
    """The policy whose price of time is the speedup that it reaches, and that speedup."""
    best, most = policy, replay(known, policy, names)
    for _ in range(FIXED_POINT):
        policy = replace(policy, speedup=max(most, 1.0))
        found = replay(known, policy, names)
        if found <= most:
            break
        best, most = policy, found
    return best, most


@torch.inference_mode()
def measure_rows(
    engine: Engine, steps: AutoregressiveDrafter | None = None, rounds: int = ROUNDS
) -> RowCosts:
    """Seconds on this host: full depth on some rows at once, and one step of a drafter."""
    length = max(1, min(engine.context // 2, TIMED_LENGTH))
    sizes = [size for size in SIZES if size <= engine.context - length] or [1]
    batch, full = engine.start([[0] * length]), engine.exits[-1]
    cache = batch[0].cache
    engine.run(batch, full)
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    stepping: list[float] = []
    for _ in range(rounds):
        with single_threaded_torch(engine.runtime):
            for size in sizes:
                began = time.perf_counter()
                cache.push(batch, [[0] * size])
                engine.run(batch, full)
                engine.logits(batch, full, [size]).max(-1).indices.tolist()
                seconds[size].append(time.perf_counter() - began)
                cache.truncate(batch, [length])
            if steps is not None:
                stepping += _steps(batch, steps)
                cache.truncate(batch, [length])
    deep, least = {}, 0.0
    for size in sizes:  # more rows never cost less
        deep[size] = least = max(least, low(seconds[size]))
    if len(deep) < 2:
        deep[2] = 2 * deep[1]
    return RowCosts(low(stepping) if stepping else deep[1] * 1e-3, deep, deep[1])


@torch.inference_mode()
def measure_uneven(engine: Engine, sequences: int = 8, rounds: int = 5) -> float:
    """Seconds that a pass over several sequences takes more where one of them has two positions."""
    length = max(1, min(engine.context // 2, TIMED_LENGTH))
    batch, full = engine.start([[0] * length] * sequences), engine.exits[-1]
    engine.run(batch, full)
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for _, first in itertools.product(range(rounds), seconds):
        with single_threaded_torch(engine.runtime):
            began = time.perf_counter()
            batch[0].cache.push(batch, [[0] * first, *[[0]] * (sequences - 1)])
            engine.run(batch, full)
            seconds[first].append(time.perf_counter() - began)
            batch[0].cache.truncate(batch, [length] * sequences)
    return max(0.0, low(seconds[2]) - low(seconds[1]))


def _steps(batch: Batch, steps: AutoregressiveDrafter) -> list[float]:
    """Seconds of some steps behind one new token."""
    batch[0].cache.push(batch, [[0]])
    steps.begin(batch)
    draft, found = Draft(), []
    for _ in range(4):
        began = time.perf_counter()
        steps.scores(steps.step(batch, [draft])).tolist()
        found.append(time.perf_counter() - began)
        draft.add(0, steps.name, 1.0)
    return found[1:]
