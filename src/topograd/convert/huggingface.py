"""A Hugging Face checkpoint from a local folder or from the hub, and token ids to run it on.

    config.json, *.safetensors    the model; no code of the folder, no pickle
    tokenizer.json                text for it, from the embedded corpus; without one, ids are random
    hf:ORG/NAME                   downloaded, and nothing else is

A causal language model comes with its head. Of any other only the body is loaded, as it has no labels here.
It needs the extra `hf`. Models come in the type that is asked for, in evaluation mode, on the CPU.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from tokenizers import Tokenizer

from topograd.data import read_corpus
from topograd.errors import CheckpointError, ConfigError
from topograd.files import reading_tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

LENGTH = 128
"""Tokens of a row."""
MIN_TOKENS = 4096
HUB = "hf:"
"""What a model's name on the hub is written behind."""
HUB_FILES = ("*.json", "*.jinja", "*.safetensors", "README.md")
"""The files of a Hugging Face folder that are read, so these are downloaded."""
PEFT = "adapter_config.json"
"""What a folder of an adapter of peft's has."""
_CAUSAL = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True)
class Loaded:
    """A model, whether it predicts the next token, and its settings."""

    model: nn.Module
    causal: bool
    config: Any
    fresh: tuple[str, ...]
    """Parameters that the checkpoint does not hold: they are random."""

    def hidden(self, model: Any, ids: Tensor) -> Tensor:
        """The outputs to read: logits of a causal model, else the last hidden states."""
        answer = model(input_ids=ids)
        found: Tensor = answer.logits if self.causal else answer.last_hidden_state
        return found


def is_peft(folder: Path) -> bool:
    """Whether a folder holds an adapter of peft's and no model."""
    return (folder / PEFT).is_file() and not (folder / "config.json").is_file()


def local_model(model: Path | str) -> Path:
    """The path itself, or of hf:ORG/NAME the folder in huggingface_hub's cache that it was downloaded to.

    HF_HOME, HF_HUB_OFFLINE and the like count as everywhere: without a network, the cache alone is searched.
    """
    if not str(model).startswith(HUB):
        return Path(model)
    from huggingface_hub import snapshot_download

    name = str(model).removeprefix(HUB)
    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES), ignore_patterns=["*/*"]))
    except Exception as problem:  # of the hub, the network or the file system, whatever its class
        reason = " ".join(str(problem).split())[:200] or type(problem).__name__
        message = f"{model} cannot be had from the hub ({reason})"
        remedy = f"correct the name ({HUB}ORG/NAME), or give the folder of a copy"
        raise CheckpointError(message, setting="model", given=str(model), remedy=remedy) from problem


def load(folder: Path, dtype: torch.dtype | None = None) -> Loaded:
    """The model of a folder in this type, by default float64, or one line that says why not."""
    import torch

    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("a Hugging Face checkpoint needs transformers", remedy="install topograd[hf]")
    if not any(folder.glob("*.safetensors")):
        raise without_weights(folder)
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    local = {"local_files_only": True, "trust_remote_code": False}
    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(folder, **local)
            _check(folder, config)
            causal = any(name.endswith(_CAUSAL) for name in config.architectures or ())
            kind: Any = AutoModelForCausalLM if causal else AutoModel
            model, info = kind.from_pretrained(
                folder,
                config=config,
                use_safetensors=True,
                dtype=dtype or torch.float64,
                output_loading_info=True,
                **local,
            )
        except CheckpointError:
            raise
        except Exception as problem:  # of transformers, safetensors or the file system, whatever its class
            reason = " ".join(str(problem).split())[:200] or type(problem).__name__
            raise CheckpointError(f"{folder} cannot be loaded ({reason})") from problem
    model.config.use_cache = False
    return Loaded(model.eval(), causal, config, tuple(sorted(info["missing_keys"])))


def stored_parameters(folder: Path) -> int:
    """How many numbers the .safetensors of a folder hold, from their headers alone."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with reading_tensors(file, CheckpointError), safe_open(file, framework="pt") as opened:
            total += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    return total


def without_weights(folder: Path) -> CheckpointError:
    """The error for a folder without .safetensors; it names a pickle that lies there instead."""
    others = sorted(path.name for kind in ("*.bin", "*.pt", "*.ckpt") for path in folder.glob(kind))
    held = f"only {others[0]}, a pickle, which can run code" if others else "no weights"
    return CheckpointError(f"{folder} has {held}", remedy="give a folder with .safetensors")


def token_rows(folder: Path, config: Any, width: int, text: Path | None = None) -> tuple[Tensor, str]:
    """Ids (rows, length), ten tokens for each of the model's `width` channels at least; and where from.

    With `text`, a file or a folder, all ids are of that text, and there may be fewer.
    """
    import torch

    length = min(LENGTH, getattr(config, "max_position_embeddings", None) or LENGTH)
    rows = -(-max(MIN_TOKENS, 10 * width) // length)
    file = folder / "tokenizer.json"
    if not file.is_file() and text is not None:
        remedy = "add it, or leave out --text"
        raise CheckpointError(f"{folder} has no tokenizer.json to read {text} with", remedy=remedy)
    if not file.is_file():
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(config.vocab_size, (rows, length), generator=generator)
        return ids, "random ids, as there is no tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as problem:  # the library raises plain exceptions
        message = f"{file} cannot be read ({problem})"
        raise CheckpointError(message, remedy="restore it or take it away") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    found: list[int] = []
    corpus = read_corpus(text)
    for document in corpus.heldout if text is None else (*corpus.train, *corpus.heldout):
        found += tokenizer.encode(document.text, add_special_tokens=False).ids
        if len(found) >= rows * length:
            break
    length = min(length, max(len(found), 1))
    ids = torch.tensor(found[: len(found) // length * length][: rows * length]).view(-1, length)
    if not len(ids) or int(ids.max()) >= config.vocab_size:
        most = int(ids.max()) if len(ids) else 0
        raise CheckpointError(
            f"{file} gives {ids.numel()} ids up to {most} and the model has {config.vocab_size}",
            remedy="restore it",
        )
    return ids, "Python's standard library, held-out documents" if text is None else str(text)


def _check(folder: Path, config: Any) -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise CheckpointError(f"{folder} holds a quantised model", remedy="give one whose weights are floats")
    if getattr(config, "is_encoder_decoder", False):
        problem = f"{folder} is an encoder with a decoder"
        raise CheckpointError(problem, remedy="only models of one stack are covered")
    if not getattr(config, "vocab_size", None):
        problem = f"{folder} is a {config.model_type} and reads no tokens"
        raise CheckpointError(problem, remedy="use topograd.geometry in Python")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the progress bars and warnings of transformers."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
