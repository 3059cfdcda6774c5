"""Loading a run: settings, model with a checkpoint's weights, tokenizer, held-out data.

Nothing here trains: no optimizer is imported. What belongs to the run is verified on the way (`manifest.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from topograd.data import Prepared, Text, Tokenizer, load_tokenizer, prepare, read_corpus, windows
from topograd.errors import CheckpointError, RunError, TopogradError
from topograd.reading import build_dataclass
from topograd.registry import Registry
from topograd.runs.checkpoint import Checkpoint
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.runs.manifest import IMPORTED
from topograd.runs.tensor_files import Unusable
from topograd.runs.topology_config import TopologyConfig
from topograd.topology.plan import Plan

if TYPE_CHECKING:
    from topograd.data.images import ImageData, ImageSet
    from topograd.nn.images.config import ImageConfig
    from topograd.nn.stack import Stack

T = TypeVar("T")
_CHATS: Registry[Callable[[Path, Tokenizer | None], Prepared | None]] = Registry("chat data")
"""Readers of conversations; None where a file holds none."""


@dataclass(frozen=True)
class Held:
    """What gives a model that is there already."""

    stack: Stack

    def __call__(self) -> Stack:
        return self.stack


@dataclass
class LoadedRun:
    """A trained model of any task, ready to be read."""

    run: Run
    config: TrainConfig
    read_stack: Callable[[], Stack]
    """Builds the model with its weights."""
    plan: Plan
    step: int
    weights: str
    """SHA-256 of the weights that were loaded."""
    later: bool = False
    """Whether the files of the weights were verified, and the model is read when it is first asked for."""

    @cached_property
    def stack(self) -> Stack:
        """The model, read when it is first asked for."""
        return self.read_stack()

    @property
    def untouched(self) -> bool:
        """Whether the model was not read yet, so that its weights are those of the files."""
        return self.later and "stack" not in vars(self)

    @cached_property
    def remembered(self) -> dict[object, Any]:
        """What `once` has read."""
        return {}

    def once(self, key: object, read: Callable[[], T]) -> T:
        """What `read` gives: read at the first call, and kept while the run is open."""
        if key not in self.remembered:
            self.remembered[key] = read()
        found: T = self.remembered[key]
        return found


@dataclass(kw_only=True)
class LoadedTextRun(LoadedRun):
    """A trained model of text."""

    tokenizer: Tokenizer


def open_session(
    folder: Path | str, name: str | None = None, *, later: bool = False, masked: bool = False
) -> LoadedTextRun:
    """The text run in `folder` with its newest checkpoint, or the one called `name`; `later`: `open_run`.

    With `masked` it may also be one on hidden tokens.
    """
    run = Run.open(folder)
    if (task := read_settings(run).model.task) != "text" and not (masked and task == "masked"):
        hidden = "was trained on hidden tokens, and predicts no next one"
        what = "was trained on images" if task == "images" else hidden
        raise RunError(f"{folder} {what}", setting="folder", remedy="give a run on text")
    tokenizer = read_tokenizer(run)
    return LoadedTextRun(**vars(open_run(folder, name, tokenizer, later=later)), tokenizer=tokenizer)


def open_run(
    folder: Path | str, name: str | None = None, tokenizer: Tokenizer | None = None, *, later: bool = False
) -> LoadedRun:
    """The run in `folder` with its newest checkpoint, or the one called `name`, whatever its task.

    With `later`, the files of the weights are verified and the model is read when it is first asked for,
    where that can be: this needs no torch.
    """
    run = Run.open(folder)
    checkpoint = find_checkpoint(run, name)
    config = topology_at(read_settings(run), run.store.extra(checkpoint))
    if tokenizer is not None and not config.brings_tokenizer and tokenizer.vocab != config.model.vocab:
        raise RunError(
            f"{run.tokenizer_file} has {tokenizer.vocab} tokens and the model {config.model.vocab}",
            remedy="restore it",
        )
    for name_ in IMPORTED:
        run.manifest.verify(name_)
    read = partial(_read_stack, run, config, checkpoint)
    found = _verified(run, checkpoint) if later and config.device == "cpu" else None
    if found is None:
        stack, plan, loaded = read()
        return LoadedRun(run, config, Held(stack), plan, loaded.step, loaded.weights)
    check_owner(run, found)
    topology = config.build_topology()
    plan = Plan.of(topology, topology.layers)
    return LoadedRun(run, config, lambda: read()[0], plan, found.step, found.weights, later=True)


def _verified(run: Run, checkpoint: str) -> Checkpoint | None:
    """A checkpoint whose files are the recorded ones; None where reading it would say why not."""
    try:
        return run.store.verified(checkpoint)
    except (Unusable, TopogradError):
        return None


def _read_stack(run: Run, config: TrainConfig, checkpoint: str) -> tuple[Stack, Plan, Checkpoint]:
    from topograd.nn.lora import merge_lora
    from topograd.runs.device import usable_device

    stack, plan = build_stack(config, empty=True)
    loaded = run.store.load(checkpoint, stack)
    check_owner(run, loaded)
    merge_lora(stack)
    stack.to(usable_device(config.device)).eval()
    return stack, plan, loaded


def read_settings(run: Run) -> TrainConfig:
    """The settings of a run, if they are its own."""
    return TrainConfig.from_dict(run.read_config())


def read_tokenizer(run: Run) -> Tokenizer:
    """The tokenizer of a run, if it is its own."""
    run.manifest.verify(run.tokenizer_file.name)
    return load_tokenizer(run.tokenizer_file)


def bind_tokenizer(run: Run, tokenizer: Tokenizer) -> None:
    """Write a run's tokenizer; an imported one has special tokens and a chat template too."""
    for name, content in tokenizer.files().items():
        run.manifest.bind(name, content)


