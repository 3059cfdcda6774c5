"""The baselines of the papers: each against its formula, each local, each a run that resumes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raising import refused
from topograd.errors import ConfigError
from topograd.exec.local_objectives import Autoencoder, Diversity, ForwardForward
from topograd.exec.train_step import train_step
from topograd.nn.aux_heads import EMACopy, RidgeHead
from topograd.nn.gpt import GPT
from topograd.nn.images.config import ImageConfig
from topograd.nn.images.stack import ImageStack, make_image_stack
from topograd.nn.preparation import prepare
from topograd.runs.config import TrainConfig
from topograd.runs.session import open_run
from topograd.runs.topology_config import TopologyConfig
from topograd.topology.plan import Plan
from topograd.training.runs import resume, start

RULES: dict[str, dict[str, Any]] = {
    "autoencoder": {"partition": "1,1,1", "objective": "autoencoder"},
    "byol": {"partition": "1,1,1", "objective": "byol"},
    "ridge": {"partition": "1,1,1", "objective": "ridge"},
    "diversity": {"partition": "1,1,1", "objective": "diversity"},
    "targets": {"partition": "1,1,1", "graph": "targets"},
    "forward-forward": {"partition": "1,1", "objective": "forward-forward"},
    "decoders": {"partition": "1,1,1", "decoder": 1},
}


def made(rule: str, model: str = "mlp") -> tuple[ImageStack, Plan, Tensor, Tensor]:
    torch.manual_seed(0)
    widths = {"mlp": (6, 5), "forward-forward": (6, 5), "vgg": (3, 4, 4), "resnet8": (3, 4, 4)}[model]
    config = ImageConfig(network=model, widths=widths, shape=(1, 4, 4), classes=3)
    topology = TopologyConfig(**RULES[rule]).build(config.layers)
    stack = make_image_stack(config, topology).double()
    plan = prepare(stack, topology)
    images = torch.randint(0, 256, (8, 1, 4, 4), dtype=torch.uint8)
    return stack, plan, images, torch.randint(0, 3, (8,))


def test_an_autoencoder_reconstructs_and_the_last_stage_predicts() -> None:
    stack, plan, images, labels = made("autoencoder")
    losses = train_step(stack, plan, images, labels)
    assert plan.predicting() == [2]
    assert "6" not in stack.head
    x = stack.embed(images)
    h = stack.layers[0](x, stack.layer_context(x, images))
    rebuilt = stack.learned_relays()["autoencoder-0"](h)
    expected = (rebuilt - x).square().mean()
    torch.testing.assert_close(losses[0], expected.detach())
    gradient = torch.autograd.grad(expected / 3, stack.layers[0].linear.weight)[0]  # type: ignore[union-attr, arg-type]
    torch.testing.assert_close(stack.layers[0].linear.weight.grad, gradient)  # type: ignore[union-attr]


@pytest.mark.parametrize("rule", ["autoencoder", "byol", "ridge", "diversity"])
@pytest.mark.parametrize("model", ["mlp", "vgg", "resnet8"])
def test_nothing_crosses_a_boundary(rule: str, model: str) -> None:
    """With the losses behind it gone, a stage's layers have the gradient that they had."""
    stack, plan, images, labels = made(rule, model)
    state = {name: value.clone() for name, value in stack.state_dict().items()}
    train_step(stack, plan, images, labels)
    whole = [p.grad.clone() for p in stack.layers[0].parameters() if p.grad is not None]
    stack.zero_grad()
    stack.load_state_dict(state)
    train_step(stack, plan.halted([1, 2]), images, labels)
    alone = [p.grad for p in stack.layers[0].parameters() if p.grad is not None]
    assert len(whole) == len(alone) > 0
    for one, other in zip(whole, alone, strict=True):
        torch.testing.assert_close(one, other)


