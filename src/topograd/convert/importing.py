"""A model from outside becomes a run: a Hugging Face folder or a GGUF file, read and checked, never changed.

    Hugging Face folder   config.json, *.safetensors (sharded too), tokenizer.json: weights are referred to by
                          path and SHA-256, or copied
    GGUF file             dequantised to float32 once, into the run; the tokenizer is in its metadata
    adapter of peft's     merged into the model that it belongs to, which is any of these or a run; copied

Everything is read and checked before anything is written: what does not fit leaves no folder behind. Weights
are memory-mapped, so that checking a model takes little more memory than its largest tensor, and opening it
about as much as its weights.

Cost: hashing the weights, and for GGUF writing them as float32. Limits: the families of `families.py` decode
with a cache; other architectures, of folders, are run by transformers and recompute (`adapted.py`). No code
of the folder is run and no pickle is read.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from topograd.convert.adapted import adapt_folder
from topograd.convert.card import origin_of_folder, origin_of_gguf, source_name, write_card, write_origin
from topograd.convert.families import config_of, is_native, load_tensors
from topograd.convert.huggingface import is_peft, local_model, without_weights
from topograd.convert.peft_adapter import base_of, merge_peft, read_peft
from topograd.convert.tensor_names import tensor_names
from topograd.data.hf_tokenizer import HFTokenizer
from topograd.errors import CheckpointError, ConfigError, DataError
from topograd.files import dump_json, read_json, reading_tensors
from topograd.nn.adapted.spec import AdaptedConfig
from topograd.nn.stack import Stack
from topograd.nn.transformer.config import TransformerConfig
from topograd.nn.transformer.stack import Transformer
from topograd.runs.config import TrainConfig
from topograd.runs.external_weights import NAME as WEIGHTS
from topograd.runs.external_weights import TensorLocation, describe
from topograd.runs.folder import Run
from topograd.runs.session import bind_tokenizer, open_session
from topograd.runs.topology_config import TopologyConfig

CONTEXT = 2048
"""Positions that a run of an imported model sees, where it was made for more and none are asked for."""
EVAL_BYTES = 20_000
MAX_JSON = 2**26


@dataclass(frozen=True)
class Source:
    """A model from outside, opened and checked."""

    config: TransformerConfig | AdaptedConfig
    tokenizer: HFTokenizer
    stack: Stack
    """With its weights in place, as views of the files where they need no change."""
    references: dict[str, Any] | None
    """What weights.json would say; None where the weights must be copied."""
    origin: dict[str, str | None]
    """Its name and its licence, as far as it says them."""


def import_model(
    source: Path | str,
    out: Path | str,
    *,
    partition: str = "L",
    context: int | None = None,
    copy: bool = False,
    base: Path | str | None = None,
) -> dict[str, Any]:
    """Make the run `out` of the model at `source`, a path or hf:ORG/NAME, and say what it is.

    `base` is the model of an adapter, where it is not the one that the adapter names.
    """
    began = time.perf_counter()
    source = local_model(source)
    if base is not None and not is_peft(source):
        raise ConfigError(setting="base", given=str(base), allowed="given with an adapter of peft's")
    with ExitStack() as opened, Run.creating(out) as run:  # before the model is read
        found = _open(source, opened) if base is None else _open_peft(source, opened, base)
        config = _settings(found, partition, context)
        _write(run, found, config, copy)
        write_card(run)
    return {
        "run": str(run.folder),
        "source": str(source),
        "architecture": found.config.family,
        "layers": found.config.layers,
        "width": found.config.width,
        "vocab": found.config.vocab,
        "context": config.model.context,
        "parameters": sum(parameter.numel() for parameter in found.stack.parameters()),
        "tokenizer": found.tokenizer.kind,
        "licence": found.origin["licence"],
        "native": found.config.kind != "hf",
        "weights": "copied" if copy or found.references is None else "referred to",
        "seconds": time.perf_counter() - began,
    }


def _open(source: Path, opened: ExitStack) -> Source:
    if source.is_dir():
        return _open_peft(source, opened) if is_peft(source) else _open_folder(source, opened)
    if source.is_file():
        return _open_gguf(source)
    remedy = "give a Hugging Face folder, a GGUF file or hf:ORG/NAME"
    problem = f"there is no model at {source}"
    raise CheckpointError(problem, setting="source", given=str(source), remedy=remedy)


def _open_folder(folder: Path, opened: ExitStack) -> Source:
    settings = _read_settings(folder / "config.json")
    if not is_native(settings):  # transformers runs it
        adapted, network = adapt_folder(folder, settings)
        tokenizer = _read_tokenizer(folder, settings, adapted)
        return Source(adapted, tokenizer, network, None, origin_of_folder(folder))
    config = config_of(settings)
    files, where = _tensor_files(folder, opened)

    def get(name: str) -> Tensor:
        file, handle = where[name]
        with reading_tensors(file, CheckpointError):
            tensor: Tensor = handle.get_tensor(name)
        return tensor

    stack = _filled(config, get, where)
    tokenizer = _read_tokenizer(folder, settings, config)
    names = {file: index for index, file in enumerate(files)}
    sources = tensor_names(config, available=where)
    if any(there.read is not None for there in sources.values()):
        return Source(config, tokenizer, stack, None, origin_of_folder(folder))
    places = {own: TensorLocation(names[where[there.name][0]], there.name) for own, there in sources.items()}
    return Source(config, tokenizer, stack, describe(files, places), origin_of_folder(folder))


def _open_peft(folder: Path, opened: ExitStack, base: Path | str | None = None) -> Source:
    """An adapter of peft's, merged into its base."""
    adapter = read_peft(folder)
    model = local_model(base or base_of(adapter))
    if (model / "config.toml").is_file():
        session = open_session(model)
        if not session.config.brings_tokenizer:
            problem = f"{model} is a model of our own kind, which peft does not know"
            raise ConfigError(problem, setting="base", given=str(model), remedy="give an imported one")
        shape: Any = session.config.model
        found = Source(shape, session.tokenizer.to_hf(), session.stack, None, origin_of_folder(folder))
    else:
        found = _open(model, opened)
    merge_peft(found.stack, adapter)
    return replace(found, references=None, origin={**found.origin, "name": source_name(folder)})


