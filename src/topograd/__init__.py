"""topograd: design and read a network's gradient, where it may flow and the ground that it flows over.

    import topograd as tg

    stack = tg.GPT(layers=6, width=96, heads=3, vocab=1024, context=128)
    topology = tg.Topology.chain(tg.Configuration.parse("2,2,2"))
    losses = tg.train_step(stack, topology, inputs, targets)      # every .grad is filled

A name is imported when it is first used, so that what needs no torch does not wait for it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topograd import fields, geometry, interfaces, optim
    from topograd.depth.autotune import DraftRule
    from topograd.depth.engine import Composed, Engine, Prefix, generate_tokens
    from topograd.depth.sampling import Sampling
    from topograd.depth.speculation import Speculate
    from topograd.depth.wand import Wand
    from topograd.errors import TopogradError
    from topograd.nn.adapt import adapt
    from topograd.nn.gpt import GPT, GPTConfig
    from topograd.nn.pooling import pool
    from topograd.nn.stack import Bus, Stack
    from topograd.topology.composition import Composition
    from topograd.topology.configuration import Configuration
    from topograd.topology.dag import Edge, Stage, Topology
    from topograd.topology.plan import Plan
    from topograd.training.evaluation import evaluate
    from topograd.training.executor import prepare, train_step
    from topograd.training.linear_cross_entropy import linear_cross_entropy

    __version__: str
else:
    _HOME = {
        "Bus": "nn.stack",
        "Composed": "depth.engine",
        "Composition": "topology.composition",
        "Configuration": "topology.configuration",
        "DraftRule": "depth.autotune",
        "Edge": "topology.dag",
        "Engine": "depth.engine",
        "GPT": "nn.gpt",
        "GPTConfig": "nn.gpt",
        "Plan": "topology.plan",
        "Prefix": "depth.engine",
        "Sampling": "depth.sampling",
        "Speculate": "depth.speculation",
        "Stack": "nn.stack",
        "Stage": "topology.dag",
        "TopogradError": "errors",
        "Topology": "topology.dag",
        "Wand": "depth.wand",
        "adapt": "nn.adapt",
        "evaluate": "training.evaluation",
        "linear_cross_entropy": "training.linear_cross_entropy",
        "pool": "nn.pooling",
        "prepare": "training.executor",
        "train_step": "training.executor",
        "generate_tokens": "depth.engine",
    }
    _FOLDERS = ("fields", "geometry", "interfaces", "optim")

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
    "Bus",
    "Composed",
    "Composition",
    "Configuration",
    "DraftRule",
    "Edge",
    "Engine",
    "GPTConfig",
    "Plan",
    "Prefix",
    "Sampling",
    "Speculate",
    "Stack",
    "Stage",
    "TopogradError",
    "Topology",
    "Wand",
    "__version__",
    "adapt",
    "evaluate",
    "fields",
    "generate_tokens",
    "geometry",
    "interfaces",
    "linear_cross_entropy",
    "optim",
    "pool",
    "prepare",
    "train_step",
]


def __dir__() -> list[str]:
    return __all__
