"""Predicted rates of described networks: the power of t at every node."""

from papers.dead_directions.rules.architectures import (
    Architecture,
    Attention,
    Block,
    Chain,
    Composition,
    GatedStack,
    Mixer,
)
from papers.dead_directions.rules.blocks import predict
from papers.dead_directions.rules.chains import Prediction

__all__ = [
    "Architecture",
    "Attention",
    "Block",
    "Chain",
    "Composition",
    "GatedStack",
    "Mixer",
    "Prediction",
    "predict",
]
