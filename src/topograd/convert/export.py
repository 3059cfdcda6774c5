"""A run's model written for others: a folder that transformers loads, or a GGUF file that llama.cpp reads.

    hf      config.json, model.safetensors (tied weights once), tokenizer.json, tokenizer_config.json
    gguf    model.gguf: weights as F32, F16, Q8_0, Q4_1 or Q4_0, sizes and tokenizer in its metadata
    onnx    a graph for each stage and head, a manifest and a script (`onnx_export.py`)
    peft    what LoRA learned, without the base (`peft_adapter.py`)
    all     README.md, a card: what it is, its data, bits per byte by prefix, the licence of its base
    (hf, gguf) topograd/, an adapter with its own card: stages, exits, LoRA, calibration.json

What hf and gguf have is the plain model: all layers in order, the shared head, a LoRA merged. Stages are a
way of training and of leaving early that these formats do not know: what belongs to them goes into the
adapter (`runs/adapter.py`), where there is any. A last stage with a head of its own, relays, and predictions
by several stages cannot be written, and are refused. Specialists are adapters already. Limits: models that
were imported; our own GPT has no counterpart there. One that transformers runs here has hf and peft alone.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors.torch import save_file
from torch import Tensor

from topograd.convert.card import card
from topograd.convert.families import family_config, hugging_face_config
from topograd.convert.gguf_file import write_gguf
from topograd.convert.gguf_tokenizer import tokenizer_json
from topograd.convert.huggingface import quiet_transformers
from topograd.convert.model_argument import resolve_model
from topograd.convert.peft_adapter import write_peft
from topograd.convert.tensor_names import tensor_names
from topograd.data.hf_tokenizer import HFTokenizer
from topograd.data.tokenizer import FILE
from topograd.decode.retrofitted import exit_tensors, open_exits
from topograd.errors import ConfigError, RunError
from topograd.files import dump_json, saving_tensors, write_atomic
from topograd.nn.adapted.adapt import Adapted
from topograd.nn.stack import Stack
from topograd.nn.transformer.config import TRAITS
from topograd.nn.transformer.stack import Transformer
from topograd.runs.adapter import BaseIdentity, create_adapter
from topograd.runs.delta_store import DeltaStore
from topograd.runs.session import LoadedTextRun, open_session
from topograd.runtime.choice import installed

FORMATS = ("hf", "gguf", "onnx", "peft")
GGUF_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SAMPLE = "Hello  World's 12345 don't WE'LL\n\n\tdef f(x):  # Ünïcode 漢字 😀 e\u0301 3.14\r\n   end "
"""What a tokenizer must split alike before and behind an export: words, digits, spaces, marks."""


def export_model(model: Path | str, out: Path | str, format_: str, kind: str = "F32") -> dict[str, Any]:
    """Write a model to the new folder `out`, and say what was written."""
    out = Path(out)
    if format_ not in FORMATS:
        raise ConfigError(setting="format", given=format_, allowed=f"one of {', '.join(FORMATS)}")
    if out.exists():
        raise RunError(f"{out} exists already", remedy="export to another folder, or delete it")
    if format_ == "onnx" and not installed():
        remedy = "pip install onnx onnxruntime"
        raise ConfigError("format onnx needs onnx and onnxruntime", remedy=remedy)
    more: dict[str, Any] = {}
    temporary = out.with_name(f".{out.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        session = open_session(resolve_model(model))
        if format_ != "onnx":
            _check_plain(session, adapted=format_ != "gguf")
        if format_ == "peft":
            more = write_peft(temporary, session)
        elif format_ == "onnx":
            from topograd.convert.onnx_export import write_onnx

            write_onnx(temporary, session)
        else:
            stack, tokenizer = cast(Transformer, session.stack), session.tokenizer.to_hf()
            if isinstance(session.stack, Adapted):  # transformers runs it, and writes it itself
                with quiet_transformers(), saving_tensors(temporary / "model.safetensors"):
                    session.stack.model.save_pretrained(temporary)  # type: ignore[operator]
                tokenizer.save(temporary / "tokenizer.json")
            elif format_ == "hf":
                _write_folder(temporary, stack, tokenizer)
            else:
                metadata = {**gguf_metadata(stack, out.name), **gguf_tokenizer(tokenizer, stack.config.vocab)}
                write_gguf(temporary / "model.gguf", metadata, _tensors(stack, "gguf"), kind)
            _write_adapter(temporary / "topograd", session, session.stack)
        write_atomic(temporary / "README.md", card(session.run, out.name))
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    files = sorted(path.name for path in out.iterdir())
    return {"run": str(session.run.folder), "format": format_, "out": str(out), "files": files, **more}


def _check_plain(session: LoadedTextRun, adapted: bool = False) -> None:
    """Refuse a model that others do not know; one that transformers runs unless `adapted`."""
    stack, where = session.stack, session.run.folder
    kind = session.config.model.kind
    if kind == "hf" and not adapted:
        remedy = "use format hf, which writes it as transformers does"
        raise ConfigError(f"{where} is a model which transformers runs here", remedy=remedy)
    if kind not in (*TRAITS, "hf") or not session.config.brings_tokenizer:
        problem = f"{where} is a model of our own kind, which no other program knows"
        raise ConfigError(problem, remedy="only imported models are exported: keep the run's folder")
    plan = session.plan
    if stack.has_head(plan.last) or stack.learned_relays() or plan.prediction.kind != "last":
        problem = f"{where} has a last head or relays of its own, or predicts by several stages"
        raise ConfigError(problem, remedy="these formats cannot say that: keep the run's folder")


def _write_adapter(folder: Path, session: LoadedTextRun, stack: Stack) -> None:
    """What these formats cannot say of the run, if there is anything."""
    run, store, config = session.run, session.run.store, session.config
    head = stack.shared_head
    own = () if head is None else head.deltas.named_parameters()
    tensors = {f"head.deltas.{name}": value.detach() for name, value in own}
    if isinstance(store, DeltaStore):
        tensors |= store.own_tensors(store.names()[-1])
    tensors |= exit_tensors(open_exits(session))
    if not tensors and len(session.plan.stages) == 1 and not run.calibration_file.is_file():
        return
    run.manifest.verify(run.calibration_file.name)
    settings: dict[str, Any] = {}
    if config.tune.lora_rank:
        rank = config.tune.lora_rank
        settings |= {"r": rank, "lora_alpha": config.tune.lora_alpha or 2 * rank, "merged": True}
    settings["stages"] = [[stage.layers.start, stage.layers.stop] for stage in session.plan.stages]
    words = "Stages, heads of exits, low-rank corrections (already merged into the model beside it) and "
    create_adapter(
        folder,
        kind="lora" if config.tune.lora_rank else "exits",
        base=BaseIdentity.of(session),
        tensors=tensors,
        settings=settings,
        card=f"{words}calibration of {run.folder.name}: what the plain model's format cannot say.",
    )
    if run.calibration_file.is_file():
        shutil.copyfile(run.calibration_file, folder / run.calibration_file.name)


def _tensors(stack: Transformer, naming: Any) -> dict[str, Tensor]:
    """The model's tensors under the names of others, a tied one once."""
    own = dict(stack.named_parameters())
    return {
        there.name: (own[name] if there.write is None else there.write(own[name])).detach().contiguous()
        for name, there in tensor_names(family_config(stack), naming).items()
    }


