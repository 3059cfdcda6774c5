"""Every property over the number of stages and the depth of the first one: a slice, a grid and its fronts.

Statement. Configurations are pairs (K, d_0) over six layers: K stages, the first of d_0 layers, the layers
behind it split as evenly as can be, longer stages first; heads per stage throughout. There are 16:

    K      1   2      3      4      5      6
    d_0    6   1..5   1..4   1..3   1, 2   1

Level 1 is the slice K = 3, with every property by d_0. Level 2 is the grid, with two fronts for each seed:

    training    (BPB, activation layers max d_k, share of the layers before the first exit)    all small
    serving     (BPB, capability U_cap)                                      small, and large

The properties are P1, P2, P4, P5, P9 to P11 and the terms of J (`search/property_readings.py`): of P11 what a
specialist gains in a short training and what it costs of the old text, of inference economics the share of
layers that WAND skips. The capability region is K ≥ 2 with stages of at least `MIN_DEPTH` layers (Def. 7.6).
A front is called genuine if one interior configuration, 1 < K < 6, is on it with every seed. One stage per
layer has the least memory and the earliest exit, so it is always on the training front; another is there only
if it has less BPB than all that are no worse in both.

Cost: 48 trainings and probes with the preset `small`, about 15 s each. No reading was left out for its cost.
Source: "Stage-Partitioned Learning: A Configuration Space Between Backpropagation and Local Learning" §10.6
(levels 1, 2), §7 (P1 to P11, Def. 7.6, Remark 7.7, Remark 7.5), §8.6, Lemma 8.1, Corollaries 8.8 and 8.12.
Limits. The paper gives the slice's course in words and no number of any property but BPB. Its L is 12, where
(10, 1, 1) ends the slice; here (4, 1, 1) does. One stage has a head per stage too, for H is fixed: the corner
((6), shared) is in `stage0_depth.py`. Ten claims: one without an effect may look decided (`verdicts.py`).
U_cap's reference points are ours; a prefix may run half of the layers, so that 4,2 of the region has none.
The configuration that a front is judged by is the one that most of its seeds have.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from papers.outcome import Asked, Result, ResultTable, Row
from papers.staged_runs import LAYERS, Arm, chain, mean, minus, sizes_of, slopes, train_arms, values
from papers.verdicts import Claim, Drawing, Series, above, each, every, settled
from topograd.data import Text
from topograd.nn.gpt import GPT
from topograd.search.front import pareto_front
from topograd.search.measured import Trained
from topograd.search.properties import read_properties
from topograd.search.property_readings import MIN_DEPTH
from topograd.topology.composition import Composition
from topograd.topology.plan import Plan

SLICE = 3
"""K of level 1."""
PROFILE: Mapping[str, tuple[str, str]] = {
    "BPB": ("bpb", ".4f"),
    "gradient depth": ("gradient_depth", ".0f"),
    "activation layers": ("activation_layers", ".0f"),
    "peak memory of a step, kB": ("peak_kb", ".0f"),
    "pipeline granularity": ("pipeline_granularity", ".0f"),
    "coupling": ("coupling", ".2f"),
    "first exit: share of layers": ("exit_compute", ".2f"),
    "first exit: accuracy": ("exit_accuracy", ".3f"),
    "best accuracy within half of the layers": ("within_half", ".3f"),
    "WAND gain": ("wand", ".3f"),
    "composition gain, BPB": ("composition", "+.4f"),
    "specialist gain, BPB": ("specialist", ".3f"),
    "specialist's price, BPB": ("specialist_price", "+.3f"),
    "capability": ("capability", ".3f"),
    "calibration error": ("calibration", ".4f"),
    "effective rank behind the first stage": ("root_rank", ".1f"),
}
"""What the tables call a reading, its key in a row, and how it is written."""
BEHIND = ("bpb", "activation_layers", "exit_compute", "exit_accuracy", "wand", "specialist", "capability")
"""Keys of the columns of level 2."""
Points = Callable[[Row], tuple[float, ...]]
FRONTS: Mapping[str, Points] = {
    "training": lambda row: (row["bpb"], row["activation_layers"], row["exit_compute"]),
    "serving": lambda row: (row["bpb"], -row["capability"]),
}
"""Objectives of a front, all to be small."""


@dataclass(frozen=True)
class Cell:
    """One configuration (K, d_0) of the grid."""

    stages: int
    depth: int

    @property
    def composition(self) -> Composition:
        """The first stage, and the layers behind it in stages that differ by at most one layer."""
        if self.stages == 1:
            return Composition.of([self.depth])
        least, longer = divmod(LAYERS - self.depth, self.stages - 1)
        return Composition.of([self.depth, *(least + (k < longer) for k in range(self.stages - 1))])

    @cached_property
    def arm(self) -> Arm:
        return chain(str(self.composition))

    @property
    def name(self) -> str:
        return self.arm.name

    @property
    def interior(self) -> bool:
        """Whether it is neither backprop nor one stage per layer."""
        return 1 < self.stages < LAYERS

    @property
    def capable(self) -> bool:
        """Whether it is in the capability region (Def. 7.6)."""
        return self.stages > 1 and min(self.composition.parts) >= MIN_DEPTH


def grid() -> list[Cell]:
    """All configurations, by the number of stages and then by the depth of the first."""
    behind = [Cell(k, d) for k in range(2, LAYERS + 1) for d in range(1, LAYERS - k + 2)]
    return [Cell(1, LAYERS), *behind]


def run(args: Asked) -> Result:
    """Train and read the grid, and judge."""
    sizes, cells = sizes_of(args), grid()
    rows = train_arms([cell.arm for cell in cells], sizes, args, probe)
    result = {name: fronts(rows, cells, points) for name, points in FRONTS.items()}
    return Result(
        setting=(
            f"GPTs of six layers of width {sizes.width} on bytes, {sizes.steps} steps of {sizes.batch} × "
            f"{sizes.context} tokens, heads per stage, {len(cells)} configurations (K, d_0), {sizes.seeds} "
            "seeds. All arms of a seed start from the same weights and see the same data in the same order."
        ),
        rows=rows,
        tables=(_slice_table(rows, cells), _grid_table(rows, cells, result)),
        findings=tuple(_findings(rows, cells, result)),
        drawing=_drawing(rows, cells),
        claims=tuple(settled([*slice_claims(rows, cells), *grid_claims(rows, cells, result)], rows)),
        seeds=sizes.seeds,
        record={"sizes": asdict(sizes), "fronts": {k: [sorted(s) for s in v] for k, v in result.items()}},
    )


def probe(stack: GPT, plan: Plan, text: Text) -> Mapping[str, Any]:
    """The whole profile of a trained arm, but for its BPB."""
    closed = ("gradient_depth", "activation_layers", "pipeline_granularity", "coupling")
    measured = ("peak_bytes", "capability", "calibration", "specialist_price", "exit_layers", "prefix")
    further = ("wand", "composition_gain", "specialist_capacity", "effective_rank")
    result = read_properties(Trained(stack, plan, text), (*closed, *measured, *further))
    return {
        **{name: result[name] for name in (*closed, "capability", "calibration", "specialist_price")},
        "peak_kb": result["peak_bytes"] / 1000,
        "exit_compute": result["exit_layers"][0] / LAYERS,
        "exit_accuracy": result["prefix"]["accuracy"][0],
        "accuracy": result["prefix"]["accuracy"][-1],
        "within_half": result["prefix"]["within_budget"],
        "wand": result["wand"]["gain"],
        "wand_agreement": result["wand"]["agreement"],
        "composition": result["composition_gain"],
        "specialist": result["specialist_capacity"],
        "root_rank": result["effective_rank"][0],
    }


def fronts(rows: Sequence[Row], cells: Sequence[Cell], points: Points) -> list[set[str]]:
    """The configurations on the front, seed by seed."""
    names = {cell.name for cell in cells}
    results = []
    for seed in sorted({row["seed"] for row in rows}):
        here = [row for row in rows if row["seed"] == seed and row["arm"] in names]
        retained = pareto_front([points(row) for row in here])
        results.append({row["arm"] for row, on in zip(here, retained, strict=True) if on})
    return results


def chosen(result: Sequence[set[str]], cells: Sequence[Cell]) -> str:
    """The interior configuration that is on most seeds' fronts; the first of the grid where several are."""
    return max((cell.name for cell in cells if cell.interior), key=lambda n: sum(n in on for on in result))


