"""The base class of stacks on images: normalised x0, layers of changing shape, pooling heads.

    x0 = (pixels / 255 - mean) / std            (batch, channels, height, width)
    h  = layer(h, ctx)                          any shape behind the batch
    z  = W_w pool(h) + b_w                      pool(h) (batch, w); a head for each width w that occurs

Stages whose outputs are equally wide share a head; with per-stage heads each adds a delta of its own
(`nn/heads.py`). The topology decides where a layer stands: a layer behind the embedding is the network's
first, one behind layer i its next, and one that starts elsewhere (a private decoder, an appended specialist)
is a residual layer that keeps the shape and starts as the identity. So a forest is several networks side by
side.

A subclass writes `layer` and `extra`, and may write `features`.
"""

import math
from abc import abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from topograd.errors import StackError
from topograd.nn.heads import Head
from topograd.nn.images.config import NETWORKS, ImageConfig
from topograd.nn.stack import Stack
from topograd.topology.dag import EMBEDDING, Stage, Topology
from topograd.topology.plan import AnyTopology, Plan, topology_of

Shape = tuple[int, ...]
"""Of a hidden state, behind the batch."""


class LogitsHead(Head):
    """The head of a layer that gives logits itself: z = x, and W_k x more where a stage has its own."""

    def __init__(self, classes: int) -> None:
        super().__init__(torch.zeros(classes, classes))
        del self.weight
        self.register_buffer("weight", torch.eye(classes), persistent=False)

    def forward(self, x: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        if self.has_delta(stage):
            return super().forward(x, stage, rows)
        return x if rows is None else x[..., rows]


class WidthHeads(Stack):
    """A stack with a shared head for each width of features that occurs, and deltas per stage."""

    head: nn.ModuleDict
    """By width; a subclass makes it behind its layers, which is the order of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self._stage_widths: dict[int, int] = {}

    def add_heads(self, stages: Iterable[int], rank: int | None = None) -> bool:
        added = [self._head_of(stage).add([stage], rank) for stage in stages]
        return any(added)

    def has_head(self, stage: int) -> bool:
        known = str(self._stage_widths.get(stage)) in self.head
        return known and self._head_of(stage).has_delta(stage)

    def head_parameters(self, stage: int) -> list[nn.Parameter]:
        return self._head_of(stage).own_parameters(stage) if self.has_head(stage) else []

    @property
    def last_stage(self) -> int:
        return max((stage for stage in self._stage_widths if self.has_head(stage)), default=0)

    def _head_of(self, stage: int) -> Head:
        head = self.head[str(self._stage_widths[stage])]
        assert isinstance(head, Head)
        return head

    def set_widths(self, plan: Plan) -> None:
        """Record the width at the end of every stage, and add the heads that are missing."""
        for planned in plan.stages:
            width = self._stage_widths[planned.head] = self.width_after(planned.stage.stop - 1)
            missing = planned.predicts and str(width) not in self.head
            if missing and (head := self.new_head(width)) is not None:
                self.head[str(width)] = head

    @abstractmethod
    def width_after(self, layer: int) -> int:
        """The number of features after a layer."""

    @abstractmethod
    def new_head(self, width: int) -> Head | None:
        """A head for features of this width; None where they need none."""


def random_head(classes: int, width: int, like: Tensor) -> Head:
    """A head drawn like torch's linear layers, with a bias of zeros."""
    bound = 1 / math.sqrt(width)
    weight = torch.empty(classes, width, device=like.device, dtype=like.dtype).uniform_(-bound, bound)
    bias = torch.zeros(classes, device=like.device, dtype=like.dtype)
    return Head(nn.Parameter(weight), nn.Parameter(bias))


class ImageStack(WidthHeads):
    """A network on images, its layers laid out by a topology; by default a chain."""

    def __init__(self, config: ImageConfig, topology: AnyTopology | None = None) -> None:
        super().__init__()
        self.config = config
        channels = config.shape[0]
        for name in ("mean", "std"):
            values = torch.tensor(getattr(config, name)).expand(channels).clone()
            self.register_buffer(name, values.reshape(channels, 1, 1), persistent=False)
        self.make_embedding()
        self.layers = nn.ModuleList()
        self.head = nn.ModuleDict()
        self.shapes: list[tuple[Shape, Shape]] = []
        """The input and output shape of each layer."""
        topology = topology_of(str(config.layers) if topology is None else topology, config.layers)
        self._build(topology)
        self.validate_plan(Plan.of(topology, topology.layers))

    # The parts of a network

    def make_embedding(self) -> None:
        """Make the modules that `embed` needs beside mean and std."""

    @property
    def start(self) -> Shape:
        """The shape of x0."""
        return self.config.shape

    @abstractmethod
    def layer(self, depth: int, shape: Shape) -> tuple[nn.Module, Shape]:
        """The network's layer number `depth`, for inputs of `shape`, and the shape of its outputs."""

    @abstractmethod
    def extra(self, shape: Shape) -> nn.Module:
        """A layer that keeps the shape, and is the identity at first."""

    def features(self, h: Tensor) -> Tensor:
        """(batch, width) of a hidden state: the mean over all places."""
        return h.flatten(2).mean(2) if h.dim() > 2 else h

    def feature_width(self, shape: Shape) -> int:
        """How many numbers `features` gives."""
        return shape[0]

    def input_shape(self, layer: int) -> Shape:
        return self.shapes[layer][0]

    def output_shape(self, layer: int) -> Shape:
        return self.shapes[layer][1]

    # The stack

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        if tuple(inputs.shape[1:]) != self.config.shape:
            given, wanted = (" × ".join(map(str, shape)) for shape in (inputs.shape[1:], self.config.shape))
            problem = f"an image is {given}"
            remedy = f"this network takes {wanted} (channels × height × width)"
            raise StackError(problem, setting="inputs", given=tuple(inputs.shape[1:]), remedy=remedy)
        mean, std = self.get_buffer("mean"), self.get_buffer("std")
        return (inputs.to(mean.dtype) / 255 - mean) / std

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        x = self.features(h)
        solved = self.learned_relays().get(f"ridge-{stage}")
        if solved is not None:  # a head in closed form (`nn/aux_heads.py`)
            logits: Tensor = solved(x)
            return logits if rows is None else logits[..., rows]
        logits = self.head[str(x.shape[-1])](x, stage, rows)
        return logits

    def _build(self, topology: Topology) -> None:
        """Make the layers, each for the place where the topology has it."""
        made: dict[int, nn.Module] = {}
        shapes: dict[int, tuple[Shape, Shape]] = {}
        depths: dict[int, int] = {}
        for stage in topology.stages:
            shape, depth = self._source(topology, stage, shapes, depths)
            for i in range(stage.start, stage.stop):
                if i not in made:
                    fresh = depth is not None and depth < self.config.layers
                    before = shape
                    if fresh:
                        assert depth is not None
                        made[i], shape = self.layer(depth, before)
                    else:
                        made[i] = self.extra(before)
                    shapes[i], depths[i] = (before, shape), -1 if depth is None else depth
                shape = shapes[i][1]
                depth = None if depth is None else depth + 1
        self.layers.extend(made[i] for i in sorted(made))
        self.shapes = [shapes[i] for i in sorted(shapes)]

    def _source(
        self, topology: Topology, stage: Stage, shapes: dict[int, tuple[Shape, Shape]], depths: dict[int, int]
    ) -> tuple[Shape, int | None]:
        """The shape that a stage starts from, and how many of the network's layers lie behind it."""
        source, tap = topology.source_layer(stage.sources[0])
        if source == EMBEDDING:
            return self.start, 0
        behind = depths[tap - 1]
        goes_on = stage.start == tap and behind >= 0
        return shapes[tap - 1][1], behind + 1 if goes_on else None

    def validate_plan(self, plan: Plan) -> None:
        """Check that the inputs of every stage have the shape of its first layer, and record its width."""
        for planned in plan.stages:
            taken = self.shapes[planned.stage.start][0]
            for output, _ in planned.inputs:
                given = self.start if output.source == EMBEDDING else self.shapes[output.layer - 1][1]
                if given != taken:
                    shown = [" × ".join(map(str, shape)) for shape in (given, taken)]
                    at = f"stage {planned.index + 1}"
                    problem = f"{at} is given {shown[0]} and its first layer takes {shown[1]}"
                    remedy = "build the network for this topology, or choose another"
                    raise StackError(problem, setting="topology", given=given, remedy=remedy)
        self.set_widths(plan)

    def width_after(self, layer: int) -> int:
        return self.feature_width(self.shapes[layer][1])

    def new_head(self, width: int) -> Head | None:
        return random_head(self.config.classes, width, self.get_buffer("mean"))

    @property
    def vocab(self) -> int:
        return self.config.classes

    @property
    def width(self) -> int:
        widths = {self.feature_width(shape) for _, shape in self.shapes}
        if len(widths) > 1 or any(len(given) > 1 for _, given in self.shapes):
            problem = "the layers of this network have different shapes"
            raise StackError(problem, setting="relay", remedy="learned relays need one width")
        return widths.pop()


def make_image_stack(config: ImageConfig, topology: AnyTopology | None = None) -> ImageStack:
    """The network that the settings name, for a topology."""
    name = "resnet20" if config.family == "resnet" else config.network
    return NETWORKS[name](config, topology)
