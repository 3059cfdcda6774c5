"""Settings of networks on images. Imports no torch.

    mlp               784-256-128-10: a layer is a matrix and its activation, the last gives the logits itself
    vgg               3 × 3 convolutions, BatchNorm, ReLU; halved by a max-pooling where channels grow
    resnetN           N = 6n + 2: n blocks at each of three widths; the stem belongs to the first block
    vit               patches, attention and an MLP in each layer, the mean of all patches is read
    forward-forward   every label is laid into the image; a layer's logits are its goodness

Sources: "Product of Experts" appendix A; He et al. 2016 (CIFAR's ResNet-20); Hinton 2022 (Forward-Forward).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from topograd.errors import StackError
from topograd.limits import DEPTH, SIZE, check_rules
from topograd.nn.spec import ModelSpec, Task
from topograd.registry import Registry

if TYPE_CHECKING:
    from topograd.nn.stack import Stack
    from topograd.topology.dag import Topology

NETWORKS: Registry[Any] = Registry(
    "model",
    {
        "mlp": "topograd.nn.images.mlp:MLP",
        "vgg": "topograd.nn.images.convolutional:VGG",
        "resnet20": "topograd.nn.images.convolutional:ResNet",
        "vit": "topograd.nn.images.vit:ViT",
        "forward-forward": "topograd.nn.images.forward_forward:ForwardForward",
    },
)
"""Stacks on images, made as `network(config, topology)`; see `nn/images/stack.py`."""
WIDTHS = {
    "mlp": (256, 128),
    "vgg": (32, 32, 64, 64, 128, 128),
    "resnet": (16, 32, 64),
    "vit": (64,),
    "forward-forward": (500, 500),
}
_RESNET = re.compile(r"resnet(\d{1,4})")
Activation = Literal["relu", "sigmoid", "log-odds"]


@dataclass(frozen=True, kw_only=True)
class ImageConfig(ModelSpec):
    """A network on images, and the images that it is for."""

    task: ClassVar[Task] = "images"
    network: str = "mlp"
    """mlp, vgg, resnet20 (or 8, 14, 32, ...), vit, forward-forward, or package.module:attribute of your
    own."""
    widths: tuple[int, ...] = ()
    """Widths of the hidden layers or channels of the convolutions; the network's own if not given."""
    depth: int | None = None
    """Layers of a vit (6 if not given), or of a network of your own."""
    activation: Activation = "relu"
    """Of an mlp: relu, sigmoid, or log-odds, a sigmoid whose derivative is left out of the gradient."""
    patch: int | None = None
    """Side of a vit's patches; a quarter of the image if not given."""
    heads: int = 4
    """Heads of a vit's attention."""
    shape: tuple[int, int, int] = (1, 28, 28)
    """Channels, height and width of an image."""
    classes: int = 10
    """Classes that there are."""
    mean: tuple[float, ...] = (0.5,)
    """Mean of each channel, which is subtracted, on a scale from 0 to 1."""
    std: tuple[float, ...] = (0.5,)
    """Standard deviation of each channel, which it is divided by."""
    eval_images: int = 10_000
    """Held-out images that an evaluation reads."""

    def __post_init__(self) -> None:
        self._check_network()
        for name, bounds in (("depth", DEPTH), ("patch", SIZE), ("heads", SIZE), ("classes", SIZE)):
            value = getattr(self, name)
            if value is not None and not bounds[0] <= value <= bounds[1]:
                raise StackError(setting=name, given=value, allowed=f"in {bounds[0]:.0f}..{bounds[1]:.0f}")
        image = len(self.shape) == 3 and all(1 <= size <= SIZE[1] for size in self.shape)
        logits = self.family == "mlp" and self.classes in self.widths
        finite = all(math.isfinite(v) for v in self.mean) and all(0 < v < math.inf for v in self.std)
        bounded = all(1 <= width <= SIZE[1] for width in self.widths) and not logits
        other = f"other than {self.classes}, the width of the logits"
        check_rules(
            self,
            StackError,
            shape=(image, "channels, height and width"),
            widths=(bounded, other if logits else f"each in 1..{SIZE[1]:.0f}"),
            mean=(finite, "finite, and std above 0"),
            eval_images=(self.eval_images >= 1, "at least 1"),
        )
        self._check_vit()

    @property
    def kind(self) -> str:
        return self.network if self.family in WIDTHS else "image"

    def to_dict(self) -> dict[str, Any]:
        table = asdict(self)
        if self.kind != "image":
            del table["network"]
        return {"kind": self.kind, **table}

    @classmethod
    def from_dict(cls, kind: str, table: Mapping[str, Any]) -> ModelSpec:
        named = {} if kind == "image" else {"network": "resnet20" if kind == "resnet" else kind}
        return super().from_dict(kind, {**table, **named})

    def build(self, topology: Topology) -> Stack:
        from topograd.nn.images.stack import make_image_stack

        return make_image_stack(self, topology)

    @property
    def width(self) -> int:
        """The last width that the settings name; layers have shapes of their own."""
        return self.own_widths[-1] if self.own_widths else 1

    @property
    def vocab(self) -> int:
        return self.classes

    @property
    def context(self) -> int:
        """Places that interfaces are sized by: the patches of a vit."""
        if self.family != "vit":
            return 1
        return (self.shape[1] // self.patch_size) * (self.shape[2] // self.patch_size)

    @property
    def family(self) -> str:
        """mlp, vgg, resnet, vit, forward-forward, or the address of a network of your own."""
        return "resnet" if _RESNET.fullmatch(self.network) else self.network

    @property
    def layers(self) -> int:
        """Layers of the network, before a topology adds any."""
        family, widths = self.family, self.own_widths
        if family == "resnet":
            return 3 * self.blocks
        if family == "mlp":
            return len(widths) + 1
        if family in ("vgg", "forward-forward"):
            return len(widths)
        return 6 if self.depth is None else self.depth

    @property
    def blocks(self) -> int:
        """Blocks of a ResNet at each of its widths."""
        match = _RESNET.fullmatch(self.network)
        return (int(match[1]) - 2) // 6 if match else 0

    @property
    def own_widths(self) -> tuple[int, ...]:
        """The widths that are given, or else the network's own."""
        return self.widths or WIDTHS.get(self.family, ())

    @property
    def patch_size(self) -> int:
        """The side of a vit's patches."""
        return max(min(self.shape[1:]) // 4, 1) if self.patch is None else self.patch

    def _check_network(self) -> None:
        match = _RESNET.fullmatch(self.network)
        if match and (int(match[1]) < 8 or (int(match[1]) - 2) % 6):
            allowed = "of 6n + 2 layers for a ResNet: resnet8, resnet20"
            raise StackError(setting="network", given=self.network, allowed=allowed)
        if not match:
            NETWORKS.check(self.network)
        family = self.family
        foreign = family not in WIDTHS
        if foreign and self.depth is None:
            problem = f"model {self.network} is not one of this package"
            raise StackError(problem, setting="depth", remedy="give depth, the number of its layers")
        sized = family != "resnet" or len(self.widths) in (0, 3)
        activated = family == "mlp" or self.activation == "relu"
        check_rules(
            self,
            StackError,
            depth=(self.depth is None or foreign or family == "vit", f"left out for {self.network}"),
            widths=(sized, "three, for a ResNet"),
            activation=(activated, "left out; only an mlp has one"),
        )
        for name in ("patch", "heads"):
            default = type(self).__dataclass_fields__[name].default
            if not foreign and family != "vit" and getattr(self, name) != default:
                value = getattr(self, name)
                raise StackError(setting=name, given=value, allowed="left out; only a vit uses it")

    def _check_vit(self) -> None:
        if self.family != "vit":
            return
        if len(self.own_widths) != 1 or self.own_widths[0] % self.heads:
            allowed = f"one width for a vit, a multiple of its {self.heads} heads"
            raise StackError(setting="widths", given=self.own_widths, allowed=allowed)
        if self.shape[1] % self.patch_size or self.shape[2] % self.patch_size:
            allowed = f"a divisor of {self.shape[1]} and {self.shape[2]}"
            raise StackError(setting="patch", given=self.patch_size, allowed=allowed)
