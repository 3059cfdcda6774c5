"""The catalogue of rates: describe a network, predict its rates, measure them on weights set by hand."""

from topograd.geometry.catalogue.architectures import (
    Architecture,
    Attention,
    Block,
    Chain,
    Composition,
    GatedStack,
    Mixer,
)
from topograd.geometry.catalogue.cells import Cell, catalogue, compare
from topograd.geometry.catalogue.probing import Measurement, ladder, probe
from topograd.geometry.catalogue.rules import Prediction
from topograd.geometry.catalogue.rules_blocks import predict

__all__ = [
    "Architecture",
    "Attention",
    "Block",
    "Cell",
    "Chain",
    "Composition",
    "GatedStack",
    "Measurement",
    "Mixer",
    "Prediction",
    "catalogue",
    "compare",
    "ladder",
    "predict",
    "probe",
]
