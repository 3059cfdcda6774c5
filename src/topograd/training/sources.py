"""Data sources of a run, text or images: batches in order, held-out data, and a teacher that fits.

Everything else of a training (executor, loop, optimizers, checkpoints, the run's folder) is the same for all
sources. A teacher is another run, opened and frozen, whose prediction a student follows by `distillation`.
"""

from __future__ import annotations

from dataclasses import dataclass

from topograd.data import Loader, Prepared, Text, windows
from topograd.data.images import ImageData, ImageLoader
from topograd.data.masked import MaskedLoader
from topograd.data.tokenizer import FILE
from topograd.errors import ConfigError
from topograd.exec.forward import Predictor
from topograd.nn.interface_config import parse_interfaces
from topograd.nn.stack import Stack
from topograd.runs.config import TrainConfig
from topograd.runs.session import LoadedRun, image_spec, open_run, open_session
from topograd.runs.topology_config import AVERAGE_TEACHER, OWN_TEACHER
from topograd.topology.plan import Plan
from topograd.training.evaluation import check_causal, evaluate
from topograd.training.image_evaluation import evaluate_images
from topograd.training.masked_evaluation import evaluate_masked
from topograd.training.trainer import Reading

Data = Prepared | ImageData


@dataclass(frozen=True)
class Teacher:
    """What teaches, and which weights it has."""

    predictor: Predictor
    weights: str

    @classmethod
    def of(cls, opened: LoadedRun, device: str) -> Teacher:
        opened.stack.to(device).requires_grad_(False)
        return cls(Predictor(opened.stack, opened.plan), opened.weights)


class TextSource:
    """Next-token prediction."""

    unit = "tokens"

    def __init__(self, config: TrainConfig, data: Prepared) -> None:
        context = config.model.context
        if config.topology.interface is not None:
            for settings in parse_interfaces(config.topology.interface):
                check_causal(settings)
        self.loader = Loader(data.train, config.seq_len, config.batch, config.seed)
        self.text = Text(*windows(data.heldout, data.tokenizer, context, config.eval_bytes))
        self.units = config.batch * config.seq_len

    def evaluate(self, stack: Stack, plan: Plan) -> Reading:
        return evaluate(stack, plan, self.text)


class ImageSource:
    """Classify images."""

    unit = "images"

    def __init__(self, config: TrainConfig, data: ImageData) -> None:
        self.loader = ImageLoader(data.train, config.batch, config.seed)
        self.images = data.test.sample(image_spec(config).eval_images)
        self.units = config.batch

    def evaluate(self, stack: Stack, plan: Plan) -> Reading:
        return evaluate_images(stack, plan, self.images)


class MaskedSource:
    """Prediction of hidden tokens."""

    unit = "tokens"

    def __init__(self, config: TrainConfig, data: Prepared) -> None:
        vocab, context = config.model.vocab, config.model.context
        self.loader = MaskedLoader(data.train, config.seq_len, config.batch, config.seed, vocab)
        self.text = Text(*windows(data.heldout, data.tokenizer, context, config.eval_bytes))
        self.units = config.batch * config.seq_len

    def evaluate(self, stack: Stack, plan: Plan) -> Reading:
        return evaluate_masked(stack, plan, self.text)


Source = TextSource | MaskedSource | ImageSource


def source_of(config: TrainConfig, data: Data) -> Source:
    """The source of some settings, on the data that was read for them."""
    if isinstance(data, ImageData):
        return ImageSource(config, data)
    return MaskedSource(config, data) if config.model.task == "masked" else TextSource(config, data)


def teacher_of(config: TrainConfig, data: Data) -> Teacher | None:
    """The run that the settings name as the teacher; None where no other run teaches."""
    folder = config.topology.teacher
    if folder is None or folder in (OWN_TEACHER, AVERAGE_TEACHER):
        return None
    if config.model.task == "masked":
        allowed = f"{OWN_TEACHER} or {AVERAGE_TEACHER} for an encoder"
        raise ConfigError(setting="teacher", given=folder, allowed=allowed)
    if isinstance(data, ImageData):
        opened, ours = open_run(folder), image_spec(config)
        theirs = image_spec(opened.config) if opened.config.model.task == "images" else None
        if theirs is None or (theirs.shape, theirs.classes) != (ours.shape, ours.classes):
            raise ConfigError(
                f"teacher {folder} was not trained on images of {ours.shape} with {ours.classes} classes",
                setting="teacher",
                given=folder,
                remedy="train it and its student on the same images",
            )
        return Teacher.of(opened, config.device)
    session = open_session(folder)
    if session.tokenizer.files()[FILE] != data.tokenizer.files()[FILE]:
        raise ConfigError(
            f"teacher {folder} has another tokenizer, so its logits are of other tokens",
            setting="teacher",
            given=folder,
            remedy="train it and its student on the same text",
        )
    if session.config.model.context < config.model.context:
        raise ConfigError(
            f"teacher {folder} has a context of {session.config.model.context}",
            setting="teacher",
            given=folder,
            remedy=f"give the student at most that, instead of {config.model.context}",
        )
    return Teacher.of(session, config.device)
