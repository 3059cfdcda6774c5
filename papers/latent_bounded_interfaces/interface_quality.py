"""What bounded interfaces keep of depth, the published one and causal ones: Tables 2, 6 and 7, judged.

Statement. CE in nats per byte of the models of `interfaces.py`: eight layers dense, the last two alone
(shallow), regions of two layers that are joined by the published interface of rank 16, 32 or 64, or by a
causal one, on four architectures; and regions of one to four layers joined by the published one (Table 6).
Depth is worth CE(shallow) - CE(dense), and an interface keeps

    (CE(shallow) - CE(interface)) / (CE(shallow) - CE(dense))

of it. The published interface pools the whole sequence, so its CE is also read honestly: each byte predicted
from those before it alone (`prefix_losses`), which is what a model that writes has. Claims are judged by 90 %
intervals over seeds (`verdicts.py`), architecture by architecture.

Source: "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces", Table 2 (CE by architecture and
rank), Table 6 (by region size), Table 7 and Figure 3 (norms of Jacobians, Mamba-3), §4. The paper has no
shallow control, and reads its models with the future in sight. Cost: `presets.py`; about a minute for each
case. Limits: models of 0.4M parameters after 0.4M bytes; the paper has 60M to 90M after 20M tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from papers.latent_bounded_interfaces import interfaces
from papers.latent_bounded_interfaces.interfaces import FINE, PUBLISHED, RANKED, REGION_SIZES, Case
from papers.outcome import Asked, Result, ResultTable, Row, check_seeds
from papers.verdicts import Claim, Interval, each, within
from topograd.nn.config import Architecture

SPECTRAL: Architecture = "mamba3"
"""That of Table 7."""
NEAR = 0.09
"""The paper's largest distance to its dense model, as a share: 0.35 of 3.99 nats."""
CONSTANT = 0.25
"""Ranks are alike if they differ by less than this share of what depth is worth."""
MIDDLE = PUBLISHED[32]


def run(args: Asked) -> Result:
    """Every model with every seed, tables and claims; tiny: two of them, briefly, which judges nothing."""
    check_seeds(args.seeds)
    tiny = args.preset == "tiny"
    rows: list[Row] = []
    todo = cases(range(args.seeds), tiny)
    for case in todo:
        case = replace(case, width=args.width)
        key = dict(zip(interfaces.KEY, case.key(args.steps), strict=True))
        rows.append(key | args.kept.row(key, partial(interfaces.train_case, case, args.steps)))
        args.on_more(len(rows), len(todo))
    return Result(
        setting=f"Plain models of width {args.width} on bytes, {args.steps} steps each.",
        rows=rows,
        tables=(quality_table(rows),) if tiny else (quality_table(rows), size_table(rows), norm_table(rows)),
        findings=() if tiny else tuple(_findings(rows)),
        claims=() if tiny else tuple(_claims(rows)),
        seeds=args.seeds,
        record={"drawn": drawn(tiny)},
    )


def drawn(tiny: bool) -> dict[str, Any]:
    """Names of the models that figures draw, by their label (`interface_figures.py`)."""
    models = {"dense": "dense", "shallow": "shallow", "causal, S = T": FINE, "published, r = 32": MIDDLE}
    sizes = {f"{size} layers" if size > 1 else "1 layer": sized(size) for size in REGION_SIZES}
    ranks = {f"r = {rank}": name for rank, name in PUBLISHED.items()}
    shown = {"models": models, "ranked": list(RANKED), "spectral": SPECTRAL, "ranks": ranks}
    return {**shown, "sizes": {} if tiny else sizes}


def cases(seeds: Sequence[int], tiny: bool = False) -> list[Case]:
    """All models; tiny: a dense one and a causal interface."""
    kinds = get_args(Architecture)
    if tiny:
        return interfaces.headline(kinds[0], seeds)[:3:2]
    return [
        *(case for kind in kinds for case in interfaces.headline(kind, seeds)),
        *(case for kind in RANKED for case in interfaces.region_sizes(kind, seeds)),
    ]


def of(rows: Sequence[Row], architecture: str, name: str, key: str = "ce") -> list[float]:
    """A reading of a model, seed by seed."""
    return [row[key] for row in rows if row["architecture"] == architecture and row["name"] == name]