def slice_claims(rows: Sequence[Row], cells: Sequence[Cell]) -> list[Claim]:
    """Level 1: how properties go along K = 3, by what §8.6 says of them."""
    along = [cell.arm for cell in cells if cell.stages == SLICE]
    deepest = [mean(rows, arm.name, "activation_layers") for arm in along]
    peaks = zip(*(values(rows, arm.name, "peak_kb") for arm in along), strict=True)
    memory = [float(np.polyfit(deepest, peak, 1)[0]) for peak in peaks]

    def falls(name: str, prediction: str, key: str, what: str) -> Claim:
        return above(
            name, prediction, f"the fall of {what} for each layer", [-s for s in slopes(rows, along, key)]
        )

    return [
        falls("BPB falls", "BPB falls with the depth of the first stage (Lemma 8.1, §8.6)", "bpb", "BPB"),
        above(
            "memory follows the deepest stage",
            "the memory of a step grows with max d_k (P4; §8.6: dominated by the growth of the first stage)",
            "the rise of the measured peak for each layer of max d_k, kB,",
            memory,
        ),
        above(
            "the first exit knows more",
            "the first stage alone predicts better the deeper it is (Corollary 8.8)",
            "the rise of its accuracy for each layer",
            slopes(rows, along, "exit_accuracy"),
        ),
        falls("capability declines", "capability declines along the slice (§8.6)", "capability", "U_cap"),
        falls(
            "specialists decline",
            "tails become too shallow for a specialist (P11, §8.6)",
            "specialist",
            "the specialist's gain, BPB,",
        ),
        falls(
            "composition declines",
            "the gain of composing stages diminishes (§8.6)",
            "composition",
            "the composition gain, BPB,",
        ),
    ]


