"""A run's model written for others: a folder that transformers loads, or a GGUF file that llama.cpp reads.

    hf      config.json, model.safetensors (tied weights once), tokenizer.json, tokenizer_config.json
    gguf    model.gguf: weights as F32, F16 or Q8_0, sizes and tokenizer in its metadata
    both    README.md, a card: what it is, bits per byte by prefix, the licence to look up

What is written is the plain model: all layers in order, the shared head. Stages are a way of training and of
leaving early that these formats do not know; heads and relays of a run's own cannot be written, and are
refused. Limits: families that were imported; our own GPT has no counterpart there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from topograd.data.foreign_tokenizer import ForeignTokenizer
from topograd.errors import ConfigError, RunError
from topograd.files import dump_json, write_atomic
from topograd.models.families import hugging_face_config
from topograd.models.tensor_names import tensor_names
from topograd.nn.transformer import Transformer
from topograd.runs.session import Session, open_session

FORMATS = ("hf", "gguf")


def export_model(folder: Path | str, out: Path | str, format_: str, kind: str = "F32") -> dict[str, Any]:
    """Write the model of the run in `folder` to the new folder `out`, and say what was written."""
    out = Path(out)
    if format_ not in FORMATS:
        raise ConfigError(f"format {format_!r} is unknown; choose one of {', '.join(FORMATS)}")
    if out.exists():
        raise RunError(f"{out} exists already; export to another folder, or delete it")
    session = open_session(folder)
    stack, tokenizer = _plain(session)
    temporary = out.with_name(f".{out.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        if format_ == "hf":
            _write_folder(temporary, stack, tokenizer)
        else:
            _write_gguf(temporary / "model.gguf", stack, tokenizer, kind, out.name)
        write_atomic(temporary / "README.md", card(session, out.name))
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    files = sorted(path.name for path in out.iterdir())
    return {"run": str(session.run.folder), "format": format_, "out": str(out), "files": files}


def _plain(session: Session) -> tuple[Transformer, ForeignTokenizer]:
    """The model and the tokenizer, if others know their like."""
    stack, tokenizer, where = session.stack, session.tokenizer, session.run.folder
    if not isinstance(stack, Transformer) or not isinstance(tokenizer, ForeignTokenizer):
        raise ConfigError(
            f"{where} is a model of our own kind, which no other program knows; only imported models are "
            "exported: keep the run's folder"
        )
    if len(stack.head.deltas) or stack.own_relays() or session.plan.prediction.kind != "last":
        raise ConfigError(
            f"{where} has heads or relays of its own, or predicts by several stages, which these formats "
            "cannot say; keep the run's folder"
        )
    return stack, tokenizer


def _tensors(stack: Transformer, naming: Any) -> dict[str, Tensor]:
    """The model's tensors under the names of others, a tied one once."""
    own = dict(stack.named_parameters())
    return {
        there.name: (own[name] if there.write is None else there.write(own[name])).detach().contiguous()
        for name, there in tensor_names(stack.config, naming).items()
    }


def _write_folder(folder: Path, stack: Transformer, tokenizer: ForeignTokenizer) -> None:
    settings = hugging_face_config(stack.config)
    for role in ("bos", "eos", "pad"):
        settings[f"{role}_token_id"] = tokenizer.special(role)
    save_file(_tensors(stack, "hugging-face"), folder / "model.safetensors", metadata={"format": "pt"})
    write_atomic(folder / "config.json", dump_json(settings, indent=2) + "\n")
    tokenizer.save(folder / "tokenizer.json")


def _write_gguf(file: Path, stack: Transformer, tokenizer: ForeignTokenizer, kind: str, name: str) -> None:
    from topograd.models.gguf_file import write_gguf

    metadata = {**gguf_metadata(stack, name), **gguf_tokenizer(tokenizer, stack.config.vocab)}
    write_gguf(file, metadata, _tensors(stack, "gguf"), kind)


def gguf_metadata(stack: Transformer, name: str) -> dict[str, Any]:
    """The sizes of a model in GGUF's words."""
    config = stack.config
    if config.family not in ("llama", "mistral", "qwen2", "qwen3") or config.rope_scaling != "none":
        raise ConfigError(
            f"a {config.family} with rope scaling {config.rope_scaling} is not written as GGUF; use format hf"
        )
    family = "llama" if config.family == "mistral" else config.family
    sizes = {
        "context_length": config.context,
        "embedding_length": config.width,
        "block_count": config.layers,
        "feed_forward_length": config.mlp_width,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_width,
        "attention.value_length": config.head_width,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope_base,
        "rope.dimension_count": config.head_width,
        "vocab_size": config.vocab,
    }
    return {"general.architecture": family, "general.name": name} | {
        f"{family}.{key}": value for key, value in sizes.items()
    }


def gguf_tokenizer(tokenizer: ForeignTokenizer, vocab: int) -> dict[str, Any]:
    """A byte-level tokenizer in GGUF's words; rows of the head that no token has are named as unused."""
    content = json.loads(tokenizer.to_text())
    model, added = content["model"], content.get("added_tokens", [])
    if model.get("type", "BPE") != "BPE" or "ByteLevel" not in json.dumps(content.get("decoder")):
        raise ConfigError("only byte-level BPE tokenizers are written as GGUF; use format hf")
    names = {index: token for token, index in model["vocab"].items()}
    names |= {token["id"]: token["content"] for token in added}
    tokens = [names.get(index, f"[unused{index}]") for index in range(vocab)]
    special = {token["id"] for token in added if token.get("special")}
    given = {token["id"] for token in added}
    kinds = [3 if i in special else 4 if i in given else 1 if i in names else 5 for i in range(vocab)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _split_name(content),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        index = tokenizer.special(role)
        if index is not None:
            found[f"tokenizer.ggml.{key}_token_id"] = index
    template = tokenizer.config.get("chat_template")
    return found | ({"tokenizer.chat_template": template} if isinstance(template, str) else {})


def _split_name(content: Mapping[str, Any]) -> str:
    """What GGUF calls the way in which a text is split before merging."""
    text = json.dumps(content.get("pre_tokenizer"))
    if "\\\\p{N}{1,3}" in text:
        return "llama-bpe"
    if "\\\\p{L}" in text:
        return "qwen2"
    return "smollm" if "Digits" in text else "gpt-2"


def card(session: Session, name: str) -> str:
    """A model card: what the model is, and what was measured of it here."""
    config, shape = session.config, session.config.imported
    results = session.run.read_results()
    lines = [f"# {name}", "", f"A {shape.family if shape else 'GPT'} of {config.model.layers} layers, width "]
    lines[-1] += f"{config.model.width}, vocabulary {config.model.vocab}, exported by topograd."
    if config.init is not None:
        lines.append(f"It was trained on from another model, in stages {config.topology.partition}.")
    lines += [
        "",
        "Its licence is that of the model it comes from: look it up before you pass it on.",
        "",
    ]
    if results is not None and "bpb" in results:
        lines += ["| prediction | bits per byte |", "|---|---|"]
        for k, value in enumerate(results["bpb"]["prefix"], 1):
            lines.append(f"| first {k} of {len(results['bpb']['prefix'])} stages | {value:.4f} |")
    return "\n".join(lines) + "\n"