def minus(
    rows: Sequence[Row], architecture: str, name: str, base: str, key: str = "ce", base_key: str | None = None
) -> list[float]:
    """The reading of a model minus that of another, seed by seed."""
    pairs = zip(of(rows, architecture, name, key), of(rows, architecture, base, base_key or key), strict=True)
    return [a - b for a, b in pairs]


def sized(size: int) -> str:
    """The name of the published interface between regions of `size` layers."""
    return MIDDLE if size == 2 else f"{MIDDLE}, regions {REGION_SIZES[size]}"


def last_look(rows: Sequence[Row], rank: int, key: str) -> list[float]:
    """Table 7's reading at the last step, the mean over regions, seed by seed."""
    looks = of(rows, SPECTRAL, PUBLISHED[rank], "looks")
    return [statistics.fmean(seed[-1][key]) for seed in looks]  # type: ignore[index]


def _kinds(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["architecture"] for row in rows))


def _by_kind(rows: Sequence[Row], effect: Callable[[str], list[float]]) -> list[list[float]]:
    """An effect of each architecture, seed by seed."""
    return [effect(kind) for kind in _kinds(rows)]


def _claims(rows: Sequence[Row]) -> list[Claim]:
    kinds = ", ".join(_kinds(rows))
    return [*_quality_claims(rows, kinds), _constant(rows), *_size_claims(rows), *_norm_claims(rows)]


def _quality_claims(rows: Sequence[Row], kinds: str) -> list[Claim]:
    """Table 2, with the control and the honest reading that it lacks."""

    def near(kind: str) -> list[float]:
        dense, published = (of(rows, kind, name) for name in ("dense", MIDDLE))
        return [NEAR - (b / a - 1) for a, b in zip(dense, published, strict=True)]

    return [
        each(
            "near the dense model",
            f"the published interface is within {100 * NEAR:g} % of the dense model (Table 2)",
            f"{NEAR:g} minus the share by which its CE is above, {kinds},",
            _by_kind(rows, near),
        ),
        each(
            "better than the control",
            "the published interface is better than its last region alone",
            f"CE of the shallow model minus that of the published, r = 32, {kinds},",
            _by_kind(rows, lambda kind: minus(rows, kind, "shallow", MIDDLE)),
        ),
        each(
            "better, honestly",
            "the same where each byte is predicted from those before it",
            f"CE of the shallow model minus that of the published from prefixes, {kinds},",
            _by_kind(rows, lambda kind: minus(rows, kind, "shallow", MIDDLE, "honest")),
        ),
        each(
            "flattered",
            "the published interface reads the future: from prefixes alone its CE is higher",
            f"its CE from prefixes minus that with the future in sight, {kinds},",
            _by_kind(rows, lambda kind: minus(rows, kind, MIDDLE, MIDDLE, "honest", "sample")),
        ),
        each(
            "causal",
            "a causal interface at every position is better than the last region alone",
            f"CE of the shallow model minus that of {FINE}, {kinds},",
            _by_kind(rows, lambda kind: minus(rows, kind, "shallow", FINE)),
        ),
        each(
            "messages are used",
            "another row's messages cost the published interface something",
            f"CE with another row's messages minus its own, r = 32, {kinds},",
            _by_kind(rows, lambda kind: minus(rows, kind, MIDDLE, MIDDLE, "shuffled", "ce")),
        ),
    ]


def _constant(rows: Sequence[Row]) -> Claim:
    """Whether rank matters, over the architectures that have several."""
    differences = [minus(rows, kind, PUBLISHED[16], PUBLISHED[64]) for kind in RANKED]
    worth = [minus(rows, kind, "shallow", "dense") for kind in RANKED]
    margin = CONSTANT * statistics.fmean(value for seeds in worth for value in seeds)
    return within(
        "rank does not matter",
        "the gap is about constant over ranks 16 to 64 (§4)",
        "the mean over architectures of CE at r = 16 minus that at r = 64, against a quarter of what depth "
        "is worth,",
        [statistics.fmean(seed) for seed in zip(*differences, strict=True)],
        margin,
    )


