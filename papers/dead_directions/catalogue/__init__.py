"""The catalogue of rates: describe a network, predict its rates, measure them on weights set by hand."""

from papers.dead_directions.catalogue.cells import Cell, catalogue, compare
from papers.dead_directions.catalogue.probing import Measurement, ladder, probe
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
