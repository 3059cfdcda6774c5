"""topograd: design and read a network's gradient, where it may flow and the ground that it flows over.

    import topograd as tg

    stack = tg.GPT(layers=6, width=96, heads=3, vocab=1024, context=128)
    losses = tg.train_step(stack, "2,2,2", inputs, targets)      # every .grad is filled, stage by stage

    model = tg.load("runs/mine")                                 # a run that `topograd train` made
    model.generate("def ", tokens=8)
    tg.score(model, "The capital of France is", " Paris")        # at every depth, token by token

A name is imported when it is first used, so that what needs no torch does not wait for it.
"""

from typing import TYPE_CHECKING

from topograd.plugins import ENTRIES as registry_entries  # noqa: F401  read by `registry.py`

if TYPE_CHECKING:
    from topograd import fields, geometry, interfaces, optim, specialists
    from topograd.data.windows import Text
    from topograd.decode.drafters import DraftRule
    from topograd.decode.engine import Engine
    from topograd.decode.model import Model, generate, load
    from topograd.decode.sampling import Sampling
    from topograd.decode.speculation import Speculate
    from topograd.decode.strategies import FixedDepth, PathEnsemble, generate_tokens
    from topograd.decode.wand import Wand
    from topograd.errors import TopogradError
    from topograd.evaluation.texts import score
    from topograd.exec.forward import Predictor, stage_outputs
    from topograd.exec.linear_cross_entropy import linear_cross_entropy
    from topograd.exec.objectives import OBJECTIVES
    from topograd.exec.train_step import train_step
    from topograd.nn.adapted.adapt import adapt
    from topograd.nn.config import MIXERS, GPTConfig
    from topograd.nn.gpt import GPT
    from topograd.nn.heads import Head, HeadedStack
    from topograd.nn.layer_state import History
    from topograd.nn.pooling import pool
    from topograd.nn.preparation import prepare
    from topograd.nn.spec import MODELS, ModelSpec
    from topograd.nn.stack import LayerContext, Stack
    from topograd.pretrained import REFERENCE
    from topograd.runs.config import OptimizerConfig, TrainConfig, preset
    from topograd.runs.topology_config import TopologyConfig
    from topograd.search.properties import PROPERTIES
    from topograd.topology.composition import Composition
    from topograd.topology.configuration import Configuration
    from topograd.topology.dag import Edge, Stage, Topology
    from topograd.topology.plan import Plan
    from topograd.training.evaluation import Evaluation, evaluate
    from topograd.training.optimizers import OPTIMIZERS, make_optimizers
    from topograd.training.runs import resume, start
    from topograd.training.step_runner import StepRunner
    from topograd.training.trainer import Trainer

    __version__: str
else:
    _HOME = {
        "LayerContext": "nn.stack",
        "PathEnsemble": "decode.strategies",
        "Composition": "topology.composition",
        "Configuration": "topology.configuration",
        "DraftRule": "decode.drafters",
        "Edge": "topology.dag",
        "Engine": "decode.engine",
        "Evaluation": "training.evaluation",
        "GPT": "nn.gpt",
        "GPTConfig": "nn.config",
        "Head": "nn.heads",
        "HeadedStack": "nn.heads",
        "History": "nn.layer_state",
        "MIXERS": "nn.config",
        "MODELS": "nn.spec",
        "Model": "decode.model",
        "ModelSpec": "nn.spec",
        "OBJECTIVES": "exec.objectives",
        "OPTIMIZERS": "training.optimizers",
        "OptimizerConfig": "runs.config",
        "PROPERTIES": "search.properties",
        "REFERENCE": "pretrained",
        "Plan": "topology.plan",
        "Predictor": "exec.forward",
        "FixedDepth": "decode.strategies",
        "Sampling": "decode.sampling",
        "Speculate": "decode.speculation",
        "Stack": "nn.stack",
        "Stage": "topology.dag",
        "Text": "data.windows",
        "TopogradError": "errors",
        "Topology": "topology.dag",
        "TopologyConfig": "runs.topology_config",
        "TrainConfig": "runs.config",
        "Trainer": "training.trainer",
        "StepRunner": "training.step_runner",
        "Wand": "decode.wand",
        "adapt": "nn.adapted.adapt",
        "evaluate": "training.evaluation",
        "generate": "decode.model",
        "generate_tokens": "decode.strategies",
        "linear_cross_entropy": "exec.linear_cross_entropy",
        "load": "decode.model",
        "make_optimizers": "training.optimizers",
        "pool": "nn.pooling",
        "prepare": "nn.preparation",
        "preset": "runs.config",
        "resume": "training.runs",
        "score": "evaluation.texts",
        "stage_outputs": "exec.forward",
        "start": "training.runs",
        "train_step": "exec.train_step",
    }
    _FOLDERS = ("fields", "geometry", "interfaces", "optim", "specialists")

    def __getattr__(name: str) -> object:
        import importlib
        import importlib.metadata

        if name == "__version__":
            value = importlib.metadata.version(__name__)
        elif name in _HOME:
            value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        elif name in _FOLDERS:
            value = importlib.import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


__all__ = [
    "GPT",
    "MIXERS",
    "MODELS",
    "OBJECTIVES",
    "OPTIMIZERS",
    "PROPERTIES",
    "REFERENCE",
    "Composition",
    "Configuration",
    "DraftRule",
    "Edge",
    "Engine",
    "Evaluation",
    "FixedDepth",
    "GPTConfig",
    "Head",
    "HeadedStack",
    "History",
    "LayerContext",
    "Model",
    "ModelSpec",
    "OptimizerConfig",
    "PathEnsemble",
    "Plan",
    "Predictor",
    "Sampling",
    "Speculate",
    "Stack",
    "Stage",
    "StepRunner",
    "Text",
    "TopogradError",
    "Topology",
    "TopologyConfig",
    "TrainConfig",
    "Trainer",
    "Wand",
    "__version__",
    "adapt",
    "evaluate",
    "fields",
    "generate",
    "generate_tokens",
    "geometry",
    "interfaces",
    "linear_cross_entropy",
    "load",
    "make_optimizers",
    "optim",
    "pool",
    "prepare",
    "preset",
    "resume",
    "score",
    "specialists",
    "stage_outputs",
    "start",
    "train_step",
]


def __dir__() -> list[str]:
    return __all__
