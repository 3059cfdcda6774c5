"""torchvision's ResNets and vision transformers as stacks.

    ResNet               x0 = maxpool(relu(bn1(conv1(x))))    layers: the blocks of layer1 to layer4, in order
                         readout: fc(flatten(avgpool(h)))
    VisionTransformer    x0 = dropout([class; patches] + position)    layers: the encoder's
                         readout: heads(ln(h)[:, 0])

Logits are those of the network bit for bit: the same modules run in the same order, and nothing else.
torchvision is not imported here: a network is known by the modules that it has. A stage that ends where the
network is narrower than at its end gets a head of its own width, drawn like torch's linear layers; `prepare`
adds it.

Limits. Inputs are float images, normalised by the caller. torchvision's forward is repeated here;
`verify` compares the logits, and raises StackError for a version that differs.
"""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from topograd.errors import StackError
from topograd.nn.heads import Head
from topograd.nn.images.stack import WidthHeads, random_head
from topograd.nn.stack import LayerContext
from topograd.topology.plan import Plan

_RESNET = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", "fc")
_VIT = ("conv_proj", "class_token", "encoder", "heads", "_process_input")


class _Block(nn.Module):
    """A block of the network, called as a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, h: Tensor, ctx: LayerContext) -> Tensor:
        return self.inner(h)


class TorchvisionStack(WidthHeads):
    """Base of both: the network's last matrix is the shared head, narrower stages have others."""

    def __init__(self, model: nn.Module, blocks: Iterable[nn.Module], last: nn.Linear) -> None:
        super().__init__()
        self.model = model
        # Not registered: the model has these modules already, under their own names.
        self.__dict__["layers"] = nn.ModuleList(_Block(block) for block in blocks)
        self.__dict__["last"] = last
        self.heads = nn.ModuleDict()

    @property
    def head(self) -> nn.ModuleDict:  # type: ignore[override]
        return self.heads

    @abstractmethod
    def features(self, h: Tensor) -> Tensor: ...

    def validate_plan(self, plan: Plan) -> None:
        self.set_widths(plan)

    def new_head(self, width: int) -> Head:
        last: nn.Linear = self.__dict__["last"]
        if width == last.in_features:
            return Head(last.weight, last.bias)
        return random_head(last.out_features, width, last.weight)

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        x = self.features(h)
        last: nn.Linear = self.__dict__["last"]
        if str(x.shape[-1]) not in self.head and x.shape[-1] == last.in_features:
            out: Tensor = last(x)
            return out if rows is None else out[..., rows]
        if str(x.shape[-1]) not in self.head:
            problem = f"no head reads {x.shape[-1]} features"
            remedy = "call tg.prepare(stack, topology) for the topology"
            raise StackError(problem, setting="heads", given=x.shape[-1], remedy=remedy)
        return self.head[str(x.shape[-1])](x, stage, rows)

    @torch.no_grad()
    def verify(self, images: Tensor) -> None:
        """Raise StackError unless the stack gives the network's logits bit for bit, both in eval mode."""
        training = self.model.training
        self.model.eval()
        h = self.embed(images)
        for layer in self.layers:
            h = layer(h, self.layer_context(h, images))
        ours, theirs = self.__dict__["last"](self.features(h)), self.model(images)
        self.model.train(training)
        if not torch.equal(ours, theirs):
            raise StackError(
                f"the stack differs from {type(self.model).__name__} by {(ours - theirs).abs().max():.3g}",
                setting="model",
                given=type(self.model).__name__,
                remedy="write a Stack for this network instead",
            )


class ResNetStack(TorchvisionStack):
    """torchvision.models.ResNet: resnet18, resnet50, wide_resnet50_2 and so on."""

    model: Any

    def __init__(self, model: Any) -> None:
        blocks = [
            block for group in (model.layer1, model.layer2, model.layer3, model.layer4) for block in group
        ]
        super().__init__(model, blocks, model.fc)
        self._outputs = [_channels(block) for block in blocks]

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        m = self.model
        return m.maxpool(m.relu(m.bn1(m.conv1(inputs))))

    def features(self, h: Tensor) -> Tensor:
        return torch.flatten(self.model.avgpool(h), 1)

    def width_after(self, layer: int) -> int:
        return self._outputs[layer]


class VisionTransformerStack(TorchvisionStack):
    """torchvision.models.VisionTransformer: vit_b_16 and its kin."""

    model: Any

    def __init__(self, model: Any) -> None:
        head = list(model.heads)
        if len(head) != 1 or not isinstance(head[0], nn.Linear):
            problem = "this VisionTransformer has a head of several layers"
            raise StackError(problem, setting="model", remedy="only a linear one is supported")
        super().__init__(model, list(model.encoder.layers), head[0])

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        m = self.model
        patches = m._process_input(inputs)
        first = m.class_token.expand(len(patches), -1, -1)
        return m.encoder.dropout(torch.cat([first, patches], dim=1) + m.encoder.pos_embedding)

    def features(self, h: Tensor) -> Tensor:
        return self.model.encoder.ln(h)[:, 0]

    def width_after(self, layer: int) -> int:
        last: nn.Linear = self.__dict__["last"]
        return last.in_features


def _channels(block: nn.Module) -> int:
    """The output channels of a residual block: those of its last convolution."""
    convolutions = [m for m in block.modules() if isinstance(m, nn.Conv2d)]
    names = dict(block.named_children())
    last = names.get("conv3", names.get("conv2", convolutions[-1]))
    assert isinstance(last, nn.Conv2d)
    return last.out_channels


def adapt_torchvision(model: nn.Module, images: Tensor | None = None) -> TorchvisionStack:
    """A stack of one of torchvision's networks; with `images`, (batch, 3, height, width), it is verified."""
    if all(hasattr(model, name) for name in _RESNET):
        stack: TorchvisionStack = ResNetStack(model)
    elif all(hasattr(model, name) for name in _VIT):
        stack = VisionTransformerStack(model)
    else:
        allowed = "a ResNet or VisionTransformer of torchvision"
        raise StackError(setting="model", given=type(model).__name__, allowed=allowed)
    if images is not None:
        stack.verify(images)
    return stack