def topology_at(config: TrainConfig, extra: Mapping[str, Any]) -> TrainConfig:
    """The settings with the topology of a checkpoint's weights: a search may have changed it."""
    table = extra.get("topology")
    return config if table is None else replace(config, topology=build_dataclass(TopologyConfig, table))


def check_owner(run: Run, loaded: Checkpoint) -> None:
    """Refuse a checkpoint that another run saved; that of an exported run names none."""
    owner = loaded.extra.get("run")
    if owner is not None and owner != run.manifest.identity():
        raise RunError(
            f"checkpoint {loaded.path} belongs to a run with other settings or another tokenizer",
            remedy=(
                f"restore {run.config_file} and {run.tokenizer_file} as they were, with "
                f"{run.manifest.path.name}"
            ),
        )


def find_checkpoint(run: Run, name: str | None) -> str:
    """The checkpoint called `name`, or the newest."""
    names = run.store.names()
    if not names:
        raise CheckpointError(
            f"{run.folder} has no checkpoint yet",
            remedy=f"train it with: topograd train --resume {run.folder}",
        )
    if name is None:
        return names[-1]
    if name not in names:
        raise CheckpointError(
            f"{run.folder} has no checkpoint {name!r}",
            setting="name",
            given=name,
            remedy=f"it has {', '.join(names)}",
        )
    return name


def build_stack(config: TrainConfig, empty: bool = False) -> tuple[Stack, Plan]:
    """A new model from the seed, with the heads, relays and interfaces that its topology wants.

    With `empty`, a model whose spec allows it has no memory yet: a checkpoint puts its weights in place.
    """
    import torch

    from topograd.nn.preparation import prepare as prepare_stack
    from topograd.runs.delta_store import apply_tuning
    from topograd.runs.device import usable_device

    torch.manual_seed(config.seed)
    topology, device = config.build_topology(), usable_device(config.device)
    if empty and config.model.loads_empty:
        with torch.device("meta"):
            stack = config.model.build(topology)
    else:
        stack = config.model.build(topology).to(device)
    plan = prepare_stack(stack, topology)
    if config.tune.keeps_base:
        apply_tuning(stack, plan, config.tune)
    return stack, plan


def load_data(config: TrainConfig, tokenizer: Tokenizer | None = None) -> tuple[TrainConfig, Prepared]:
    """The corpus of the settings, prepared, and the settings with its true vocabulary."""
    path = None if config.data is None else Path(config.data)
    chats = None
    if path is not None and path.suffix.lower() == ".jsonl":
        chats = _CHATS["jsonl"](path, tokenizer)
    data = chats or prepare(path, config.tokenizer, config.model.vocab, tokenizer=tokenizer)
    if config.brings_tokenizer:  # its head may have rows that no token has
        return config, data
    return replace(config, model=config.model.changed(vocab=data.tokenizer.vocab)), data


def load_images(config: TrainConfig) -> tuple[TrainConfig, ImageData]:
    """The images of the settings, and the settings with their true size, classes, mean and spread."""
    from topograd.data.images import read_images

    assert config.data is not None, "settings of images have data"
    data = read_images(config.data)
    mean, std = data.statistics()
    spec = replace(image_spec(config), shape=data.shape, classes=data.classes, mean=mean, std=std)
    return replace(config, model=spec), data


def image_spec(config: TrainConfig) -> ImageConfig:
    """The spec of a run on images."""
    if config.model.task != "images":
        raise RunError(
            setting="model.kind", given=config.model.kind, allowed="of images: give a run on images"
        )
    return cast("ImageConfig", config.model)


def heldout_images(opened: LoadedRun, data: Path | str | None = None, most: int | None = None) -> ImageSet:
    """The held-out images of a run on images, or those of another folder."""
    from topograd.data.images import read_test_images

    spec = image_spec(opened.config)
    assert opened.config.data is not None, "settings of images have data"
    images = read_test_images(opened.config.data if data is None else data, spec.shape, spec.classes)
    return images.sample(most or spec.eval_images)


def heldout_text(session: LoadedTextRun, data: Path | None = None, limit_bytes: int | None = None) -> Text:
    """The run's held-out sample, or all of the text at `data`, cut into windows."""
    config, tokenizer = session.config, session.tokenizer
    context = config.model.context
    if data is None:
        _, prepared = load_data(config, tokenizer)
        return Text(*windows(prepared.heldout, tokenizer, context, limit_bytes or config.eval_bytes))
    corpus = read_corpus(data)
    documents = tokenizer.encode_batch([d.text for d in (*corpus.train, *corpus.heldout)])
    return Text(*windows(documents, tokenizer, context, limit_bytes))
