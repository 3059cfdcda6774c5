"""What bounded interfaces keep of depth, the published one and causal ones: Tables 2, 6 and 7, judged.

Statement. CE in nats per byte of the models of `interfaces.py`: eight layers dense, the last two alone
(shallow), regions of two layers that are joined by the authors' own module of rank 16, 32 or 64, by a causal
one, or by half of the directions of the hidden state, on four architectures; and regions of one to four
layers joined by the authors' (Table 6). The directions are the positive control: all of them are the dense
model, to rounding. Depth is worth CE(shallow) - CE(dense), and an interface keeps

    (CE(shallow) - CE(interface)) / (CE(shallow) - CE(dense))

of it. The published interface pools the whole sequence, so its CE is also read honestly: each byte predicted
from those before it alone (`prefix_losses`), which is what a model that writes has. Claims are judged by 90 %
intervals over seeds (`verdicts.py`), architecture by architecture, and were set before the run. Trainings
come in the order of what they decide (`cases`): with what is there at any moment, `--judge` gives tables and
the claims whose models were all trained.

Source: "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces", Table 2 (CE by architecture and
rank), Table 6 (by region size), Table 7 and Figure 3 (norms of Jacobians, Mamba-3), §4. The paper has no
shallow control, and reads its models with the future in sight. Cost: `presets.py`; about a minute for each
case. Limits: models of 0.4M parameters after 0.4M bytes; the paper has 60M to 90M after 20M tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from papers.kept import NotMeasured
from papers.latent_bounded_interfaces import interfaces
from papers.latent_bounded_interfaces.interfaces import (
    FINE,
    PUBLISHED,
    RANKED,
    REGION_SIZES,
    RESIDUAL,
    Case,
)
from papers.outcome import Asked, Result, ResultTable, Row, check_seeds
from papers.verdicts import Claim, Interval, each, percent, within
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
        with suppress(NotMeasured):
            rows.append(key | args.kept.row(key, partial(interfaces.train_case, case, args.steps)))
        args.on_more(len(rows), len(todo))
    if not rows:
        raise NotMeasured(setting="judge", given=args.study, remedy="run it without --judge first")
    return Result(
        setting=f"Plain models of width {args.width} on bytes, {args.steps} steps each.",
        rows=rows,
        tables=(quality_table(rows),) if tiny else (quality_table(rows), size_table(rows), norm_table(rows)),
        findings=() if tiny else (f"{len(rows)} of {len(todo)} trainings.", *_findings(rows)),
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
    """All models, what decides most first; tiny: a dense one and a causal interface."""
    kinds = get_args(Architecture)
    if tiny:
        return interfaces.headline(kinds[0], seeds)[:3:2]
    models = [case for seed in seeds for kind in kinds for case in interfaces.headline(kind, [seed])]
    first = [case for case in models if case.name in ("dense", "shallow", RESIDUAL, MIDDLE)]
    sizes = [case for kind in RANKED for case in interfaces.region_sizes(kind, seeds)]
    ranks = [case for case in models if case.name in PUBLISHED.values() and case.name != MIDDLE]
    return [*first, *ranks, *sizes, *(case for case in models if case.name == FINE)]


def of(rows: Sequence[Row], architecture: str, name: str, key: str = "ce") -> dict[int, Any]:
    """A reading of a model by seed."""
    alike = [row for row in rows if row["architecture"] == architecture and row["name"] == name]
    return {row["seed"]: row[key] for row in alike}


def minus(
    rows: Sequence[Row], architecture: str, name: str, base: str, key: str = "ce", base_key: str | None = None
) -> list[float]:
    """The reading of a model minus that of another, for each seed that has both."""
    own, other = of(rows, architecture, name, key), of(rows, architecture, base, base_key or key)
    return [own[seed] - other[seed] for seed in sorted(own) if seed in other]


def kept(rows: Sequence[Row], architecture: str, name: str) -> list[float]:
    """The share of what depth is worth that a model keeps, read honestly, for each seed with all three."""
    dense, shallow, own = (of(rows, architecture, model, "honest") for model in ("dense", "shallow", name))
    seeds = sorted(own.keys() & dense.keys() & shallow.keys())
    return [(shallow[seed] - own[seed]) / (shallow[seed] - dense[seed]) for seed in seeds]


def sized(size: int) -> str:
    """The name of the published interface between regions of `size` layers."""
    return MIDDLE if size == 2 else f"{MIDDLE}, regions {REGION_SIZES[size]}"


def last_look(rows: Sequence[Row], rank: int, key: str) -> list[float]:
    """Table 7's reading at the last step, the mean over regions, seed by seed."""
    looks = of(rows, SPECTRAL, PUBLISHED[rank], "looks")
    return [statistics.fmean(seed[-1][key]) for seed in looks.values()]


