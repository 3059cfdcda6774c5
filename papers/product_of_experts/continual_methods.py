"""Ways to learn tasks one after another, all through the one executor.

    finetune      backprop on each task in turn
    joint         backprop on all tasks so far: what forgetting nothing would give
    ewc           finetune + Σ_i (c/2) F_i (θ_i - θ*_i)²; F the Fisher matrix's diagonal, summed over tasks
    lwf           finetune + distillation from the network as it was before the task
    replay        finetune on batches of which half are kept pictures of earlier tasks
    poe-kd        stages with losses of their own, each distilled from the product of all stages before the
                  task
    poe-shrink    the same network, its stages weighted by 1 - H / log C when it predicts (retroactive
                  shrinkage)
    specialists   a base that is frozen after the first task, a stage and a head for each task, and a router:
                  the task whose mean base features lie nearest names the specialist

EWC: Kirkpatrick et al. 2017, with labels drawn from the network itself. LwF: Li and Hoiem 2016. Distillation
is the objective `distillation` with the earlier network as its teacher. The router is the nearest mean of
classes' features (iCaRL's rule), and a specialist is asked only for the classes of its task. In the paper's
table ("Product of Experts" A.3) are finetune, ewc, poe-kd and poe-shrink.

`memory` is what a method keeps beside the network's own weights, in bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from papers.fit import fit
from papers.product_of_experts.continual_tasks import Predict, TaskData, batches
from papers.product_of_experts.image_arms import optimizer
from topograd.data.images import ImageSet
from topograd.exec.forward import Predictor, stage_outputs
from topograd.exec.objectives import Distillation
from topograd.exec.train_step import train_step
from topograd.nn.images.config import ImageConfig
from topograd.nn.images.stack import ImageStack, make_image_stack
from topograd.nn.pooling import pool
from topograd.nn.preparation import prepare
from topograd.runs.config import OptimizerConfig
from topograd.topology.dag import Edge, Stage, Topology
from topograd.topology.plan import Plan
from topograd.training.image_evaluation import image_logits

FISHER_ROWS = 100
"""ImageSet that a Fisher matrix is read from."""
KEPT = 40
"""ImageSet that replay keeps of each task."""
TEMPERATURE = 2.0


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large and how long."""

    network: ImageConfig
    steps: int
    """For each task."""
    batch: int
    rate: float = 0.002
    strength: float = 0.5
    """The teacher's share of the loss, or for ewc its factor c over 1000."""

    def optimizer(self) -> OptimizerConfig:
        return replace(optimizer(self.rate), warmdown=0.3, floor=0.1)


@dataclass
class Learner:
    """A network that learns tasks in turn. Subclasses change what a task adds."""

    sizes: Sizes
    seed: int
    partition: str = "L"
    objective: str = "cross-entropy"
    seen: list[TaskData] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        layers = self.sizes.network.layers
        partition = str(layers) if self.partition == "L" else self.partition
        self.topology = Topology.chain(partition, objective=self.objective)
        if self.partition != "L":
            self.topology = replace(self.topology, prediction="sum")
        self.stack: ImageStack = make_image_stack(self.sizes.network, self.topology)
        self.plan: Plan = prepare(self.stack, self.topology)

    def learn(self, task: TaskData) -> None:
        """Learn one more task."""
        self.train(task.train, len(self.seen))
        self.seen.append(task)

    def train(self, pictures: ImageSet, number: int) -> None:
        """The steps of a task; the order of its pictures hangs on the seed and the task."""
        order = batches(pictures, self.sizes.batch, 1000 * self.seed + number)
        fit(self.stack, self.plan, order, self.sizes.steps, self.sizes.optimizer())

    def predict(self, images: Tensor) -> Tensor:
        """The class that each picture is given."""
        return image_logits(self.stack, self.plan, images).full.argmax(-1)

    def memory(self) -> int:
        """Bytes that are kept beside the weights."""
        return 0

    def predictors(self) -> dict[str, Predict]:
        """What the network predicts by, by the name of the method."""
        return {"": self.predict}