def _read_tokenizer(
    folder: Path, settings: dict[str, Any], config: TransformerConfig | AdaptedConfig
) -> HFTokenizer:
    """The folder's tokenizer, with the tokens that the model says it ends with, as transformers does."""
    generation = folder / "generation_config.json"
    said = _read_settings(generation) if generation.is_file() else settings
    ends = said.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    known = [end for end in ends if type(end) is int and 0 <= end < config.vocab]
    tokenizer = HFTokenizer.load(folder / "tokenizer.json", known)
    _check_tokenizer(tokenizer, config, folder / "tokenizer.json")
    return tokenizer


def _read_settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        remedy = "give a Hugging Face folder or a GGUF file"
        raise CheckpointError(f"{file.parent} has no config.json", remedy=remedy)
    if (size := file.stat().st_size) > MAX_JSON:
        raise CheckpointError(f"{file} has {size} bytes", remedy=f"a config has at most {MAX_JSON}")
    settings = read_json(file, CheckpointError)
    if not isinstance(settings, dict):
        raise CheckpointError(f"{file} is damaged, it is no JSON object", remedy="restore it")
    return settings


def _tensor_files(folder: Path, opened: ExitStack) -> tuple[list[Path], dict[str, tuple[Path, Any]]]:
    """The files of weights, and for each tensor its file, opened; shards are those that the index names."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        described = read_json(index, CheckpointError)
        table = described.get("weight_map") if isinstance(described, dict) else None
        if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
            raise CheckpointError(f"{index} is damaged, it has no weight_map", remedy="restore it")
        files = [folder / name for name in sorted(set(table.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise without_weights(folder)
    where: dict[str, tuple[Path, Any]] = {}
    for file in files:
        if file.parent != folder or not file.is_file():
            raise CheckpointError(f"shard {file.name!r} of {folder} is missing", remedy="restore it")
        with reading_tensors(file, CheckpointError):
            handle = opened.enter_context(safe_open(file, framework="pt"))
        for name in handle.keys():  # noqa: SIM118  a handle is no mapping
            if name in where:
                raise CheckpointError(f"tensor {name!r} is in {where[name][0].name} and in {file.name}")
            where[name] = file, handle
    return files, where


def _open_gguf(file: Path) -> Source:
    from topograd.convert.gguf_config import config_dict
    from topograd.convert.gguf_file import GGUFFile
    from topograd.convert.gguf_tokenizer import tokenizer_config, tokenizer_json

    gguf = GGUFFile(file)
    config = config_of(config_dict(gguf))
    tokenizer = HFTokenizer(tokenizer_json(gguf.metadata), tokenizer_config(gguf.metadata))
    _check_tokenizer(tokenizer, config, file)
    names = [name for name in gguf.tensors if name != "rope_freqs.weight"]  # read into the config
    stack = _filled(config, gguf.tensor, names, "gguf")
    kinds = {entry.kind for entry in gguf.tensors.values() if len(entry.shape) > 1}
    return Source(config, tokenizer, stack, None, origin_of_gguf(file, gguf.metadata, kinds))


def _filled(
    config: TransformerConfig, get: Callable[[str], Tensor], names: Any, naming: Any = "hugging-face"
) -> Transformer:
    with torch.device("meta"):
        stack = Transformer(config)

    def finite(name: str) -> Tensor:
        if not bool(torch.isfinite(tensor := get(name)).all()):
            problem = f"tensor {name!r} has values that are not finite"
            raise DataError(problem, remedy="get the model's files again")
        return tensor

    load_tensors(stack, finite, names, naming)
    return stack


def _check_tokenizer(tokenizer: HFTokenizer, config: TransformerConfig | AdaptedConfig, where: Path) -> None:
    if tokenizer.vocab > config.vocab:
        problem = f"{where} has {tokenizer.vocab} tokens and the model {config.vocab}"
        raise DataError(problem, remedy="it is the tokenizer of another model")
    if shared := tokenizer.shared_ids():
        problem = f"{where} gives the tokens {shared[0][0]!r} and {shared[0][1]!r} one id"
        raise DataError(problem, remedy="get the tokenizer's file again")


def _settings(found: Source, partition: str, context: int | None) -> TrainConfig:
    made_for = found.config.context
    if context is not None and not 1 <= context <= made_for:
        remedy = f"the model was made for {made_for}: give 1 to that"
        raise ConfigError(setting="context", given=context, remedy=remedy)
    return TrainConfig(
        topology=TopologyConfig(partition=partition),
        steps=1,
        tokenizer="imported",
        eval_bytes=EVAL_BYTES,
        model=found.config.seeing(context or min(made_for, CONTEXT)),
    )


def _write(run: Run, found: Source, config: TrainConfig, copy: bool) -> None:
    """Write the run; its settings come last, since they are what makes the folder a run."""
    bind_tokenizer(run, found.tokenizer)
    write_origin(run, found.origin)
    if found.references is not None and not copy:
        run.manifest.bind(WEIGHTS, dump_json(found.references, indent=1) + "\n")
    else:
        run.store.save(step=0, model=found.stack, optimizers={}, extra={}, keep=1)
    run.write_config(config.as_dict())