def _kinds(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["architecture"] for row in rows))


def _claims(rows: Sequence[Row]) -> list[Claim]:
    """Those whose models were all trained."""
    return [*_quality_claims(rows), *_constant(rows), *_size_claims(rows), *_norm_claims(rows)]


def _over(
    kinds: Sequence[str], name: str, prediction: str, effect: str, read: Callable[[str], list[float]]
) -> list[Claim]:
    """The claim that `effect` is above 0 on every one of these; none before each of them has a seed."""
    values = [read(kind) for kind in kinds]
    return [each(name, prediction, f"{effect}, {', '.join(kinds)},", values)] if all(values) else []


def _quality_claims(rows: Sequence[Row]) -> list[Claim]:
    """Table 2, with the controls and the honest reading that it lacks."""

    def near(kind: str) -> list[float]:
        dense = of(rows, kind, "dense")
        return [
            NEAR - (own / dense[seed] - 1) for seed, own in of(rows, kind, MIDDLE).items() if seed in dense
        ]

    judge = partial(_over, _kinds(rows))
    return [
        *judge(
            "depth is worth something",
            "eight layers are better than the last two alone",
            "CE of the shallow model minus that of the dense one",
            lambda kind: minus(rows, kind, "shallow", "dense"),
        ),
        *judge(
            "positive control",
            "half of the directions of the hidden state carry at least half of what depth is worth",
            f"the share kept by {RESIDUAL}, half of the width, minus a half",
            lambda kind: [share - 0.5 for share in kept(rows, kind, RESIDUAL)],
        ),
        *judge(
            "near the dense model",
            f"the published interface is within {100 * NEAR:g} % of the dense model (Table 2)",
            f"{NEAR:g} minus the share by which its CE is above",
            near,
        ),
        *judge(
            "better than the control",
            "the published interface is better than its last region alone",
            "CE of the shallow model minus that of the published, r = 32",
            lambda kind: minus(rows, kind, "shallow", MIDDLE),
        ),
        *judge(
            "better, honestly",
            "the same where each byte is predicted from those before it",
            "CE of the shallow model minus that of the published from prefixes",
            lambda kind: minus(rows, kind, "shallow", MIDDLE, "honest"),
        ),
        *judge(
            "flattered",
            "the published interface reads the future: from prefixes alone its CE is higher",
            "its CE from prefixes minus that with the future in sight",
            lambda kind: minus(rows, kind, MIDDLE, MIDDLE, "honest", "sample"),
        ),
        *judge(
            "causal",
            "a causal interface at every position is better than the last region alone",
            f"CE of the shallow model minus that of {FINE}",
            lambda kind: minus(rows, kind, "shallow", FINE),
        ),
        *judge(
            "messages are used",
            "another row's messages cost the published interface something",
            "CE with another row's messages minus its own, r = 32",
            lambda kind: minus(rows, kind, MIDDLE, MIDDLE, "shuffled", "ce"),
        ),
    ]


