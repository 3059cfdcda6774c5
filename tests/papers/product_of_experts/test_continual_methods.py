"""What each method adds to finetuning."""

from collections.abc import Callable

import pytest
import torch

from papers.product_of_experts.continual_methods import (
    KEPT,
    METHODS,
    Ewc,
    Learner,
    Replay,
    Sizes,
    Specialists,
    StagedDistilled,
    fisher_diagonal,
)
from papers.product_of_experts.continual_tasks import TaskData
from topograd.data.images import ImageSet
from topograd.nn.images.config import ImageConfig

NETWORK = ImageConfig(widths=(8, 6), shape=(1, 4, 4), classes=4)
SIZES = Sizes(network=NETWORK, steps=40, batch=16, rate=0.03, strength=0.5)


@pytest.fixture(scope="module")
def tasks() -> list[TaskData]:
    """Two tasks of two classes that differ by the row that is bright."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for first in (0, 2):
        labels = first + torch.arange(40) % 2
        images = torch.randint(0, 60, (40, 1, 4, 4), generator=generator)
        images[torch.arange(40), 0, labels] += 180
        pictures = ImageSet(images.to(torch.uint8), labels)
        made.append(TaskData((first, first + 1), pictures, pictures))
    return made


Learned = Callable[[str], Learner]


@pytest.fixture(scope="module")
def learned(tasks: list[TaskData]) -> Learned:
    def make(name: str) -> Learner:
        learner = METHODS[name](SIZES, 0)
        for task in tasks:
            learner.learn(task)
        return learner

    return make


def hits(learner: Learner, task: TaskData) -> float:
    return (learner.predict(task.test.images) == task.test.labels).double().mean().item()


def test_finetuning_learns_the_last_task_and_joint_learning_all(
    learned: Learned, tasks: list[TaskData]
) -> None:
    assert hits(learned("finetune"), tasks[1]) > 0.9
    assert hits(learned("joint"), tasks[0]) > 0.7


def test_replay_keeps_pictures(learned: Learned, tasks: list[TaskData]) -> None:
    learner = learned("replay")
    assert isinstance(learner, Replay)
    assert sum(map(len, learner.kept)) == 2 * min(KEPT, 40)
    assert learner.memory() == 80 * 17
    assert hits(learner, tasks[0]) > 0.5


def test_ewc_pulls_by_fisher(learned: Learned, tasks: list[TaskData]) -> None:
    learner = learned("ewc")
    assert isinstance(learner, Ewc)
    name, parameter = next(iter(learner.stack.named_parameters()))
    parameter.grad = torch.zeros_like(parameter)
    with torch.no_grad():
        parameter.add_(0.1)
    learner.pull()
    torch.testing.assert_close(parameter.grad, 500 * learner.fisher[name] * 0.1, rtol=1e-3, atol=1e-7)


def test_fisher_of_the_bias_is_that_of_the_softmax(tasks: list[TaskData]) -> None:
    """For the last bias, ∂ log p(y) = onehot(y) - p, so F is the mean of its square over drawn labels."""
    learner = Learner(SIZES, 3)
    images = tasks[0].train.images[:20]
    found = fisher_diagonal(learner.stack, learner.plan, images, 5)["layers.2.linear.bias"]
    torch.manual_seed(5)
    p = learner.stack.eval()(images).softmax(-1).detach()
    labels = torch.distributions.Categorical(logits=p.log()).sample()
    expected = (torch.nn.functional.one_hot(labels, 4) - p).square().mean(0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_stages_distil_and_are_read_in_two_ways(learned: Learned, tasks: list[TaskData]) -> None:
    learner = learned("poe-kd")
    assert isinstance(learner, StagedDistilled)
    assert learner.predictors().keys() == {"", "poe-shrink"}
    assert len(learner.plan.stages) == 3
    assert learner.plan.prediction.kind == "sum"
    assert hits(learned("lwf"), tasks[0]) > 0.5


def test_specialists_leave_the_base_alone(tasks: list[TaskData]) -> None:
    learner = METHODS["specialists"](SIZES, 0)
    assert isinstance(learner, Specialists)
    learner.learn(tasks[0])
    base = {name: value.clone() for name, value in learner.stack.state_dict().items()}
    early = learner.predict(tasks[0].test.images)
    learner.learn(tasks[1])
    assert all(torch.equal(value, base[name]) for name, value in learner.stack.state_dict().items())
    for expert, _ in learner.experts:
        assert all(torch.equal(expert.state_dict()[name], value) for name, value in base.items())
    near_first = learner.predict(tasks[0].test.images)
    assert (near_first == early).double().mean() > 0.5
    assert learner.memory() > 0
