"""A run, opened: its settings, its model with a checkpoint's weights, its tokenizer, its held-out text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from topograd.data import Prepared, Tokenizer, prepare, read_corpus, windows
from topograd.errors import CheckpointError, ConfigError
from topograd.nn.gpt import GPT
from topograd.nn.interface import SegmentInterface, add_interfaces
from topograd.runs.folder import Run
from topograd.topology.plan import Plan
from topograd.runs import checkpoint
from topograd.runs.config import TrainConfig
from topograd.training.evaluation import Text, evaluate
from topograd.training.executor import prepare as prepare_stack


@dataclass
class Session:
    """A trained model, ready to be read."""

    run: Run
    config: TrainConfig
    stack: GPT
    plan: Plan
    tokenizer: Tokenizer
    step: int

    def evaluate(self, data: Path | None = None, limit_bytes: int | None = None) -> dict[str, Any]:
        """Readings on the run's held-out text, or on all of the text at `data`."""
        text = heldout_text(self.config, self.tokenizer, data, limit_bytes)
        return summary(self.run, self.step, evaluate(self.stack, self.plan, text))


def open_session(folder: Path | str, name: str | None = None) -> Session:
    """The run in `folder` with its newest checkpoint, or the one called `name`."""
    run = Run.open(folder)
    config = TrainConfig.from_dict(run.read_config())
    tokenizer = Tokenizer.load(run.tokenizer_file)
    stack, plan = build_stack(config)
    loaded = checkpoint.load(find_checkpoint(run, name), stack)
    stack.eval()
    return Session(run, config, stack, plan, tokenizer, loaded.step)


def find_checkpoint(run: Run, name: str | None) -> Path:
    """The checkpoint called `name`, or the newest."""
    found = checkpoint.available(run.checkpoints)
    if not found:
        raise CheckpointError(
            f"{run.folder} has no checkpoint yet; train it with: topograd train --resume {run.folder}"
        )
    if name is None:
        return found[-1]
    for path in found:
        if path.name == name:
            return path
    raise CheckpointError(
        f"{run.folder} has no checkpoint {name!r}; it has {', '.join(p.name for p in found)}"
    )


def build_stack(config: TrainConfig) -> tuple[GPT, Plan]:
    """A new model from the seed, with the heads and the interfaces that its topology wants."""
    torch.manual_seed(config.seed)
    stack = GPT(config.model).to(device_of(config))
    topology = config.topology()
    if config.interface is not None:
        settings, model = SegmentInterface.parse(config.interface), config.model
        add_interfaces(stack, settings, len(topology.stages), model.width, model.context)
    return stack, prepare_stack(stack, topology)


def device_of(config: TrainConfig) -> torch.device:
    """The device that the settings name."""
    try:
        device = torch.device(config.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {config.device!r} cannot be used ({reason}); try 'cpu'") from None
    return device


def load_data(config: TrainConfig, tokenizer: Tokenizer | None = None) -> tuple[TrainConfig, Prepared]:
    """The corpus of the settings, prepared, and the settings with its true vocabulary."""
    path = None if config.data is None else Path(config.data)
    data = prepare(path, config.tokenizer, config.model.vocab, tokenizer=tokenizer)
    return replace(config, model=replace(config.model, vocab=data.tokenizer.vocab)), data


def heldout_text(
    config: TrainConfig, tokenizer: Tokenizer, data: Path | None = None, limit_bytes: int | None = None
) -> Text:
    """The run's held-out sample, or all of the text at `data`, cut into windows."""
    context = config.model.context
    if data is None:
        _, prepared = load_data(config, tokenizer)
        return Text(*windows(prepared.heldout, tokenizer, context, limit_bytes or config.eval_bytes))
    corpus = read_corpus(data)
    documents = tokenizer.encode_batch([d.text for d in (*corpus.train, *corpus.heldout)])
    return Text(*windows(documents, tokenizer, context, limit_bytes))


def summary(run: Run, step: int, readings: dict[str, Any]) -> dict[str, Any]:
    """What `train` and `eval` print: the run, its steps and the readings."""
    return {"run": str(run.folder), "steps": step, **readings}