def test_goodness_has_its_own_gradient_alone() -> None:
    """∂/∂h of softplus(θ - z_y) with z = mean(h²) is -σ(θ - z_y) 2h/d, and nothing reaches the layer
    before."""
    stack, plan, images, labels = made("forward-forward", "forward-forward")
    assert plan.prediction.kind == "sum"
    losses = train_step(stack, plan, images, labels)
    x = stack.embed(images)
    ctx = stack.layer_context(x, images)
    h = stack.layers[0](x, ctx).detach().requires_grad_()
    z = h.square().mean(-1)
    loss = ForwardForward()(z, None, None, labels)
    torch.testing.assert_close(losses[0], loss.detach() / 8)
    loss.backward()
    true = F.one_hot(labels, 3).bool()
    slope = torch.where(true, -torch.sigmoid(2 - z), torch.sigmoid(z - 2) / 2)
    torch.testing.assert_close(h.grad, slope.detach().unsqueeze(-1) * 2 * h.detach() / h.shape[-1])
    shown = stack.layers[0](x, ctx)
    shown.backward(h.grad / 8 / 2)
    ours = {n: p.grad.clone() for n, p in stack.layers[0].named_parameters() if p.grad is not None}
    stack.zero_grad()
    train_step(stack, plan, images, labels)
    for name, parameter in stack.layers[0].named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(2 * parameter.grad, ours[name])  # ours: the step's and the hand-made one


def test_diversity_by_hand() -> None:
    z, prior = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[0.0, 3.0, 1.0]])
    p, q = z.softmax(-1)[0, 1:], prior.softmax(-1)[0, 1:]
    cosine = (p @ q) / (p.norm() * q.norm())
    target = torch.tensor([0])
    expected = F.cross_entropy(z, target) + 0.1 * cosine
    torch.testing.assert_close(Diversity()(z, prior, None, target), expected)
    assert torch.equal(Diversity()(z, None, None, target), F.cross_entropy(z, target))


def test_the_head_of_ridge_is_the_one_that_predicts() -> None:
    stack, plan, images, labels = made("ridge")
    train_step(stack, plan, images, labels)
    h = stack.layers[0](stack.embed(images), stack.layer_context(stack.embed(images), images))
    solved = stack.learned_relays()["ridge-0"]
    assert isinstance(solved, RidgeHead)
    expected = F.pad(h, (0, 1), value=1.0) @ solved.weight
    torch.testing.assert_close(stack.readout(h, 0), expected)


@pytest.mark.covers("images", "train", "resume")
@pytest.mark.covers("images", "train", "resume", feature="local rules")
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_a_run_that_resumes_bit_for_bit(
    rule: str, image_config: TrainConfig, tmp_path: Path
) -> None:
    images = image_config.model
    assert isinstance(images, ImageConfig)
    if rule == "forward-forward":
        images = replace(images, network=rule, widths=(12, 9))
    settings = replace(image_config, topology=TopologyConfig(**RULES[rule]), steps=4, model=images)
    whole = start(settings, tmp_path / "whole")
    result = whole.train()
    start(settings, tmp_path / "parts").train(stop_after=2)
    resume(tmp_path / "parts").train()
    ours, theirs = open_run(tmp_path / "parts"), open_run(tmp_path / "whole")
    assert ours.weights == theirs.weights
    assert 0 <= result["accuracy"]["prediction"] <= 1


@pytest.mark.covers("gpt", "train", feature="local rules")
@pytest.mark.parametrize("objective", ["autoencoder", "byol"])
def test_models_of_text_take_them_too(objective: str) -> None:
    """By the formulas of the module, with every weight at random."""
    torch.manual_seed(0)
    stack = GPT(layers=2, width=8, heads=2, vocab=11, context=6).double()
    plan = prepare(stack, TopologyConfig(partition="1,1", objective=objective).build(2))
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    tokens, targets = torch.randint(0, 11, (2, 2, 6))
    losses = train_step(stack, plan, tokens, targets)
    x = stack.embed(tokens)
    ctx = stack.layer_context(x, tokens)
    h = stack.layers[0](x, ctx)
    own = stack.learned_relays()[f"{objective}-0"]
    if isinstance(own, EMACopy):
        with torch.no_grad():
            wanted = stack.features(own.target[0](h, ctx))
        cosine = F.cosine_similarity(own.predictor(stack.features(h)), wanted, dim=-1)
        expected = F.cross_entropy(stack.readout(h, 0).flatten(0, 1), targets.flatten())
        expected = expected + 0.5 * (2 - 2 * cosine).mean()
    else:
        expected = (own(h) - x).square().mean()
    torch.testing.assert_close(losses[0], expected.detach())
    weight = next(stack.layers[0].parameters())
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, torch.autograd.grad(expected / 2, weight)[0])
    last = stack.readout(stack.layers[1](h.detach(), ctx), 1).flatten(0, 1)
    torch.testing.assert_close(losses[1], F.cross_entropy(last, targets.flatten()).detach())


def test_logits_alone_are_not_enough() -> None:
    with refused(ConfigError, setting="objective", given="Autoencoder"):
        Autoencoder()(torch.zeros(1, 2), None, None, torch.zeros(1))
