"""Registry of properties of a trained configuration. Listing them needs no torch.

A property is `function(trained) -> number or table`, with `trained` a `search.measured.Trained`: the stack,
its plan, held-out text, and readings that are made once (`trained.evaluation`, `trained.readings`). A name is
one of those below, or `package.module:attribute` of your own. Numbers can be objectives of a Pareto study
(`topograd search pareto --objectives`) and columns of a choice (`topograd search choose --properties`).

A study makes an objective small unless it is in MORE; `max:NAME` and `min:NAME` set the direction of any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from topograd.errors import ConfigError
from topograd.registry import Registry

if TYPE_CHECKING:
    from topograd.data.windows import Text
    from topograd.nn.stack import Stack
    from topograd.search.measured import Trained
    from topograd.topology.plan import Plan

Direction = Literal["minimize", "maximize"]
Property = Callable[["Trained"], Any]
_HOME = "topograd.search.property_readings"
LESS = (
    # the terms of J (eq. 30), measured; capability is the sixth
    *("bpb", "coupling", "head", "bandwidth", "calibration"),
    *("prefix_bpb", "gradient_depth", "activation_layers", "peak_bytes", "projections"),
    *("coupling_cost", "coordination", "head_matrices", "head_parameters", "specialist_price"),
    *("gradient_bits", "staleness", "stashed_layers", "waiting_stages"),
)
"""Numbers that are better small."""
MORE = (
    *("capability", "structural_capability", "pipeline_granularity", "information_bits", "target_alignment"),
    *("composition_gain", "specialist_capacity", "specialist_reference"),
)
"""Numbers that are better large."""
TABLES = {
    "update": "update",
    "wand": "wand",
    "prefix": "prefix",
    "exit_layers": "exit_layers",
    "effective_rank": "effective_rank",
    "edge_ranks": "relay_ranks",
    "ece": "ece",
}
"""Readings of several numbers, with the functions that give them."""
PROPERTIES: Registry[Property] = Registry(
    "property",
    {name: f"{_HOME}:{name}" for name in (*LESS, *MORE)} | {n: f"{_HOME}:{f}" for n, f in TABLES.items()},
)


def named_objectives(words: Sequence[str]) -> dict[str, Direction]:
    """The objectives that a user names, with their directions."""
    found: dict[str, Direction] = {}
    for word in words:
        way, colon, rest = word.partition(":")
        name = rest if colon and way in ("max", "min") else word
        PROPERTIES.check(name)
        if name in TABLES:
            numbers = ", ".join((*LESS, *MORE))
            raise ConfigError(setting="objectives", given=name, allowed=f"a number, not a table: {numbers}")
        if name in found:
            raise ConfigError(setting="objectives", given=name, allowed="given once")
        more = way == "max" if name != word else name in MORE
        found[name] = "maximize" if more else "minimize"
    if not found:
        raise ConfigError(setting="objectives", given=list(words), allowed="at least one name, such as bpb")
    return found


def read_properties(trained: Trained, names: Iterable[str]) -> dict[str, Any]:
    """Each property by its name; the model is as it was afterwards."""
    from topograd.exec.forward import evaluating  # here torch is there already

    with evaluating(trained.stack):
        return {name: PROPERTIES[name](trained) for name in names}


def read_numbers(trained: Trained, names: Iterable[str]) -> dict[str, float]:
    """Properties that must be finite numbers, as objectives are."""
    values = read_properties(trained, names)
    for name, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise ConfigError(setting=name, given=value, allowed="a finite number, or left out")
    return {name: float(value) for name, value in values.items()}


def measure(
    stack: Stack,
    plan: Plan,
    text: Text,
    new: Text | None = None,
    *,
    layers: int | None = None,
    budget: float = 0.5,
    eps: float = 0.01,
) -> dict[str, Any]:
    """Every property of a model; `bpb` as the table that an evaluation has. `new` is the text of the probes.

    `layers` are those that are not of private decoders, `budget` is the share of the layers that a prefix may
    run, `eps` the share of tokens that WAND may change.
    """
    from dataclasses import asdict

    from topograd.search.measured import Trained

    trained = Trained(stack, plan, text, new, layers, budget, eps)
    return read_properties(trained, PROPERTIES) | {"bpb": asdict(trained.evaluation.bpb)}