def _write_folder(folder: Path, stack: Transformer, tokenizer: HFTokenizer) -> None:
    settings = hugging_face_config(family_config(stack))
    for role in ("bos", "eos", "pad"):
        settings[f"{role}_token_id"] = tokenizer.special_ids.get(role)
    if ends := tokenizer.declared_ends:
        settings["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    with saving_tensors(file := folder / "model.safetensors"):
        save_file(_tensors(stack, "hugging-face"), file, metadata={"format": "pt"})
    write_atomic(folder / "config.json", dump_json(settings, indent=2) + "\n")
    tokenizer.save(folder / "tokenizer.json")


def gguf_metadata(stack: Transformer, name: str) -> dict[str, Any]:
    """The sizes of a model in GGUF's words."""
    config = family_config(stack)
    if config.family not in GGUF_FAMILIES:
        problem = f"a {config.family} is not written as GGUF, {', '.join(GGUF_FAMILIES)} are"
        raise ConfigError(problem, remedy="use format hf")
    windows = any(0 < config.window(index) < config.positions for index in range(config.layers))
    unknown = {
        f"rope scaling {config.rope_scaling}": config.rope_scaling != "none",
        f"the activation {config.activation}": config.activation != "silu",
        "a sliding window": windows,
    }
    if lost := [name for name, there in unknown.items() if there]:
        what = f"a {config.family} with {' and '.join(lost)}"
        problem = f"{what} is not written as GGUF: its readers would compute something else"
        raise ConfigError(problem, remedy="use format hf")
    family = "llama" if config.family == "mistral" else config.family
    sizes = {
        "context_length": config.positions,
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


def gguf_tokenizer(tokenizer: HFTokenizer, vocab: int) -> dict[str, Any]:
    """A byte-level tokenizer in GGUF's words; rows of the head that no token has are named as unused."""
    content = json.loads(tokenizer.files()[FILE])
    model, added = content["model"], content.get("added_tokens", [])
    if model.get("type", "BPE") != "BPE" or "ByteLevel" not in json.dumps(content.get("decoder")):
        raise ConfigError("only byte-level BPE tokenizers are written as GGUF", remedy="use format hf")
    if not model["merges"]:
        raise ConfigError(
            "the tokenizer has no merges, and a GGUF file holds no empty list", remedy="use format hf"
        )
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
        if role in tokenizer.special_ids:
            found[f"tokenizer.ggml.{key}_token_id"] = tokenizer.special_ids[role]
    for role, place in (("bos", 0), ("eos", -1)):
        put = tokenizer.encode(SAMPLE, "prompt")[place] == tokenizer.special_ids.get(role)
        found[f"tokenizer.ggml.add_{role}_token"] = put
    _check_split(tokenizer, found)
    template = tokenizer.chat_template
    return found if template is None else found | {"tokenizer.chat_template": template}


def _check_split(tokenizer: HFTokenizer, found: Mapping[str, Any]) -> None:
    """Refuse to write a tokenizer that its readers would take for another."""
    kinds = np.array(found["tokenizer.ggml.token_type"], dtype=np.int32)
    back = HFTokenizer(tokenizer_json({**found, "tokenizer.ggml.token_type": kinds}))
    if back.encode(SAMPLE, "prompt") != tokenizer.encode(SAMPLE, "prompt"):
        way = "in a way that GGUF has no name for: its readers would split them otherwise"
        raise ConfigError(f"the tokenizer splits texts {way}", remedy="use format hf")


def _split_name(content: Mapping[str, Any]) -> str:
    """What GGUF calls the way in which a text is split before merging."""
    text = json.dumps(content.get("pre_tokenizer"))
    if "\\\\p{N}{1,3}" in text:
        return "llama-bpe"
    if "\\\\p{L}" in text:
        return "qwen2"
    return "smollm" if "Digits" in text else "gpt-2"
