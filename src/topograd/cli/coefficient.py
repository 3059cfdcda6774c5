"""`topograd coefficient`: local learning coefficients of a model's layers and heads, by Langevin chains."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from topograd.cli.console import DASH, Json, ModelArgument, ReadPath, grid, note, out, parse, show
from topograd.cli.progress import OnMore, work_progress
from topograd.limits import DEPTH, REPEATS, check_numbers

if TYPE_CHECKING:
    from torch import Tensor

    from topograd.cli.probe_model import ProbeModel
    from topograd.geometry.singular.langevin import Langevin
    from topograd.geometry.singular.parts import Part

TERMS = 1024
"""Tokens of the text."""
STEP = 128
"""Of these that a step of a chain takes."""
DRAWS = 40


@dataclass(frozen=True, kw_only=True)
class Coefficient:
    """Local learning coefficients λ̂: how many directions of each layer, or head, the text fixes, halved.

    Chains move the weights of one part while all others stay. A value is calibrated if the chains pass the
    test of the virial, agree, and do not drift; the reason stands beside one that is not."""

    model: ModelArgument
    layers: int | None = None
    """How many layers are sampled, evenly spaced, first and last included; by default all."""
    heads: bool = False
    """Heads of these layers instead of whole layers."""
    draws: int = DRAWS
    """Of each of 4 chains, 4 steps apart, behind as many steps of burn-in. More cost more, and need a weaker
    pull towards the weights (localization), which hides flat directions."""
    text: ReadPath = None
    """Text of your own, a file or a folder, or images for a run on images; by default what the run held
    out, or embedded text."""
    device: str | None = None
    """Where it runs: cpu, cuda, cuda:1; by default where the run's model is, else cpu."""
    dtype: Literal["float64", "float32"] | None = None
    """By default float64, and float32 for models of more than 50 million parameters."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, layers=DEPTH, draws=(8, REPEATS[1]))


def run(argv: list[str]) -> int:
    args = parse(Coefficient, argv, "coefficient")
    from topograd.cli.probe_model import open_probe
    from topograd.geometry.singular.parts import head_parts, layer_parts

    probe = open_probe(args.model, args.text, args.device, args.dtype)
    parts = layer_parts(probe.model, args.layers)
    if args.heads:
        parts = [head for layer in parts for head in head_parts(probe.model, layer.name)]
    settings = command_settings(args.draws)
    estimate = expected_seconds(probe, settings, parts)
    about = f"{estimate:.0f} s" if estimate < 120 else f"{estimate / 60:.0f} min"
    note(f"{len(parts)} parts: about {about}, by steps timed here")
    began = time.perf_counter()
    found: list[dict[str, Any]] = []
    try:
        with work_progress(f"sampling {args.model}: steps of chains") as on_more:
            for one in sample_parts(probe, settings, parts, on_more):
                found.append(one)  # what there is when it is interrupted
    except KeyboardInterrupt:
        if not found:
            raise
    results = {"model": str(args.model), "text": probe.text, "estimated_seconds": estimate, "parts": found}
    results["unfinished"] = [part.name for part in parts[len(found) :]]
    results["seconds"] = time.perf_counter() - began
    show(args.json, results, _show)
    if results["unfinished"]:
        raise KeyboardInterrupt(f"interrupted: {len(found)} of {len(parts)} parts were sampled")
    return 0


def command_settings(draws: int) -> Langevin:
    """How so many draws are made."""
    from topograd.geometry.singular.langevin import Langevin

    return Langevin(chains=4, burn_in=4 * draws, draws=draws, thin=4, control=True)


def expected_seconds(probe: ProbeModel, settings: Langevin, parts: Sequence[Part]) -> float:
    """All steps and gradients, by steps timed in the first part and the last.

    A chain computes nothing before its layer, so that a step in the first costs most and in the last least.
    """
    from topograd.geometry.singular.langevin import SEARCHED, Target, step_seconds
    from topograd.geometry.singular.terms import sampled_weights

    target = Target(probe.model, "cross-entropy", rows_of(probe), probe.outputs)
    ends = [sampled_weights(probe.model, part.weights) for part in (parts[0], parts[-1])]
    each = sum(step_seconds(target, center, settings) for center in ends) / 2
    return len(parts) * (settings.chains * settings.steps + SEARCHED) * each


def rows_of(probe: ProbeModel) -> list[tuple[Tensor, Tensor | None]]:
    """`TERMS` tokens of the text, `STEP` in a batch, and a row at least: a step costs what its tokens do."""
    found: list[tuple[Tensor, Tensor]] = []
    for inputs, targets in probe.batches:
        assert targets is not None, "the model has a loss"
        rows = max(1, STEP // targets[0].numel())
        found += zip(inputs.split(rows), targets.split(rows), strict=True)
    return [*found[: -(-TERMS // found[0][1].numel())]]


def sample_parts(
    probe: ProbeModel, settings: Langevin, parts: Sequence[Part], on_more: OnMore
) -> Iterator[dict[str, Any]]:
    """λ̂ of every part, as JSON holds it; a part whose chains diverge has a reason and no value."""
    from topograd.geometry.singular.parts import part_coefficients

    every = part_coefficients(
        probe.model, "cross-entropy", rows_of(probe), parts, settings, outputs=probe.outputs, on_step=on_more
    )
    for one in every:
        found = one.found
        record: dict[str, Any] = {"name": one.name, "value": None, "interval": None, "calibrated": False}
        record |= {"reason": one.reason, "localization": one.localization}
        if found is not None:
            names = ("value", "calibrated", "virial", "weights", "n_beta", "terms")
            record |= {name: getattr(found, name) for name in names} | {"interval": list(found.interval)}
        yield record


def _show(results: dict[str, Any]) -> None:
    """One table for a person."""
    table = grid(f"{Path(results['model']).name}: λ̂ by part", "part", "λ̂", "90 %", "weights", "virial")
    for part in results["parts"]:
        if part["value"] is None:
            table.add_row(part["name"], *(DASH,) * 4)
            continue
        low, high = part["interval"]
        mark = "" if part["calibrated"] else " ?"
        interval = f"{low:.2f} to {high:.2f}"
        table.add_row(
            part["name"],
            f"{part['value']:.2f}{mark}",
            interval,
            str(part["weights"]),
            f"{part['virial']:.2f}",
        )
    out().print(table)
    for part in results["parts"]:
        if not part["calibrated"]:
            note(f"{part['name']}: {part['reason']}")
