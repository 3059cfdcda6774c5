"""Trained runs, ranked by what they are worth to somebody: the measured J of each (eq. 30, `utility.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from topograd.search.properties import read_numbers, read_properties
from topograd.search.trained import Trained
from topograd.search.utility import Terms, Weights, utility


@dataclass(frozen=True)
class Worth:
    """What a trained model is worth."""

    utility: float
    """J; less is better."""
    terms: Terms
    """Its six terms, as measured."""
    shares: dict[str, float]
    """What each term adds to J: times its weight, with its sign."""
    properties: dict[str, Any]
    """Whatever else was asked for."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def worth(trained: Trained, weights: Weights, properties: Sequence[str] = ()) -> Worth:
    """Measure the terms of J on a trained model, and weigh them."""
    terms = Terms(**read_numbers(trained, [field.name for field in fields(Terms)]))
    shares = {name: getattr(weights, name, 1.0) * value for name, value in asdict(terms).items()}
    shares["capability"] = 0.0 - shares["capability"]
    return Worth(utility(terms, weights), terms, shares, read_properties(trained, properties))
