"""Fisher geometry of any `nn.Module`: K-FAC factors, symmetries, rates, singular invariants, monitors.

Works on any `nn.Module`. After "Dead Directions: Geometric Singular Learning"; see docs/concepts/geometry.md.
"""

from topograd.effective_rank import effective_rank
from topograd.geometry.checkpoint import CheckpointReading, DirectionReading, read_checkpoint
from topograd.geometry.ekfac import Eigenbasis, eigenbases
from topograd.geometry.factors import Factors, LayerFactors, kfac_factors
from topograd.geometry.finite_share import Share, read_share
from topograd.geometry.freeze_probe import ProbedLayer, freeze_probe
from topograd.geometry.heads import Head, find_heads
from topograd.geometry.inspection import Inspection, inspect
from topograd.geometry.losses import CrossEntropy, SquaredError
from topograd.geometry.monitors.early_warning import Alarm, EarlyWarning
from topograd.geometry.monitors.guard import Guard
from topograd.geometry.monitors.head_factor import anisotropy
from topograd.geometry.monitors.layernorm import KernelMonitor, kernel_cosine, layernorm_kernel
from topograd.geometry.monitors.phase import read_phase, weight_norm
from topograd.geometry.monitors.stream import StreamMonitor, StreamProfile
from topograd.geometry.paths import OrderReading, Path, read_order
from topograd.geometry.rates import Rate, fit_rate, local_slope, log_grid
from topograd.geometry.rules import Attention, Block, Chain, Composition, GatedStack, Mixer, predict
from topograd.geometry.safe_directions import MapReading, adapter_directions, input_moments, read_maps
from topograd.geometry.singular.coefficient import LearningCoefficient, learning_coefficient
from topograd.geometry.singular.invariants import rlct, singular_fluctuation
from topograd.geometry.singular.langevin import Langevin

__all__ = [
    "Alarm",
    "Attention",
    "Block",
    "Chain",
    "CheckpointReading",
    "Composition",
    "CrossEntropy",
    "DirectionReading",
    "EarlyWarning",
    "Eigenbasis",
    "Factors",
    "GatedStack",
    "Guard",
    "Head",
    "Inspection",
    "KernelMonitor",
    "Langevin",
    "LayerFactors",
    "LearningCoefficient",
    "MapReading",
    "Mixer",
    "OrderReading",
    "Path",
    "ProbedLayer",
    "Rate",
    "Share",
    "SquaredError",
    "StreamMonitor",
    "StreamProfile",
    "adapter_directions",
    "anisotropy",
    "effective_rank",
    "eigenbases",
    "find_heads",
    "fit_rate",
    "freeze_probe",
    "input_moments",
    "inspect",
    "kernel_cosine",
    "kfac_factors",
    "layernorm_kernel",
    "learning_coefficient",
    "local_slope",
    "log_grid",
    "predict",
    "read_checkpoint",
    "read_maps",
    "read_order",
    "read_phase",
    "read_share",
    "rlct",
    "singular_fluctuation",
    "weight_norm",
]