class Joint(Learner):
    """Learns every task again together with the new one."""

    def learn(self, task: TaskData) -> None:
        self.seen.append(task)
        images, labels = (torch.cat([getattr(t.train, n) for t in self.seen]) for n in ("images", "labels"))
        self.train(ImageSet(images, labels), len(self.seen))

    def memory(self) -> int:
        return sum(task.train.images.numel() for task in self.seen)


class Replay(Learner):
    """Half of each batch are kept pictures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kept: list[ImageSet] = []

    def learn(self, task: TaskData) -> None:
        order = batches(task.train, self.sizes.batch, 1000 * self.seed + len(self.seen))
        if self.kept:
            images, labels = (torch.cat([getattr(k, n) for k in self.kept]) for n in ("images", "labels"))
            old = batches(ImageSet(images, labels), self.sizes.batch, self.seed)
            half = self.sizes.batch // 2
            order = (
                (torch.cat((x[:half], u[:half])), torch.cat((y[:half], v[:half])))
                for (x, y), (u, v) in zip(order, old, strict=False)
            )
        fit(self.stack, self.plan, order, self.sizes.steps, self.sizes.optimizer())
        self.kept.append(task.train.sample(KEPT))
        self.seen.append(task)

    def memory(self) -> int:
        return sum(retained.images.numel() + len(retained) for retained in self.kept)


class Distilled(Learner):
    """The network before the task teaches the one that learns it: LwF, and with stages PoE + KD."""

    def learn(self, task: TaskData) -> None:
        teacher = Predictor(copy.deepcopy(self.stack).eval().requires_grad_(False), self.plan)
        mix = self.sizes.strength if self.seen else 0.0
        order = batches(task.train, self.sizes.batch, 1000 * self.seed + len(self.seen))
        objectives = {"distillation": Distillation(TEMPERATURE, mix)}
        settings = self.sizes.optimizer()
        fit(self.stack, self.plan, order, self.sizes.steps, settings, teacher=teacher, objectives=objectives)
        self.seen.append(task)

    def memory(self) -> int:
        return 4 * sum(p.numel() for p in self.stack.parameters())


class StagedDistilled(Distilled):
    """PoE + KD, read by the product of its stages and by their shrunken product."""

    def shrunken(self, images: Tensor) -> Tensor:
        """The class by Σ_k (1 - H_k / log C) z_k."""
        return pool(image_logits(self.stack, self.plan, images).alone, "shrinkage").argmax(-1)

    def predictors(self) -> dict[str, Predict]:
        return {"": self.predict, "poe-shrink": self.shrunken}


class Ewc(Learner):
    """Weights that mattered are held where they were."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fisher: dict[str, Tensor] = {}
        self.anchor: dict[str, Tensor] = {}

    def learn(self, task: TaskData) -> None:
        order = batches(task.train, self.sizes.batch, 1000 * self.seed + len(self.seen))
        penalty = self.pull if self.seen else None
        fit(self.stack, self.plan, order, self.sizes.steps, self.sizes.optimizer(), penalty=penalty)
        result = fisher_diagonal(self.stack, self.plan, task.train.sample(FISHER_ROWS).images, self.seed)
        for name, values in result.items():
            self.fisher[name] = self.fisher.get(name, torch.zeros_like(values)) + values
        self.anchor = {name: p.detach().clone() for name, p in self.stack.named_parameters()}
        self.seen.append(task)

    @torch.no_grad()
    def pull(self) -> None:
        """Add c F (θ - θ*) to the gradients."""
        for name, parameter in self.stack.named_parameters():
            if parameter.grad is not None:
                distance = parameter - self.anchor[name]
                parameter.grad.addcmul_(self.fisher[name], distance, value=1000 * self.sizes.strength)

    def memory(self) -> int:
        return 2 * 4 * sum(p.numel() for p in self.stack.parameters())


