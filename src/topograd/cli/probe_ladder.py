"""`topograd probe ladder`: a unit of a model is frozen, and exponents are measured beside predicted ones."""

from __future__ import annotations

import inspect
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from topograd.cli.console import DASH, Json, OptionalModel, grid, parse, show
from topograd.errors import ConfigError
from topograd.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from topograd.geometry.freeze_probe import Exponent

ROWS, TOKENS = 2, 12
"""Of the text, or of random ids, that exponents are read on."""
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "max_position_embeddings": 32,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
    "image_size": 32,
    "patch_size": 8,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
"""Settings of a small model, by their names in transformers; a class has some of them."""


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Freeze-probe: the weights of one unit go to zero with t, and every layer that it touches has second
    moments of inputs and gradients that are powers of t. Predicted powers follow from the model's operators.

    The model is MODEL, or a module of Python's by --module."""

    model: OptionalModel = None
    unit: str
    """PATH.NUMBER, several with commas between: a channel of a map (q_proj.3), a head of an attention
    (self_attn.1), a unit of an mlp (mlp.0); PATH is a module's name or its last parts, in every block."""
    module: Annotated[str | None, tyro.conf.arg(metavar="PACKAGE:NAME")] = None
    """A module, a class of transformers (with --tiny), or a function without arguments that makes one."""
    tiny: tyro.conf.FlagCreatePairsOff[bool] = False
    """Make the class of transformers small, with random weights."""
    shape: Annotated[str | None, tyro.conf.arg(metavar="4,16")] = None
    """Of random inputs, for a --module that is not of transformers."""
    json: Json = False


def run(argv: list[str]) -> int:
    args = parse(Ladder, argv, "probe ladder")
    if args.model is not None and args.module is not None:
        raise ConfigError("MODEL and --module are given", setting="module", remedy="give one of them")
    from topograd.geometry.freeze_probe import freeze_probe

    model, inputs, outputs = _own_module(args) if args.module is not None else _stored_model(args)
    found = freeze_probe(model, inputs, args.unit, outputs=outputs)
    layers = [
        {
            "name": one.name,
            **asdict(one.whole),
            "inputs": None if one.inputs is None else asdict(one.inputs),
            "gradients": None if one.gradients is None else asdict(one.gradients),
        }
        for one in found
    ]
    table = grid(f"{args.unit}: powers of t, predicted and measured", "layer", "inputs", "gradients", "both")
    for layer in found:
        table.add_row(layer.name, *map(_words, (layer.inputs, layer.gradients, layer.whole)))
    answer = {"model": args.module or str(args.model), "unit": args.unit, "layers": layers}
    show(args.json, answer, lambda _: table)
    return 0


def _words(one: Exponent | None) -> str:
    if one is None:
        return DASH
    pair = (one.predicted, one.measured)
    return " / ".join(DASH if power is None else f"{power:.2f}" for power in pair)


def _stored_model(args: Ladder) -> tuple[nn.Module, Tensor, Callable[[Any, Any], Tensor] | None]:
    """A run or a Hugging Face folder, with the first positions of its text."""
    from topograd.cli.probe_model import open_probe
    from topograd.pretrained import REFERENCE

    if args.tiny or args.shape:
        raise ConfigError("--tiny and --shape are for --module", setting="module", remedy="leave them out")
    probe = open_probe(args.model or REFERENCE, None, None, "float64")
    return probe.model, probe.batches[0][0][:ROWS, :TOKENS], probe.outputs


def _own_module(args: Ladder) -> tuple[nn.Module, Any, None]:
    import torch
    from torch import nn

    assert args.module is not None
    found = Registry[Any]("module")[args.module]
    torch.manual_seed(0)
    settings = getattr(found, "config_class", None)
    if inspect.isclass(found) and settings is not None:
        if not args.tiny:
            raise ConfigError(
                f"{args.module} has no weights of its own", setting="tiny", remedy="add --tiny, or give MODEL"
            )
        return _tiny(found, settings)
    model = found if isinstance(found, nn.Module) else found() if callable(found) else None
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{args.module} is no module and makes none",
            setting="module",
            given=args.module,
            allowed="a torch.nn.Module, a function that makes one, or a class of transformers",
        )
    if args.shape is None or not all(part.isdecimal() and int(part) for part in args.shape.split(",")):
        raise ConfigError(
            f"--shape is {args.shape or 'not given'}",
            setting="shape",
            given=args.shape,
            allowed="whole numbers with commas between, as 4,16",
        )
    inputs = torch.randn([int(part) for part in args.shape.split(",")], dtype=torch.float64)
    return model.eval(), inputs, None


def _tiny(kind: Any, settings: Any) -> tuple[nn.Module, Any, None]:
    """A small model of a class of transformers, and random ids or images."""
    import torch

    known = {*inspect.signature(settings).parameters, *getattr(settings, "attribute_map", {})}
    config = settings(**{name: value for name, value in TINY.items() if name in known})
    config.use_cache = False
    model = kind(config).eval()
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        size = getattr(config, "image_size", None) or TINY["image_size"]
        return (
            model,
            {"pixel_values": torch.randn(ROWS, getattr(config, "num_channels", 3), size, size)},
            None,
        )
    inputs = {"input_ids": torch.randint(TINY["vocab_size"], (ROWS, TOKENS))}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = torch.randint(TINY["vocab_size"], (ROWS, TOKENS // 2))
    return model, inputs, None
