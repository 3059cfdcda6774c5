"""Does geometry know which units a model can do without? Structured pruning of MLPs at equal budgets.

A share of the hidden units of every MLP is taken out of a trained model, smaller matrices in their place, and
the model is read again on held-out text. Which units go is decided on other text (`units.py`):

    fisher, kfac, unexplained     by dead directions: the Fisher of taking a unit out, the same by K-FAC
                                  factors, and the same for what the other units do not know of it
    magnitude, variance, product  baselines: size of the weights, variance of the activation, and activation
                                  times weight
    random                        a baseline

Budgets are 10, 25 and 50 % of the units of every layer. `repaired` puts what the kept units know of the
removed ones into the kept columns, whatever chose them: choice and repair are told apart. `any layer` takes
the least units of the whole model, so that layers lose unlike shares. The reference model is also trained for
some steps after losing half of its units.

Models are the reference model of this package (8 layers of 1024 units, ReLU²) and SmolLM2-135M (30 layers of
1536, SwiGLU). Effects are differences of bits per byte, window by window of the held-out text; intervals are
over windows. What was decided beforehand: `fisher` stands for geometry in the claims, the others are shown.

Cost on one core: seconds for tiny; small two minutes for the reference model and about six for SmolLM2.
Limits. One text (the Python library), one draw of labels, one model each; windows say how sure a difference
is for this text, not for others. No unit of attention is taken out.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from papers.beyond.bases import Base, Windows, bits_per_byte, folders, open_base
from papers.beyond.units import (
    SCORES,
    HiddenLayer,
    UnitReading,
    hidden_layers,
    read_units,
    without_units,
)
from papers.outcome import Asked, Result, ResultTable, Row
from papers.verdicts import Claim, Drawing, Interval, Series, each

BUDGETS = (0.1, 0.25, 0.5)
DRAWS = {"reference": 3, "smollm2": 1}
"""Of the random choice."""
REPAIRED = ("magnitude", "variance", "product", "unexplained")
ANY_LAYER = ("product", "fisher")
TRAINED = ("random", "magnitude", "variance", "product", "fisher")
BASELINES = ("random", "magnitude", "variance", "product")
GEOMETRY = "fisher"
LEAST = 8
"""Units that every layer keeps."""
RATE, TRAIN_ROWS = 3e-5, 8


@dataclass(frozen=True)
class Size:
    """Windows to calibrate and to judge on, and their length."""

    length: int
    train: int
    heldout: int


SIZES = {"reference": Size(128, 48, 32), "smollm2": Size(128, 32, 12)}
TINY = Size(32, 8, 4)


@dataclass(frozen=True)
class Cut:
    """One way to take units out."""

    choice: str
    budget: float
    way: str = "plain"
    """plain, repaired, any layer, or trained."""
    draw: int = 0

    @property
    def key(self) -> dict[str, str | float | int]:
        return {"choice": self.choice, "budget": self.budget, "way": self.way, "draw": self.draw}


def cuts(name: str, tiny: bool) -> list[Cut]:
    """Everything that one model goes through."""
    budgets, choices = BUDGETS[1:2] if tiny else BUDGETS, ("random", *SCORES)
    plain = [Cut(choice, budget) for budget in budgets for choice in choices]
    plain += [Cut("random", budget, draw=draw) for budget in budgets for draw in range(1, DRAWS[name])]
    repaired = [Cut(choice, budget, "repaired") for budget in budgets for choice in REPAIRED]
    anywhere = [Cut(choice, budget, "any layer") for budget in budgets for choice in ANY_LAYER]
    trained = [Cut(choice, budgets[-1], "trained") for choice in TRAINED] if name == "reference" else []
    return plain + repaired + anywhere + trained


def run(args: Asked) -> Result:
    """Every cut of every model that is there."""
    tiny = args.preset == "tiny"
    models = folders(args)
    total = sum(1 + len(cuts(name, tiny)) for name in models)
    rows: list[Row] = []
    for name, folder in models.items():
        size = TINY if tiny else SIZES[name]
        study = _Pruning(open_base(name, folder, size.length, size.train, size.heldout), args.steps)
        whole = args.kept.row({"base": name, "choice": "none"}, study.whole)
        rows.append({"base": name, "choice": "none", "budget": 0.0, "way": "plain", "draw": 0, **whole})
        args.on_more(len(rows), total)
        for cut in cuts(name, tiny):
            result = args.kept.row({"base": name, **cut.key}, partial(study.read, cut))
            rows.append({"base": name, **cut.key, **result})
            args.on_more(len(rows), total)
    judged = [claim for name in models for claim in claims(name, rows)]
    return Result(
        setting=f"Models: {', '.join(models)}. Hidden units of every MLP taken out, chosen on text of the "
        "corpus's training part, judged on held-out text; nothing is trained unless the row says so.",
        rows=rows,
        tables=tuple(table(name, rows) for name in models),
        findings=tuple(sentence for name in models for sentence in findings(name, rows)),
        drawing=drawing(rows, next(reversed(models))),
        claims=tuple(judged),
    )


class _Pruning:
    """One model: read once, cut many times."""

    def __init__(self, base: Base, steps: int) -> None:
        self.base, self.steps = base, steps
        self.layers = hidden_layers(base.model)
        self._read: dict[str, UnitReading] = {}
        self._scores: dict[tuple[str, HiddenLayer], Tensor] = {}

    def readings(self) -> dict[str, UnitReading]:
        """The units, on text to calibrate on; the same whenever they are made."""
        if not self._read:
            generator = torch.Generator(self.base.train.inputs.device).manual_seed(0)
            batches = self.base.train.batches(4)
            self._read = read_units(self.base.model, self.layers, batches, generator=generator)
        return self._read

    def whole(self) -> Row:
        return {"bpb": bits_per_byte(self.base.model, self.base.heldout)}

    def read(self, cut: Cut) -> Row:
        """Bits per byte by window without the units of a cut."""
        removed = self.removed(cut)
        repair = self.readings() if cut.way == "repaired" else None
        shares = [len(units) / len(self.readings()[layer.out].mean) for layer, units in removed.items()]
        with without_units(self.base.model, removed, repair):
            model: nn.Module = self.base.model
            if cut.way == "trained":
                model = trained(self.base.model, self.base.train, self.steps)
            result = bits_per_byte(model, self.base.heldout)
        return {"bpb": result, "shares": [min(shares), max(shares)]}

    def removed(self, cut: Cut) -> dict[HiddenLayer, Tensor]:
        """The units of each layer that go."""
        scores = {layer: self._score(cut, layer) for layer in self.layers}
        if cut.way != "any layer":
            return {
                layer: score.argsort()[: round(cut.budget * len(score))] for layer, score in scores.items()
            }
        return from_any_layer(scores, cut.budget)

    def _score(self, cut: Cut, layer: HiddenLayer) -> Tensor:
        reading = self.readings()[layer.out]
        if cut.choice == "random":
            seed = 1000 * cut.draw + self.layers.index(layer)
            return torch.rand(len(reading.mean), generator=torch.Generator().manual_seed(seed))
        key = (cut.choice, layer)
        if key not in self._scores:
            self._scores[key] = SCORES[cut.choice](self.base.model, layer, reading)
        return self._scores[key]


def from_any_layer(scores: Mapping[HiddenLayer, Tensor], budget: float) -> dict[HiddenLayer, Tensor]:
    """The least units of all layers together; the LEAST best of each layer stay."""
    orders = {layer: score.argsort() for layer, score in scores.items()}
    free = {layer: order[: max(len(order) - LEAST, 0)] for layer, order in orders.items()}
    values = torch.cat([scores[layer][units] for layer, units in free.items()])
    many = min(round(budget * sum(map(len, orders.values()))), len(values))
    bar = values.sort().values[many - 1] if many else -torch.inf
    return {layer: units[scores[layer][units] <= bar] for layer, units in free.items()}


def trained(model: nn.Module, text: Windows, steps: int) -> nn.Module:
    """A copy of a model after some steps of AdamW on this text."""
    model = copy.deepcopy(model).requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(text.inputs), (TRAIN_ROWS,), generator=generator)
        loss = F.cross_entropy(model(text.inputs[rows]).mT, text.targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.requires_grad_(False)


def _bpb(
    rows: Sequence[Row], base: str, choice: str, budget: float, way: str = "plain"
) -> list[float] | None:
    """By window; the mean over draws."""
    named = (base, choice, budget, way)
    results = [row["bpb"] for row in rows if (row["base"], row["choice"], row["budget"], row["way"]) == named]
    return [statistics.fmean(window) for window in zip(*results, strict=True)] if results else None


def _above(rows: Sequence[Row], base: str, one: str, other: str, budget: float, way: str) -> list[float]:
    """How much more `one` costs than `other`, by window."""
    costs = [_bpb(rows, base, choice, budget, way) for choice in (one, other)]
    assert costs[0] is not None, f"{one} was measured"
    assert costs[1] is not None, f"{other} was measured"
    return [a - b for a, b in zip(costs[0], costs[1], strict=True)]


def _budgets(rows: Sequence[Row], base: str) -> list[float]:
    return sorted({row["budget"] for row in rows if row["base"] == base and row["budget"]})


def claims(base: str, rows: Sequence[Row]) -> list[Claim]:
    """Dead directions against each baseline, at every budget; and the same behind a repair."""
    budgets = _budgets(rows, base)
    judged = []
    for way, ours in (("plain", GEOMETRY), ("repaired", "unexplained")):
        for other in BASELINES if way == "plain" else BASELINES[1:]:
            effect = f"BPB of {other} less that of {ours}, by window, at {_listed(budgets)}"
            values = [_above(rows, base, other, ours, budget, way) for budget in budgets]
            repaired = ", repaired" if way == "repaired" else ""
            judged.append(
                each(
                    f"{base}: {ours} beats {other}{repaired}",
                    "Units that lie along dead directions can be removed at less cost.",
                    effect,
                    values,
                )
            )
    return judged


def table(base: str, rows: Sequence[Row]) -> ResultTable:
    """BPB of every choice and way, by budget."""
    budgets = _budgets(rows, base)
    whole = _bpb(rows, base, "none", 0.0)
    assert whole is not None, "the whole model was measured"
    lines = []
    for way in ("plain", "repaired", "any layer", "trained"):
        for choice in ("random", *SCORES):
            results = [_bpb(rows, base, choice, budget, way) for budget in budgets]
            if any(results):
                cells = ["" if one is None else f"{statistics.fmean(one):.3f}" for one in results]
                lines.append((f"{choice}, {way}" if way != "plain" else choice, *cells))
    caption = f"{base}: bits per byte on held-out text without a share of the units; whole "
    caption += f"{statistics.fmean(whole):.3f}"
    return ResultTable(caption, ("choice", *(f"{budget:.0%}" for budget in budgets)), tuple(lines))


def findings(base: str, rows: Sequence[Row]) -> list[str]:
    """The least cost of all, and what it saves that layers lose unlike shares."""
    budgets = _budgets(rows, base)
    sentences = []
    for way in ("plain", "repaired"):
        best = []
        for budget in budgets:
            means = {}
            for choice in ("random", *SCORES):
                if (result := _bpb(rows, base, choice, budget, way)) is not None:
                    means[choice] = statistics.fmean(result)
            best.append(f"{min(means, key=lambda name: means[name])} at {budget:.0%}")
        sentences.append(f"{base}, {way}: least bits per byte with {', '.join(best)}.")
    for choice in ANY_LAYER:
        won = []
        for budget in budgets:
            costs = [_bpb(rows, base, choice, budget, way) for way in ("plain", "any layer")]
            if costs[0] is not None and costs[1] is not None:
                won.append(str(Interval.of([a - b for a, b in zip(costs[0], costs[1], strict=True)])))
        if won:
            sentences.append(
                f"{base}: {choice} from any layer saves {', '.join(won)} over {choice} layer by layer, "
                f"at {_listed(budgets)}."
            )
    return sentences


def drawing(rows: Sequence[Row], base: str) -> Drawing:
    """What each choice costs by budget, over the whole model."""
    budgets, whole = _budgets(rows, base), _bpb(rows, base, "none", 0.0)
    assert whole is not None, "the whole model was measured"
    series = []
    for choice in ("random", *SCORES):
        results = [_bpb(rows, base, choice, budget) for budget in budgets]
        costs = [[a - b for a, b in zip(one, whole, strict=True)] for one in results if one is not None]
        series.append(Series.of(choice, budgets, costs))
    return Drawing(f"{base}: units taken out", "share of units", "more bits per byte", tuple(series))


def _listed(budgets: Sequence[float]) -> str:
    return ", ".join(f"{budget:.0%}" for budget in budgets)
