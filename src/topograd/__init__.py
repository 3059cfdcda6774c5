"""topograd: training with a chosen backward graph, early-exit decoding, and Fisher geometry.

    import topograd as tg

    stack = tg.GPT(layers=6, width=96, heads=3, vocab=1024, context=128)
    losses = tg.train_step(stack, "2,2,2", inputs, targets)      # every .grad is filled, stage by stage

    model = tg.load("runs/mine")                                 # a run of `topograd train`
    model.generate("def ", tokens=8)
    tg.score(model, "The capital of France is", " Paris")        # at every depth, token by token

A name is imported at its first use, so that code without torch starts fast.
"""

from typing import TYPE_CHECKING

from topograd.plugins import ENTRIES as registry_entries  # noqa: F401  read by `registry.py`

if TYPE_CHECKING:
    from topograd import fields as fields
    from topograd import geometry as geometry
    from topograd import interfaces as interfaces
    from topograd import optim as optim
    from topograd import specialists as specialists
    from topograd.convert.peft_training import held_peft_model as held_peft_model
    from topograd.data.windows import Text as Text
    from topograd.decode.drafters import DraftRule as DraftRule
    from topograd.decode.engine import Engine as Engine
    from topograd.decode.model import Model as Model
    from topograd.decode.model import generate as generate
    from topograd.decode.model import load as load
    from topograd.decode.sampling import Sampling as Sampling
    from topograd.decode.speculation import Speculate as Speculate
    from topograd.decode.strategies import FixedDepth as FixedDepth
    from topograd.decode.strategies import PathEnsemble as PathEnsemble
    from topograd.decode.strategies import generate_tokens as generate_tokens
    from topograd.decode.wand import Wand as Wand
    from topograd.errors import TopogradError as TopogradError
    from topograd.evaluation.texts import score as score
    from topograd.exec.forward import Predictor as Predictor
    from topograd.exec.forward import stage_outputs as stage_outputs
    from topograd.exec.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from topograd.exec.objectives import OBJECTIVES as OBJECTIVES
    from topograd.exec.train_step import train_step as train_step
    from topograd.nn.adapted.adapt import adapt as adapt
    from topograd.nn.config import MIXERS as MIXERS
    from topograd.nn.config import GPTConfig as GPTConfig
    from topograd.nn.gpt import GPT as GPT
    from topograd.nn.heads import Head as Head
    from topograd.nn.heads import HeadedStack as HeadedStack
    from topograd.nn.layer_state import History as History
    from topograd.nn.pooling import pool as pool
    from topograd.nn.preparation import prepare as prepare
    from topograd.nn.spec import MODELS as MODELS
    from topograd.nn.spec import ModelSpec as ModelSpec
    from topograd.nn.stack import LayerContext as LayerContext
    from topograd.nn.stack import Stack as Stack
    from topograd.pretrained import REFERENCE as REFERENCE
    from topograd.runs.config import OptimizerConfig as OptimizerConfig
    from topograd.runs.config import TrainConfig as TrainConfig
    from topograd.runs.config import preset as preset
    from topograd.runs.topology_config import TopologyConfig as TopologyConfig
    from topograd.search.properties import PROPERTIES as PROPERTIES
    from topograd.topology.composition import Composition as Composition
    from topograd.topology.configuration import Configuration as Configuration
    from topograd.topology.dag import Edge as Edge
    from topograd.topology.dag import Stage as Stage
    from topograd.topology.dag import Topology as Topology
    from topograd.topology.plan import Plan as Plan
    from topograd.training.evaluation import Evaluation as Evaluation
    from topograd.training.evaluation import evaluate as evaluate
    from topograd.training.optimizers import OPTIMIZERS as OPTIMIZERS
    from topograd.training.optimizers import make_optimizers as make_optimizers
    from topograd.training.runs import resume as resume
    from topograd.training.runs import start as start
    from topograd.training.step_runner import StepRunner as StepRunner
    from topograd.training.trainer import Trainer as Trainer

    __version__: str
    __all__: list[str]
else:
    _NAMES = {
        "convert.peft_training": "held_peft_model",
        "data.windows": "Text",
        "decode.drafters": "DraftRule",
        "decode.engine": "Engine",
        "decode.model": "Model generate load",
        "decode.sampling": "Sampling",
        "decode.speculation": "Speculate",
        "decode.strategies": "FixedDepth PathEnsemble generate_tokens",
        "decode.wand": "Wand",
        "errors": "TopogradError",
        "evaluation.texts": "score",
        "exec.forward": "Predictor stage_outputs",
        "exec.linear_cross_entropy": "linear_cross_entropy",
        "exec.objectives": "OBJECTIVES",
        "exec.train_step": "train_step",
        "nn.adapted.adapt": "adapt",
        "nn.config": "GPTConfig MIXERS",
        "nn.gpt": "GPT",
        "nn.heads": "Head HeadedStack",
        "nn.layer_state": "History",
        "nn.pooling": "pool",
        "nn.preparation": "prepare",
        "nn.spec": "MODELS ModelSpec",
        "nn.stack": "LayerContext Stack",
        "pretrained": "REFERENCE",
        "runs.config": "OptimizerConfig TrainConfig preset",
        "runs.topology_config": "TopologyConfig",
        "search.properties": "PROPERTIES",
        "topology.composition": "Composition",
        "topology.configuration": "Configuration",
        "topology.dag": "Edge Stage Topology",
        "topology.plan": "Plan",
        "training.evaluation": "Evaluation evaluate",
        "training.optimizers": "OPTIMIZERS make_optimizers",
        "training.runs": "resume start",
        "training.step_runner": "StepRunner",
        "training.trainer": "Trainer",
    }
    """Names by the module that has them."""
    _HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
    _FOLDERS = ("fields", "geometry", "interfaces", "optim", "specialists")
    __all__ = sorted((*_HOME, *_FOLDERS, "__version__"))

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


def __dir__() -> list[str]:
    return __all__
