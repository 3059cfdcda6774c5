"""The families of published transformers: their settings, and their weights in our stack.

`config_of` reads Hugging Face's config.json, `hugging_face_config` writes it. `load_tensors` fills a stack
that was built on the meta device by assignment, so that a tensor that is already what it should be is not
copied; `tensor_names.py` says what they are called. `stack_of` makes a stack of a model of transformers.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, get_args

import torch
from torch import Tensor, nn

from topograd.convert.tensor_names import Naming, Source, renamed, tensor_names
from topograd.errors import CheckpointError, ConfigError, StackError
from topograd.nn.transformer.config import Activation, TransformerConfig
from topograd.nn.transformer.stack import Transformer

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GPT2LMHeadModel": "gpt2",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
}
"""The classes of transformers that are read, and their `model_type`."""
_GPT2_KEYS = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
"""What GPT-2's config calls sizes."""
_HEAD_WIDTHS = {"qwen3": 128, "gemma": 256, "gemma2": 256, "gemma3_text": 256}
"""Head widths where the config says none; elsewhere they fill the width."""


def config_of(settings: Mapping[str, Any]) -> TransformerConfig:
    """Our settings from those of a config.json; what is not supported raises ConfigError."""
    family = _family(settings)
    try:
        return TransformerConfig(**_fields(_Settings(settings, family), family))
    except StackError as error:
        raise ConfigError(f"the model's config does not fit: {error}") from None


def is_native(settings: Mapping[str, Any]) -> bool:
    """Whether the architecture has a stack here; an encoder with a decoder counts, and is refused there."""
    kind = settings.get("model_type")
    return kind in ARCHITECTURES.values() or bool(settings.get("is_encoder_decoder")) or not kind


def _family(settings: Mapping[str, Any]) -> str:
    kind, classes = settings.get("model_type"), settings.get("architectures") or []
    if not isinstance(classes, list | tuple):
        raise _of_no_use("architectures", classes, "a list of names")
    supported = "supported are " + ", ".join(sorted(ARCHITECTURES.values()))
    if settings.get("is_encoder_decoder"):
        problem = f"{kind} is an encoder and a decoder"
        raise ConfigError(problem, remedy=f"only decoders can be imported: {supported}")
    if kind not in ARCHITECTURES.values():
        problem = f"architecture {classes[0] if classes else kind!r} is not supported"
        raise ConfigError(problem, remedy=supported)
    for name in classes:
        if not isinstance(name, str) or ARCHITECTURES.get(name) != kind:
            expected = next(one for one, of in ARCHITECTURES.items() if of == kind)
            problem = f"architecture {name!r} is not supported"
            raise ConfigError(problem, remedy=f"of {kind} only {expected} is")
    refused = {
        "quantization_config": "quantized weights",
        "num_experts": "a mixture of experts",
        "num_local_experts": "a mixture of experts",
        "add_cross_attention": "cross attention",
        "use_bidirectional_attention": "attention to later tokens",
        "scale_attn_by_inverse_layer_idx": "attention scaled by layer",
    }
    for name, what in refused.items():
        if settings.get(name):
            raise ConfigError(f"the model has {what} ({name}), which is not supported")
    if settings.get("scale_attn_weights") is False:
        raise ConfigError("the model's attention is not scaled (scale_attn_weights), which is not supported")
    return str(kind)


