"""The study of fields in sentences: what came out, with its numbers, and a verdict on the conjecture.

Every sentence is made from a record of `fields.study`; none says more than its numbers. The conjecture of
§10.3 expects the contrast between classes to grow, and exponents to fall where it grows. It is called

    supported        the exponent falls with the contrast, also among runs with the same targets
    in part          it does over all runs only, so that the targets may drive both
    not supported    otherwise

for the fitted exponent and for that of the largest quarter alike: the verdict is that of the weaker one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from topograd.studies.fields_runs import LEADING

Record = Mapping[str, Any]


def summary(record: Record) -> dict[str, Any]:
    """The findings by part, and the verdict."""
    return {
        "findings": {
            "layers": _layers(record["layers"]),
            "drift": _drift(record["drift"]),
            "geometry": _geometry(record["geometry"]),
            "tails": _tails(record["geometry"]),
            "staged": _staged(record["staged"]),
        },
        "verdict": verdict(record["geometry"]["links"]),
    }


def _layers(layers: Record) -> list[str]:
    first, last = layers["rows"][0], layers["rows"][-1]
    carried, traces = layers["carried"], np.array(last["traces"])
    most, largest = int(np.argmax(carried)), int(np.argmax(traces))
    unlike = "" if most == largest else ": what a layer carries cannot be told from its trace"
    return [
        f"From the first layer to the last, the layers carried {', '.join(map(_percent, carried))} of the "
        f"loss's decay over the run; layer {most + 1} carried most. Of K's trace at the end the largest part "
        f"is that of layer {largest + 1}, {_percent(traces[largest] / traces.sum())}{unlike}.",
        f"K's trace went to {sum(last['traces']) / sum(first['traces']):.2f} times that of the start, and "
        f"its parts moved by {', '.join(f'{moved:.2f}' for moved in last['moved'])} of their own length.",
        f"At the start the {LEADING} leading eigenvectors of K hold {_percent(first['leading_share'])} of "
        f"the residual, and it falls {first['speed']:.2f} times as fast as along a mean eigenvector. At the "
        f"end they hold {_percent(last['leading_share'])}, and it falls {last['speed']:.2f} times as fast.",
        f"Loss {first['loss']:.3f} to {last['loss']:.5f}; {_percent(last['accuracy'])} of the unseen inputs "
        "are on their side of the middle.",
    ]


def _drift(drift: Record) -> list[str]:
    rows, slopes = drift["rows"], drift["slopes"]
    widths, seeds = sorted({row["width"] for row in rows}), len({row["seed"] for row in rows})

    def mean(kind: str, width: int) -> str:
        return _percent(float(np.mean([row[kind] for row in rows if row["width"] == width])))

    ends = (widths[0], widths[-1])
    plain, control = ([mean(kind, width) for width in ends] for kind in ("plain", "control"))
    said = [
        f"The frozen kernel's residuals are off by up to {plain[0]} of |r(0)| at width {ends[0]} and "
        f"{plain[1]} at width {ends[1]} (means of {seeds} seeds): the error goes as width to the power "
        f"{slopes['plain']:.2f}.",
        f"With targets drawn toward Y(0) by 1/√width it goes from {control[0]} to {control[1]}, as width to "
        f"the power {slopes['control']:.2f}.",
    ]
    if slopes["plain"] > -0.25 and slopes["control"] < -0.4:
        said.append(
            "So a small residual freezes the kernel, and width only where the residual shrinks with it. "
            "Under the mean as readout the fields move by an amount of order one at any width."
        )
    return said


def _geometry(geometry: Record) -> list[str]:
    top = max(run["high"] for run in geometry["runs"])
    runs = [run for run in geometry["runs"] if run["high"] == top]
    last = [run["layers"][-1] for run in runs]

    def mean(end: str, key: str) -> float:
        return float(np.mean([layer[end][key] for layer in last]))

    spread = {
        kind: float(np.mean([layer["end"]["G"][kind]["effective"] for layer in last]))
        for kind in ("within", "across")
    }
    changes = [layer["changes"]["contrast"] for run in geometry["runs"] for layer in run["layers"]]
    grew = sum(change > 0 for change in changes)
    before = float(np.mean([layer["start"]["G"]["within"]["effective"] for layer in last]))
    return [
        f"Projectors under the readout, targets up to {top:g}, means of {len(runs)} seeds: two inputs of one "
        f"class share {_percent(mean('start', 'within'))} of the neurons at the start and "
        f"{_percent(mean('end', 'within'))} at the end; two of unlike classes "
        f"{_percent(mean('start', 'across'))} and {_percent(mean('end', 'across'))}. Over all runs and "
        f"layers the contrast grew in {grew} of {len(changes)} cases.",
        f"G's effective rank there is {_percent(before)} of the width at the start; at the end "
        f"{_percent(spread['within'])} within a class and {_percent(spread['across'])} across.",
    ]


def _tails(geometry: Record) -> list[str]:
    layers = [layer for run in geometry["runs"] for layer in run["layers"]]
    chance, n = geometry["alpha_without_tail"], len(layers)
    plain = {
        end: sum(chance["low"] <= layer[end]["alpha"] <= chance["high"] for layer in layers)
        for end in ("start", "end")
    }
    beyond = [layer["end"]["outlier"] for layer in layers]
    links = geometry["links"]
    along = {key: float(np.mean([layer[key] for layer in layers])) for key in ("along_G", "along_u")}
    first = float(np.mean([layer["first_direction"] for layer in layers]))
    return [
        f"The fitted exponent of a random matrix of this size, which has no tail, is {chance['median']:.1f} "
        f"({chance['low']:.1f} to {chance['high']:.1f} for nine in ten). {plain['start']} of {n} "
        f"matrices are within that range before training and {plain['end']} after.",
        "Rank correlation of the exponent's change with the growth of the contrast: "
        f"{_link(links['alpha'])}. For the exponent of the largest quarter: {_link(links['alpha_quarter'])}.",
        f"The largest eigenvalue ends at {min(beyond):.2f} to {max(beyond):.2f} times the edge of a random "
        f"matrix's bulk. The correlation of its change with the contrast: {_link(links['outlier'])}.",
        f"One direction holds {_percent(first)} of the squared change of a weight matrix, on average. "
        f"{_percent(along['along_G'])} of it lies in the leading sixteenth of the eigenvectors of the mean G "
        f"at the start, and {_percent(along['along_u'])} in that of the activations' second moments; chance "
        "is 6 %.",
    ]


def verdict(links: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """What the correlations say of the conjecture."""
    words = {"alpha": "the fitted exponent", "alpha_quarter": "the exponent of the largest quarter"}
    grades = {measure: _grade(links[measure]) for measure in words}
    if max(grades.values()) == 0:
        return (
            "Supported here: where the classes' projectors come apart more, exponents fall more, also among "
            "runs with the same targets."
        )
    if max(grades.values()) == 1:
        return (
            "Supported in part: exponents fall with the contrast over all runs, but not among runs with the "
            "same targets, so that both may follow from how much there is to learn."
        )
    failed = " nor ".join(words[measure] for measure, grade in grades.items() if grade == 2)
    neither = "neither " if min(grades.values()) == 2 else ""
    follows = "falls" if neither else "does not fall"
    said = f"Not supported here: {neither}{failed} {follows} as the contrast between classes grows."
    return said + _outlier(links["outlier"])


def _outlier(link: Mapping[str, Mapping[str, float]]) -> str:
    """What the largest eigenvalue does, where it follows the contrast at all."""
    if link["all_runs"]["low"] <= 0:
        return ""
    alone = "" if link["same_targets"]["low"] > 0 else ", though not among runs with the same targets"
    return f" What grows with it is the largest eigenvalue, one outlier and no tail{alone}."


def _grade(link: Mapping[str, Mapping[str, float]]) -> int:
    """0: falls with the contrast among equals; 1: over all runs only; 2: neither."""
    falls = {name: found["high"] < 0 for name, found in link.items()}
    return 0 if all(falls.values()) else 1 if falls["all_runs"] else 2


def _staged(staged: Record) -> list[str]:
    rows, stages = staged["rows"], len(staged["stages"])
    together, own = (
        [float(np.median([row[key][k] for row in rows])) for k in range(stages)]
        for key in ("missed_together", "missed_own")
    )
    return [
        f"Stages of {' and '.join(map(str, staged['stages']))} layers. One step of each stage's residual is "
        f"predicted by all blocks of K with an error of {_list(together)} (medians over the run, first stage "
        "first).",
        f"By its own block alone the error is {_list(own)}, and {_list(rows[0]['missed_own'])} at the start: "
        "the difference is what the stages below do to a stage's inputs.",
    ]


def _link(found: Mapping[str, Mapping[str, float]]) -> str:
    words = {"all_runs": "over all runs", "same_targets": "among runs with the same targets"}
    return ", ".join(
        f"{found[key]['rho']:+.2f} [{found[key]['low']:+.2f}, {found[key]['high']:+.2f}] {words[key]}"
        for key in words
    )


def _list(shares: Sequence[float]) -> str:
    return " and ".join(_percent(share) for share in shares)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if abs(share) < 0.0995 else f"{100 * share:.0f} %"
