"""What a run learns from: its batches in order, and what it is read on. Text, or pictures.

A run asks its source for batches, for an evaluation of the model, and for a teacher that fits. Everything
else of a training (executor, loop, optimizers, checkpoints, the run's folder) is the same for all sources.
"""

from __future__ import annotations

from topograd.data import Loader, Prepared, Text, windows
from topograd.data.image_loader import ImageLoader
from topograd.data.images import ImageData
from topograd.nn.stack import Stack
from topograd.runs.config import TrainConfig
from topograd.runs.session import image_spec
from topograd.topology.plan import Plan
from topograd.training.evaluation import evaluate
from topograd.training.image_evaluation import evaluate_images
from topograd.training.teacher import Teacher, open_image_teacher, open_teacher
from topograd.training.trainer import Reading

Data = Prepared | ImageData


class TextSource:
    """Predict the next token."""

    unit = "tokens"

    def __init__(self, config: TrainConfig, data: Prepared) -> None:
        context = config.model.context
        self.data = data
        self.loader = Loader(data.train, config.seq_len, config.batch, config.seed)
        self.text = Text(*windows(data.heldout, data.tokenizer, context, config.eval_bytes))
        self.units = config.batch * config.seq_len

    def evaluate(self, stack: Stack, plan: Plan) -> Reading:
        return evaluate(stack, plan, self.text)

    def teacher(self, config: TrainConfig) -> Teacher | None:
        return open_teacher(config, self.data.tokenizer)


class ImageSource:
    """Name the class of a picture."""

    unit = "images"

    def __init__(self, config: TrainConfig, data: ImageData) -> None:
        self.loader = ImageLoader(data.train, config.batch, config.seed)
        self.pictures = data.test.sample(image_spec(config).eval_images)
        self.units = config.batch

    def evaluate(self, stack: Stack, plan: Plan) -> Reading:
        return evaluate_images(stack, plan, self.pictures)

    def teacher(self, config: TrainConfig) -> Teacher | None:
        return open_image_teacher(config)


Source = TextSource | ImageSource


def source_of(config: TrainConfig, data: Data) -> Source:
    """The source of some settings, on the data that was read for them."""
    return ImageSource(config, data) if isinstance(data, ImageData) else TextSource(config, data)