def grid_claims(
    rows: Sequence[Row], cells: Sequence[Cell], result: Mapping[str, Sequence[set[str]]]
) -> list[Claim]:
    """Level 2: BPB under refinement, the capability region, and the fronts."""
    backprop, local = cells[0].name, cells[-1].name
    capable = [cell.name for cell in cells if cell.capable]
    vestigial = [cell.name for cell in cells if cell.interior and not cell.capable]
    region = _means(rows, capable, "capability")
    return [
        above(
            "refining costs BPB",
            "BPB does not fall under refinement: it is BP-descending (Def. 7.1, Corollary 8.12)",
            "BPB of the finer minus that of the coarser, mean over all pairs that compare,",
            refined(rows, cells),
        ),
        each(
            "a region of capability",
            "capability is largest in the region K ≥ 2, min d_k ≥ 2, and not at the ends (P9, Remark 7.7)",
            "the region's mean capability minus that of one stage, of one layer a stage, and of the interior "
            "with stages of one layer,",
            [minus(region, _means(rows, names, "capability")) for names in ([backprop], [local], vestigial)],
        ),
        *(_genuine(name, result[name], cells) for name in FRONTS),
    ]


def _genuine(name: str, result: Sequence[set[str]], cells: Sequence[Cell]) -> Claim:
    best = chosen(result, cells)
    sentences = {
        "training": "the grid has a genuine front of BPB, memory and first exit (§10.6, level 2)",
        "serving": "where capability counts beside BPB, interior configurations are optimal (Remark 7.5)",
    }
    return every(
        f"interior on the {name} front",
        sentences[name],
        f"{best} on the front",
        [best in on for on in result],
    )


def refined(rows: Sequence[Row], cells: Sequence[Cell], key: str = "bpb") -> list[float]:
    """A reading of the finer minus that of the coarser, mean over all pairs that compare, seed by seed."""
    pairs = [(a, b) for a, b in itertools.product(cells, cells) if a.composition < b.composition]
    steps = [minus(values(rows, b.name, key), values(rows, a.name, key)) for a, b in pairs]
    return [statistics.fmean(seed) for seed in zip(*steps, strict=True)]


def _means(rows: Sequence[Row], names: Sequence[str], key: str) -> list[float]:
    """The mean over configurations, seed by seed."""
    return [statistics.fmean(seed) for seed in zip(*(values(rows, n, key) for n in names), strict=True)]


def _slice_table(rows: Sequence[Row], cells: Sequence[Cell]) -> ResultTable:
    along = [cell.name for cell in cells if cell.stages == SLICE]
    lines = tuple(
        (sentences, *(f"{mean(rows, name, key):{form}}" for name in along))
        for sentences, (key, form) in PROFILE.items()
    )
    return ResultTable(f"Level 1: every property along K = {SLICE}, means", ("property", *along), lines)


def _grid_table(
    rows: Sequence[Row], cells: Sequence[Cell], result: Mapping[str, Sequence[set[str]]]
) -> ResultTable:
    forms = {key: (sentences, form) for sentences, (key, form) in PROFILE.items()}
    header = ("(K, d_0)", "stages", *(forms[key][0] for key in BEHIND), *(f"{name} front" for name in result))
    lines = tuple(
        (
            f"({cell.stages}, {cell.depth})",
            cell.name,
            *(f"{mean(rows, cell.name, key):{forms[key][1]}}" for key in BEHIND),
            *(f"{sum(cell.name in on for on in seeds)} of {len(seeds)}" for seeds in result.values()),
        )
        for cell in cells
    )
    return ResultTable("Level 2: the grid, means, and with how many seeds each is on a front", header, lines)


def _findings(
    rows: Sequence[Row], cells: Sequence[Cell], result: Mapping[str, Sequence[set[str]]]
) -> list[str]:
    sentences = []
    for name, seeds in result.items():
        always = [cell.name for cell in cells if all(cell.name in on for on in seeds)]
        sentences.append(f"On the {name} front with every seed: {'; '.join(always) or 'none'}.")
    best = min(cells, key=lambda cell: mean(rows, cell.name)).name
    able = max(cells, key=lambda cell: mean(rows, cell.name, "capability")).name
    return [*sentences, f"The least mean BPB is that of {best}, the most capability that of {able}."]


def _drawing(rows: Sequence[Row], cells: Sequence[Cell]) -> Drawing:
    series = []
    for stages in sorted({cell.stages for cell in cells}):
        here = [cell for cell in cells if cell.stages == stages]
        series.append(
            Series.of(f"K = {stages}", [cell.depth for cell in here], [values(rows, c.name) for c in here])
        )
    return Drawing("BPB over the grid", "layers in the first stage", "bits per byte", tuple(series))
