"""Architectures without a native stack: transformers' own module becomes a run, by `nn.adapt`.

    config.json      kept as text in the run's settings; no code of the folder is run
    *.safetensors    read by transformers and copied into the run, as float32

Where layers, last norm and head lie is found by looking: the list of as many modules as the config has
layers, the output embedding, and the module behind the list that its parent calls a norm. `Adapted.verify`
then runs the whole model on some tokens and compares: what is no stack is refused, not adapted wrongly.

Cost: generation runs the whole prefix again for each token, since such layers keep no memory. Limits: needs
the extra `hf`; models that do something to their logits, or between layers, are refused.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from topograd.convert.huggingface import load
from topograd.errors import CheckpointError, StackError
from topograd.nn.adapted.adapt import Adapted
from topograd.nn.adapted.build import build_adapted, require_transformers
from topograd.nn.adapted.spec import AdaptedConfig

CONTEXT = 2048
"""Positions of a model that does not say how many it sees."""
_NORMS = ("norm", "ln_f", "layernorm", "layer_norm")


def adapt_folder(folder: Path, settings: dict[str, Any]) -> tuple[AdaptedConfig, Adapted]:
    """The model of a folder as a stack with its weights, and what a run says of it."""
    require_transformers(str(settings.get("model_type")))
    loaded = load(folder)
    if not loaded.causal:
        raise CheckpointError(
            f"{folder} is a {settings.get('model_type')} that does not predict the next token",
            remedy="only causal language models can be imported",
        )
    if loaded.fresh:
        raise CheckpointError(f"tensor {loaded.fresh[0]!r} is missing", remedy="the model needs it")
    theirs = loaded.model.float()
    layers = _layers(theirs, loaded.config)
    found = AdaptedConfig(
        settings=json.dumps(settings),
        list=layers,
        head=_head(theirs),
        norm=_norm(theirs, layers),
        layers=int(loaded.config.num_hidden_layers),
        width=int(loaded.config.hidden_size),
        vocab=int(loaded.config.vocab_size),
        context=int(getattr(loaded.config, "max_position_embeddings", None) or CONTEXT),
    )
    stack = build_adapted(found)
    stack.model.load_state_dict(theirs.state_dict())
    try:
        stack.verify(torch.arange(12).remainder(found.vocab)[None])
    except StackError as problem:
        raise CheckpointError(f"{folder} cannot be adapted: {problem}") from None
    return found, stack


def _layers(model: nn.Module, config: Any) -> str:
    """The path of the one list of as many modules as there are layers."""
    count = getattr(config, "num_hidden_layers", None)
    modules = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    lists = [name for name, module in modules if count and len(module) == count]
    tops = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if len(tops) != 1:
        problem = f"a {type(model).__name__} has {len(tops)} lists of {count} layers"
        raise CheckpointError(problem, remedy="write a Stack for it")
    return tops[0]


def _head(model: nn.Module) -> str:
    find: Any = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    place = next((name for name, m in model.named_modules() if head is not None and m is head), None)
    if place is None:
        problem = f"a {type(model).__name__} does not say where its head is"
        raise CheckpointError(problem, remedy="write a Stack for it")
    return place


def _norm(model: nn.Module, layers: str) -> str | None:
    """The last norm beside the layers: the last child of their parent that is called one."""
    place, _, own = layers.rpartition(".")
    found = None
    behind = False
    for name, _module in model.get_submodule(place).named_children():
        behind = behind or name == own
        if behind and any(word in name.lower() for word in _NORMS):
            found = f"{place}.{name}" if place else name
    return found
