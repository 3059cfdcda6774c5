"""The flags of `topograd train --task images`: a network on images instead of a model of text.

Networks have other settings than models of text (--model names one, where --model.layers is a setting of the
other), so the two tasks have flags of their own, made from a dataclass each; what they share is one base.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from topograd.cli.console import Json, parse
from topograd.cli.flags import flags_of, name_flag
from topograd.errors import ConfigError, TopogradError
from topograd.nn.images.config import Activation, ImageConfig
from topograd.runs.config import CommonConfig, OptimizerConfig, TrainConfig

_NETWORK = ("widths", "depth", "activation", "patch", "heads", "eval_images")


def image_optimizer() -> OptimizerConfig:
    """AdamW at one rate for everything, which falls to nothing: what networks on images are trained
    with."""
    return OptimizerConfig(
        name="adamw",
        lr_matrix=0.002,
        lr_embedding=0.002,
        lr_head=0.002,
        lr_scalar=0.002,
        betas=(0.9, 0.99),
        warmdown=0.7,
    )


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network on images, and what it is trained on."""

    task: Literal["images"] = "images"
    """What is learned; the flags of models of text are shown by: topograd train --help."""
    data: str
    """A folder with train- and t10k- IDX files (maybe .gz), or CIFAR's .bin files; or digits, scikit-
    learn's."""
    model: str = "mlp"
    """The network: mlp, vgg, resnet20 (or resnet8, resnet14, ...), vit, forward-forward, or
    package.module:attribute of your own."""
    widths: tuple[int, ...] = ()
    """Widths of the hidden layers, or channels: 256 128 for the mlp that is the default."""
    depth: int | None = None
    """Layers of a vit, 6 by default, or of a network of your own."""
    activation: Activation = "relu"
    """Of an mlp: relu, sigmoid, or log-odds (the sigmoid's derivative is left out of the gradient)."""
    patch: int | None = None
    """Side of a vit's patches; a quarter of the image by default."""
    heads: int = 4
    """Heads of a vit's attention."""
    eval_images: int = 10_000
    """Held-out images that an evaluation reads."""
    out: Path | None = None
    """The run's folder; by default a new one in runs/."""
    init: str | None = None
    """The folder of a run on images whose weights to begin with; new heads and layers start fresh."""
    stop_after: int | None = None
    """Stop and save after this step of the schedule; --resume continues from there."""
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class TrainImages(CommonConfig, Network):
    """Train a network on images: --data names a folder of IDX or CIFAR binary files, or is the word digits.

    `topograd train --resume DIR` continues a run of any task. Objectives, relays and topologies are those of
    every run; --objective forward-forward goes with --model forward-forward.
    """

    steps: int = 2000
    batch: int = 128
    eval_every: int = 500
    save_every: int = 500
    optimizer: OptimizerConfig = field(default_factory=image_optimizer)

    def settings(self) -> TrainConfig:
        """The settings of the run; sizes and classes are those of the images once they are read."""
        shared = {f.name for f in fields(TrainConfig)} & {f.name for f in fields(self)} - {"model"}
        network = ImageConfig(network=self.model, **{name: getattr(self, name) for name in _NETWORK})
        return TrainConfig(model=network, **{name: getattr(self, name) for name in shared})


def read_image_flags(argv: list[str]) -> tuple[TrainImages, TrainConfig]:
    """The flags, and the settings that they describe."""
    foreign = next((word for word in argv if word.partition("=")[0] in ("--preset", "--config")), None)
    if foreign is not None:
        raise ConfigError(
            f"{foreign} is for models of text", remedy="with --task images give the settings as flags"
        )
    args = parse(TrainImages, argv, "train --task images")
    try:
        return args, args.settings()
    except TopogradError as error:
        name_flag(error, flags_of(TrainImages), argv, typed=False)
        raise
