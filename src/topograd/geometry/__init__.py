"""The ground that a gradient flows over: Fisher and K-FAC factors, rates, singular invariants, monitors.

Works on any `nn.Module`. After "Dead Directions: Geometric Singular Learning"; docs/geometry.md is the tour.
"""

from topograd.effective_rank import effective_rank
from topograd.geometry.checkpoint import CheckpointReading, DirectionReading, read_checkpoint
from topograd.geometry.factors import Factors, LayerFactors, kfac_factors
from topograd.geometry.inspection import Inspection, inspect
from topograd.geometry.losses import CrossEntropy, SquaredError
from topograd.geometry.monitors.bottoms import BottomMonitor, Conditions
from topograd.geometry.monitors.early_warning import Alarm, EarlyWarning
from topograd.geometry.monitors.layernorm import KernelMonitor, kernel_cosine, layernorm_kernel
from topograd.geometry.monitors.phase import read_phase, weight_norm
from topograd.geometry.monitors.stream import StreamMonitor, StreamProfile
from topograd.geometry.monitors.task_expansion import ExpansionDetector, anisotropy
from topograd.geometry.paths import OrderReading, Path, read_order
from topograd.geometry.projections import (
    Direction,
    bottom_direction,
    project_gradients,
    projected_second_moment,
    schur_complement,
)
from topograd.geometry.rates import Rate, fit_rate, local_slope, log_grid
from topograd.geometry.rules import Attention, Block, Chain, Composition, GatedStack, Mixer, predict
from topograd.geometry.safe_directions import MapReading, adapter_directions, read_maps
from topograd.geometry.selection import Selection, local_rlct, select_rank
from topograd.geometry.singular.coefficient import Langevin, LearningCoefficient, learning_coefficient
from topograd.geometry.singular.crossings import Crossing, crossing_from_rates, recover_crossing, rlct
from topograd.geometry.singular.fluctuation import data_free_fluctuation, singular_fluctuation
from topograd.geometry.singular.sgld import Sgld, sample_learning_coefficient

__all__ = [
    "Alarm",
    "Attention",
    "Block",
    "BottomMonitor",
    "Chain",
    "CheckpointReading",
    "Composition",
    "Conditions",
    "CrossEntropy",
    "Crossing",
    "Direction",
    "DirectionReading",
    "EarlyWarning",
    "ExpansionDetector",
    "Factors",
    "GatedStack",
    "Inspection",
    "KernelMonitor",
    "Langevin",
    "LayerFactors",
    "LearningCoefficient",
    "MapReading",
    "Mixer",
    "OrderReading",
    "Path",
    "Rate",
    "Selection",
    "Sgld",
    "SquaredError",
    "StreamMonitor",
    "StreamProfile",
    "adapter_directions",
    "anisotropy",
    "bottom_direction",
    "crossing_from_rates",
    "data_free_fluctuation",
    "effective_rank",
    "fit_rate",
    "inspect",
    "kernel_cosine",
    "kfac_factors",
    "layernorm_kernel",
    "learning_coefficient",
    "local_rlct",
    "local_slope",
    "log_grid",
    "predict",
    "project_gradients",
    "projected_second_moment",
    "read_checkpoint",
    "read_maps",
    "read_order",
    "read_phase",
    "recover_crossing",
    "rlct",
    "sample_learning_coefficient",
    "schur_complement",
    "select_rank",
    "singular_fluctuation",
    "weight_norm",
]
