"""Predicted rates of described networks: the power of t at every node."""

from topograd.geometry.rules.architectures import (
    Architecture,
    Attention,
    Block,
    Chain,
    Composition,
    GatedStack,
    Mixer,
)
from topograd.geometry.rules.blocks import predict
from topograd.geometry.rules.chains import Prediction

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