def _constant(rows: Sequence[Row]) -> list[Claim]:
    """Whether rank matters, over the architectures that have several."""
    differences = [minus(rows, kind, PUBLISHED[16], PUBLISHED[64]) for kind in RANKED]
    worth = [minus(rows, kind, "shallow", "dense") for kind in RANKED]
    if not all(differences):
        return []
    margin = CONSTANT * statistics.fmean(value for seeds in worth for value in seeds)
    return [
        within(
            "rank does not matter",
            "the gap is about constant over ranks 16 to 64 (§4)",
            "the mean over architectures of CE at r = 16 minus that at r = 64, against a quarter of what "
            "depth is worth,",
            [statistics.fmean(seed) for seed in zip(*differences, strict=False)],
            margin,
        )
    ]


def _size_claims(rows: Sequence[Row]) -> list[Claim]:
    def worst(kind: str) -> list[float]:
        single, *others = (of(rows, kind, sized(size)) for size in REGION_SIZES)
        seeds = sorted(single.keys() & set.intersection(*(set(other) for other in others)))
        return [single[seed] - statistics.fmean(other[seed] for other in others) for seed in seeds]

    return _over(
        RANKED,
        "one layer a region is worst",
        "regions of one layer cost most (Table 6)",
        "CE of regions of one layer minus the mean of two, three and four",
        worst,
    )


def _norm_claims(rows: Sequence[Row]) -> list[Claim]:
    by_rank = {
        key: [last_look(rows, rank, key) for rank in PUBLISHED] for key in ("suffix_norm", "local_norm")
    }
    if not all(by_rank["local_norm"]):
        return []
    ranks = f"at the last step, {SPECTRAL}, r = {', '.join(map(str, PUBLISHED))},"
    return [
        each(
            "suffixes contract",
            "the norms of suffix products are below 1 (Table 7: 0.64 to 0.86)",
            f"1 minus ‖P‖ {ranks}",
            [[1 - norm for norm in norms] for norms in by_rank["suffix_norm"]],
        ),
        each(
            "regions amplify",
            "the norms of single regions are above 1 (Table 7: 1.33 to 1.90)",
            f"‖J‖ - 1 {ranks}",
            [[norm - 1 for norm in norms] for norms in by_rank["local_norm"]],
        ),
    ]


def quality_table(rows: Sequence[Row]) -> ResultTable:
    """Table 2: every model of every architecture, with its distance to dense and to shallow."""
    cells = []
    for kind in _kinds(rows):
        for name in dict.fromkeys(row["name"] for row in rows if row["architecture"] == kind):
            if ", regions " in name:
                continue
            shares = [] if name in ("dense", "shallow") else kept(rows, kind, name)
            cells.append(
                (
                    kind,
                    name,
                    _mean_spread(of(rows, kind, name).values()),
                    *(_mean(minus(rows, kind, name, base), "+.4f") for base in ("dense", "shallow")),
                    _mean(of(rows, kind, name, "honest").values()),
                    percent(shares) if shares else "–",
                    _shuffled(rows, kind, name),
                )
            )
    header = ("architecture", "model", "CE", "to dense", "to shallow", "honest", "kept, honestly, 90 %")
    return ResultTable(
        "Held-out nats per byte, mean ± standard deviation over seeds",
        (*header, "another row's messages"),
        tuple(cells),
    )


def _shuffled(rows: Sequence[Row], kind: str, name: str) -> str:
    alike = [row for row in rows if row["architecture"] == kind and row["name"] == name]
    return _mean([row["shuffled"] for row in alike if "shuffled" in row])


def _mean(values: Collection[float], form: str = ".4f") -> str:
    return f"{statistics.fmean(values):{form}}" if values else "–"


def _mean_spread(values: Collection[float]) -> str:
    return _mean(values) + (f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else "")


def size_table(rows: Sequence[Row]) -> ResultTable:
    """Table 6: the published interface of rank 32 by the layers of a region."""
    cells = tuple(
        (kind, *(_mean_spread(of(rows, kind, sized(size)).values()) for size in REGION_SIZES))
        for kind in RANKED
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
    return [
        f"{kind}: depth is worth {Interval.of(worth)} nats on the sample."
        for kind in _kinds(rows)
        if (worth := minus(rows, kind, "shallow", "dense", "honest"))
    ]