def _size_claims(rows: Sequence[Row]) -> list[Claim]:
    def worst(kind: str) -> list[float]:
        others = [of(rows, kind, sized(size)) for size in (2, 3, 4)]
        means = [statistics.fmean(seed) for seed in zip(*others, strict=True)]
        return [a - b for a, b in zip(of(rows, kind, sized(1)), means, strict=True)]

    return [
        each(
            "one layer a region is worst",
            "regions of one layer cost most (Table 6)",
            f"CE of regions of one layer minus the mean of two, three and four, {', '.join(RANKED)},",
            [worst(kind) for kind in RANKED],
        )
    ]


def _norm_claims(rows: Sequence[Row]) -> list[Claim]:
    return [
        each(
            "suffixes contract",
            "the norms of suffix products are below 1 (Table 7: 0.64 to 0.86)",
            f"1 minus ‖P‖ at the last step, {SPECTRAL}, r = {', '.join(map(str, PUBLISHED))},",
            [[1 - norm for norm in last_look(rows, rank, "suffix_norm")] for rank in PUBLISHED],
        ),
        each(
            "regions amplify",
            "the norms of single regions are above 1 (Table 7: 1.33 to 1.90)",
            f"‖J‖ - 1 at the last step, {SPECTRAL}, r = {', '.join(map(str, PUBLISHED))},",
            [[norm - 1 for norm in last_look(rows, rank, "local_norm")] for rank in PUBLISHED],
        ),
    ]


def quality_table(rows: Sequence[Row]) -> ResultTable:
    """Table 2: every model of every architecture, with its distance to dense and to shallow."""
    cells = []
    for kind in _kinds(rows):
        for name in dict.fromkeys(row["name"] for row in rows if row["architecture"] == kind):
            if ", regions " in name:
                continue
            against = [minus(rows, kind, name, base) for base in ("dense", "shallow") if of(rows, kind, base)]
            cells.append(
                (
                    kind,
                    name,
                    _mean_spread(of(rows, kind, name)),
                    *(f"{statistics.fmean(values):+.4f}" for values in against),
                    *["–"] * (2 - len(against)),
                    f"{statistics.fmean(of(rows, kind, name, 'honest')):.4f}",
                    _shuffled(rows, kind, name),
                )
            )
    header = ("architecture", "model", "CE", "to dense", "to shallow", "honest", "another row's messages")
    return ResultTable("Held-out nats per byte, mean ± standard deviation over seeds", header, tuple(cells))


def _shuffled(rows: Sequence[Row], kind: str, name: str) -> str:
    results = [
        row["shuffled"]
        for row in rows
        if row["architecture"] == kind and row["name"] == name and "shuffled" in row
    ]
    return f"{statistics.fmean(results):.4f}" if results else "–"


def _mean_spread(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{spread}"


def size_table(rows: Sequence[Row]) -> ResultTable:
    """Table 6: the published interface of rank 32 by the layers of a region."""
    cells = tuple(
        (kind, *(_mean_spread(of(rows, kind, sized(size))) for size in REGION_SIZES)) for kind in RANKED
    )
    header = ("architecture", *(f"{size} layers" if size > 1 else "1 layer" for size in REGION_SIZES))
    return ResultTable("CE of the published interface, r = 32, by layers of a region", header, cells)


def norm_table(rows: Sequence[Row]) -> ResultTable:
    """Table 7: norms of Jacobians at the last step."""
    keys = {
        "local_norm": "‖J‖",
        "suffix_norm": "‖P‖",
        "rms": "‖J‖_F/√r",
        "message_spread": "spread of messages",
    }
    cells = tuple(
        (str(rank), *(_mean_spread(last_look(rows, rank, key)) for key in keys)) for rank in PUBLISHED
    )
    return ResultTable(f"Interface Jacobians of {SPECTRAL} at the last step", ("rank", *keys.values()), cells)


def _findings(rows: Sequence[Row]) -> list[str]:
    results = []
    for kind in _kinds(rows):
        worth = minus(rows, kind, "shallow", "dense", "honest")
        retained = {
            "the published interface": minus(rows, kind, "shallow", MIDDLE, "honest"),
            "a causal one at every position": minus(rows, kind, "shallow", FINE, "honest"),
        }
        message = ", ".join(
            f"{name} keeps {100 * statistics.fmean(values) / statistics.fmean(worth):.0f} %"
            for name, values in retained.items()
        )
        results.append(f"{kind}: depth is worth {Interval.of(worth)}; of that, read honestly, {message}.")
    return results