class _Settings:
    """A config.json, read with one clear line for what is missing or of the wrong type."""

    def __init__(self, settings: Mapping[str, Any], family: str) -> None:
        self.settings, self.family = settings, family

    def get(self, name: str, default: Any = None) -> Any:
        own = _GPT2_KEYS.get(name, name) if self.family == "gpt2" else name
        value = self.settings.get(own)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = self.get(name, default)
        if type(value) is not int or value < 1:
            raise _of_no_use(name, value, "a whole number above 0")
        return value

    def number(self, name: str, default: float | None = None, of: Mapping[str, Any] | None = None) -> float:
        """A finite number."""
        value = self.get(name, default) if of is None else of.get(name, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise _of_no_use(name, value, "a finite number")
        return float(value)

    def optional(self, name: str) -> float | None:
        """A finite number or None."""
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise _of_no_use(name, value, "true or false")
        return value


def _of_no_use(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"the model's config has {name} {value!r}", allowed=allowed)


def _fields(given: _Settings, family: str) -> dict[str, Any]:
    """The settings of a TransformerConfig."""
    gemma, gpt2 = family.startswith("gemma"), family == "gpt2"
    width, heads, layers = (
        given.size(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    if family not in _HEAD_WIDTHS and given.get("head_dim") is None and width % heads:
        raise ConfigError(f"the model's config has hidden_size {width}, no multiple of its {heads} heads")
    alike = family in ("llama", "gpt2")
    biased = gpt2 or ((family in ("llama", "qwen3") or gemma) and given.flag("attention_bias", False))
    fields: dict[str, Any] = {
        "family": family,
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": heads if gpt2 else given.size("num_key_value_heads", heads if alike else None),
        "head_width": given.size("head_dim", _HEAD_WIDTHS.get(family, width // heads)),
        "mlp_width": given.size("n_inner", 4 * width) if gpt2 else given.size("intermediate_size"),
        "vocab": given.size("vocab_size"),
        "context": given.size("max_position_embeddings"),
        "norm_eps": given.number("layer_norm_epsilon", 1e-5) if gpt2 else given.number("rms_norm_eps", 1e-6),
        "qkv_bias": biased or family == "qwen2",
        "output_bias": biased,
        "mlp_bias": gpt2 or (family == "llama" and given.flag("mlp_bias", False)),
        "qk_norm": family in ("qwen3", "gemma3_text"),
        "tied": given.flag("tie_word_embeddings", gemma or gpt2),
        "activation": _activation(given, family),
        "windows": _windows(given, family, layers),
    }
    if not gpt2:
        fields |= _rope(given, family, fields["context"])
    if family in ("gemma2", "gemma3_text"):
        fields["query_scalar"] = given.size("query_pre_attn_scalar", 256)
        settings = given.settings
        capped = family == "gemma2" and "final_logit_softcapping" not in settings
        fields["softcap"] = 30.0 if capped else given.optional("final_logit_softcapping")
        capped = family == "gemma2" and "attn_logit_softcapping" not in settings
        fields["attention_softcap"] = 50.0 if capped else given.optional("attn_logit_softcapping")
        if family == "gemma3_text" and fields["attention_softcap"] is not None:
            raise ConfigError("the model has attn_logit_softcapping, which gemma3_text does not support")
    return fields


def _activation(given: _Settings, family: str) -> str:
    names = {"gpt2": "activation_function", "gemma2": "hidden_activation", "gemma3_text": "hidden_activation"}
    name = names.get(family, "hidden_act")
    usual = "gelu_new" if family == "gpt2" else "gelu_pytorch_tanh" if family.startswith("gemma") else "silu"
    found = given.get(name, usual)
    found = "silu" if found == "swish" else found
    if family == "gemma" and found == "gelu":  # what its first configs said, and did not mean
        found = "gelu_pytorch_tanh"
    if found not in get_args(Activation):
        problem = f"{name} {found!r} is not supported"
        raise ConfigError(problem, remedy=f"supported are {', '.join(get_args(Activation))}")
    return str(found)


def _windows(given: _Settings, family: str, layers: int) -> tuple[int, ...]:
    """The attention span of each layer; nothing where all see everything."""
    kinds = given.get("layer_types")
    if family in ("llama", "gemma", "gpt2", "mistral"):
        usual = "sliding_attention" if family == "mistral" else "full_attention"
        window = given.settings.get("sliding_window", 4096) if family == "mistral" else None
        if kinds is not None and any(kind != usual for kind in kinds) and family != "gpt2":
            raise ConfigError(f"layer_types {_others(kinds, usual)} are not supported for {family}")
        return () if window is None else (given.size("sliding_window", 4096),)
    if family in ("qwen2", "qwen3"):
        sliding = given.flag("use_sliding_window", False)
        first = given.get("max_window_layers", 28) if sliding else layers
        default = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    else:
        pattern = 2 if family == "gemma2" else given.size("sliding_window_pattern", 6)
        default = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    kinds = default if kinds is None else kinds
    if not isinstance(kinds, list | tuple) or len(kinds) != layers:
        raise _of_no_use("layer_types", kinds, "a list, one for each layer")
    known = ("full_attention", "sliding_attention")
    if any(kind not in known for kind in kinds):
        problem = f"layer_types {_others(kinds, *known)} are not supported"
        raise ConfigError(problem, remedy=f"known are {known}")
    if "sliding_attention" not in kinds:
        return ()
    if family in ("qwen2", "qwen3") and not given.flag("use_sliding_window", False):
        problem = "layer_types has sliding_attention and use_sliding_window is false"
        raise ConfigError(problem, remedy="make them agree")
    window = given.size("sliding_window", 4096)
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _others(kinds: Any, *known: str) -> str:
    found = kinds if isinstance(kinds, list | tuple) else [kinds]
    return ", ".join(sorted({repr(kind) for kind in found if kind not in known}))


def _rope(given: _Settings, family: str, context: int) -> dict[str, Any]:
    """Base and scaling of the rotary frequencies, in the format of transformers 5 or the one before."""
    new, fields = given.get("rope_parameters"), {}
    local: Mapping[str, Any] = {}
    if family == "gemma3_text":
        both = new or {}
        new, local = both.get("full_attention"), both.get("sliding_attention") or {}
        base = given.number("rope_local_base_freq", 10_000.0)
        fields["local_rope_base"] = given.number("rope_theta", base, of=local)
        if local.get("rope_type", "default") != "default":
            raise ConfigError(f"rope scaling {local['rope_type']!r} of layers with a window is not supported")
    found = new if new is not None else given.get("rope_scaling", {})
    if not isinstance(found, Mapping):
        raise _of_no_use("rope_scaling", found, "a table")
    usual = given.number("rope_theta", 1e6 if family == "gemma3_text" else 1e4)
    fields["rope_base"] = given.number("rope_theta", usual, of=found)
    kind = found.get("rope_type", found.get("type", "default"))
    partial = found.get("partial_rotary_factor", given.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        problem = f"partial_rotary_factor {partial} is not supported"
        raise ConfigError(problem, remedy="all of a head must be rotated")
    if kind == "default":
        return fields
    if kind not in ("linear", "llama3"):
        problem = f"rope scaling {kind!r} is not supported"
        raise ConfigError(problem, remedy="supported are default, linear, llama3")
    fields |= {"rope_scaling": kind, "rope_factor": given.number("factor", of=found)}
    if kind == "llama3":
        fields["rope_low_factor"] = given.number("low_freq_factor", of=found)
        fields["rope_high_factor"] = given.number("high_freq_factor", of=found)
        fields["rope_original_context"] = int(
            given.number("original_max_position_embeddings", context, of=found)
        )
    return fields


def hugging_face_config(config: TransformerConfig) -> dict[str, Any]:
    """A config.json that transformers builds the same model of, and `config_of` the same settings."""
    gpt2, family = config.family == "gpt2", config.family
    sizes = {
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "max_position_embeddings": config.positions,
    }
    table: dict[str, Any] = {
        "architectures": [next(name for name, of in ARCHITECTURES.items() if of == family)],
        "model_type": family,
        "vocab_size": config.vocab,
        "tie_word_embeddings": config.tied,
        "dtype": "float32",
    }
    if gpt2:
        table |= {_GPT2_KEYS[name]: size for name, size in sizes.items()}
        table |= {
            "n_inner": config.mlp_width,
            "activation_function": config.activation,
            "layer_norm_epsilon": config.norm_eps,
        }
        return table | dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    table |= sizes | {
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.mlp_width,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": _rope_table(config),
    }
    table["hidden_activation" if family in ("gemma2", "gemma3_text") else "hidden_act"] = config.activation
    if family in ("llama", "qwen3") or family.startswith("gemma"):
        table["attention_bias"] = config.output_bias
    if family == "llama":
        table["mlp_bias"] = config.mlp_bias
    spans = {config.window(index) for index in range(config.layers)} - {0}
    window = max(spans, default=None)
    if len(spans) > 1 or (spans and family in ("llama", "gemma")):
        raise ConfigError(f"windows {config.windows} cannot be written as a {family} of Hugging Face")
    if family == "mistral":
        table["sliding_window"] = window
    elif family not in ("llama", "gemma"):
        kinds = ["sliding_attention" if config.window(i) else "full_attention" for i in range(config.layers)]
        table["layer_types"] = kinds
        table |= {} if window is None else {"sliding_window": window}
        table |= {"use_sliding_window": window is not None} if family.startswith("qwen") else {}
    if family in ("gemma2", "gemma3_text"):
        table["query_pre_attn_scalar"] = config.query_scalar or config.head_width
        table["final_logit_softcapping"] = config.softcap
        table["attn_logit_softcapping"] = config.attention_softcap
    return table


def _rope_table(config: TransformerConfig) -> dict[str, Any]:
    table: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_base}
    if config.rope_scaling != "none":
        table |= {"rope_type": config.rope_scaling, "factor": config.rope_factor}
    if config.rope_scaling == "llama3":
        table |= {
            "low_freq_factor": config.rope_low_factor,
            "high_freq_factor": config.rope_high_factor,
            "original_max_position_embeddings": config.rope_original_context,
        }
    if config.family != "gemma3_text":
        return table
    local = {"rope_type": "default", "rope_theta": config.local_rope_base or config.rope_base}
    return {"full_attention": table, "sliding_attention": local}


def family_config(stack: Transformer) -> TransformerConfig:
    """The settings of a stack of a published family."""
    assert isinstance(stack.config, TransformerConfig), "a stack of a published family"
    return stack.config


def load_tensors(
    stack: Transformer,
    get: Callable[[str], Tensor],
    available: Iterable[str] | None = None,
    naming: Naming = "hugging-face",
) -> None:
    """Give `stack`, which may be on the meta device, the tensors that `get` finds by their name.

    `get` raises KeyError for a tensor that there is not. One of another floating type is converted to the
    stack's; others are refused. With the names of all that are `available`, those that the model does not
    have are refused; a head beside a tied embedding is left out, as transformers does.
    """
    available = None if available is None else set(available)
    config = family_config(stack)
    sources = tensor_names(config, naming, available or ())
    if available is not None:
        _refuse_others(sources, available, config, naming)
    for name, source in sources.items():
        path, _, leaf = name.rpartition(".")
        module = stack.get_submodule(path)
        value = _checked(get, source, module.get_parameter(leaf))
        setattr(module, leaf, value)
    if config.tied:
        stack.head.weight = stack.embedding.weight


def _checked(get: Callable[[str], Tensor], source: Source, wanted: nn.Parameter) -> nn.Parameter:
    """The tensor as a parameter in the place of `wanted`."""
    try:
        found = get(source.name)
    except KeyError:
        raise CheckpointError(f"tensor {source.name!r} is missing", remedy="the model needs it") from None
    if not found.is_floating_point():
        problem = f"tensor {source.name!r} has type {found.dtype}"
        raise CheckpointError(problem, remedy="it must be a floating one")
    like = torch.empty_like(wanted, device="meta")
    shape = (like if source.write is None else source.write(like)).shape
    if found.shape != shape:
        problem = f"tensor {source.name!r} has shape {tuple(found.shape)}"
        raise CheckpointError(problem, remedy=f"by the model's config it must have {tuple(shape)}")
    value = (found if source.read is None else source.read(found)).to(wanted.dtype)
    if isinstance(value, nn.Parameter):
        return value
    return nn.Parameter(value.detach(), requires_grad=wanted.requires_grad)


def _refuse_others(
    sources: Mapping[str, Source], available: Set[str], config: TransformerConfig, naming: Naming
) -> None:
    known = {source.name for source in sources.values()}
    if config.tied:
        known.add(renamed("head.weight", config, naming))
    ours = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # tables that old files carry along
    extra = sorted(name for name in available - known if not name.endswith(ours))
    if extra:
        more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
        raise CheckpointError(f"tensor {extra[0]!r}{more} is not part of this {config.family} model")


def stack_of(model: Any) -> Transformer:
    """A stack of a model of transformers, whose parameters it shares.

    For half precision give it the model in that precision; norms and rotations are computed in float32.
    """
    found: Any = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or not hasattr(found, "to_dict"):
        raise ConfigError(f"a {type(model).__name__} is not a model of transformers")
    config = config_of({**found.to_dict(), "architectures": [type(model).__name__]})
    for name, module in model.named_modules():
        _refuse_changed(name, module, config.norm_eps)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    like = next(iter(tensors.values()))
    with torch.device("meta"):
        stack = Transformer(config).to(like.dtype)
    load_tensors(stack, tensors.__getitem__, tensors)
    return stack.train(model.training)


def _refuse_changed(name: str, module: nn.Module, epsilon: float) -> None:
    """Raise ConfigError for a module that replaces one of transformers: it may compute something else."""
    if not type(module).__module__.startswith(("torch.nn.", "transformers.")):
        problem = f"{name} is a {type(module).__name__}, which is not of transformers"
        raise ConfigError(problem, remedy="merge adapters, undo quantization")
    found = getattr(module, "variance_epsilon", getattr(module, "eps", epsilon))
    if found != epsilon:
        raise ConfigError(f"{name} has ε {found} and the config {epsilon}", remedy="make them equal")