class Specialists(Learner):
    """A frozen base, and for each task a stage of its own behind it, found by the nearest mean of
    features."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.experts: list[tuple[ImageStack, Plan]] = []
        self.means: list[Tensor] = []

    def learn(self, task: TaskData) -> None:
        number = len(self.seen)
        if not self.seen:
            self.train(task.train, 0)
            self.stack.eval().requires_grad_(False)
        topology = self.behind_hidden()
        torch.manual_seed(self.seed + number)
        expert = make_image_stack(self.sizes.network, topology)
        plan = prepare(expert, topology)
        expert.load_state_dict(self.stack.state_dict(), strict=False)
        order = batches(task.train, self.sizes.batch, 1000 * self.seed + number)
        fit(expert, plan, order, self.sizes.steps, self.sizes.optimizer())
        self.experts.append((expert, plan))
        features = self.base_features(task.train.images)
        labels = task.train.labels
        self.means.append(torch.stack([features[labels == c].mean(0) for c in labels.unique()]))
        self.seen.append(task)

    def behind_hidden(self) -> Topology:
        """A stage behind the frozen base's last hidden layer: its logits would tell it less."""
        layers = self.sizes.network.layers
        base = Topology.chain(f"{layers - 1},1").stages
        still = tuple(replace(stage, frozen=True, weight=0.0, head=False) for stage in base)
        own = Stage(layers, layers + 1, (Edge(0),))
        return Topology(layers + 1, (*still, own), heads="per-stage")

    @torch.no_grad()
    def base_features(self, images: Tensor) -> Tensor:
        """What the base's last hidden layer says of some pictures, of length one."""
        before = Plan.of(Topology.chain(f"{self.sizes.network.layers - 1},1"), self.sizes.network.layers)
        hidden = [
            self.stack.features(stage_outputs(self.stack, before, part, [0])[0]) for part in images.split(500)
        ]
        return F.normalize(torch.cat(hidden), dim=-1)

    def predict(self, images: Tensor) -> Tensor:
        if not self.experts:
            return super().predict(images)
        features = self.base_features(images)
        near = torch.stack([torch.cdist(features, means).amin(1) for means in self.means], dim=1).argmin(1)
        message = torch.zeros(len(images), dtype=torch.long)
        for number, (expert, plan) in enumerate(self.experts):
            rows = (near == number).nonzero().flatten()
            if len(rows):
                logits = image_logits(expert, plan, images[rows]).full
                allowed = self.seen[number].train.labels.unique()
                message[rows] = allowed[logits[:, allowed].argmax(-1)]
        return message

    def memory(self) -> int:
        last = self.sizes.network.layers
        own = sum(
            p.numel()
            for expert, plan in self.experts
            for p in (*expert.layers[last].parameters(), *expert.head_parameters(plan.last))
        )
        return 4 * (own + sum(means.numel() for means in self.means))


def fisher_diagonal(stack: ImageStack, plan: Plan, images: Tensor, seed: int) -> dict[str, Tensor]:
    """F_i = mean over pictures of (∂ log p(y|x) / ∂θ_i)², y drawn from the network itself."""
    torch.manual_seed(seed)
    sums = {name: torch.zeros_like(p) for name, p in stack.named_parameters()}
    logits = image_logits(stack, plan, images).full
    labels = torch.distributions.Categorical(logits=logits).sample()
    for image, label in zip(images, labels, strict=True):
        stack.zero_grad(set_to_none=True)
        train_step(stack, plan, image.unsqueeze(0), label.unsqueeze(0))
        for name, parameter in stack.named_parameters():
            if parameter.grad is not None:
                sums[name] += parameter.grad.square()
    stack.zero_grad(set_to_none=True)
    return {name: total / len(images) for name, total in sums.items()}


Make = Callable[[Sizes, int], Learner]
METHODS: Mapping[str, Make] = {
    "finetune": Learner,
    "ewc": Ewc,
    "lwf": lambda sizes, seed: Distilled(sizes, seed, objective="distillation"),
    "replay": Replay,
    "poe-kd": lambda sizes, seed: StagedDistilled(
        sizes, seed, partition=",".join(["1"] * sizes.network.layers), objective="distillation"
    ),
    "specialists": Specialists,
    "joint": Joint,
}
"""poe-shrink is what poe-kd's network says when it is read otherwise."""
STRENGTHS: Mapping[str, tuple[float, ...]] = {
    "ewc": (1.0, 10.0, 100.0, 1000.0),
    "lwf": (0.3, 0.6, 0.9),
    "poe-kd": (0.1, 0.3, 0.6, 0.9),
}
"""What is tried for methods that have a strength."""
