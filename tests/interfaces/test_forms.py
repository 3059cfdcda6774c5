"""The scan on every form of interface: gradients of one graph by autograd, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from papers.latent_bounded_interfaces.causality import future_gradient
from raising import refused
from tests.nn.test_interface_config import Half, HalfRelay
from topograd.errors import ConfigError
from topograd.exec.forward import stage_logits
from topograd.exec.gradient import GradientEngine
from topograd.exec.train_step import train_step
from topograd.interfaces.engines import Hybrid, Scan
from topograd.nn.gpt import GPT
from topograd.nn.interface import add_interfaces
from topograd.nn.interface_config import InterfaceSettings, parse_interface, parse_interfaces
from topograd.nn.stack import LayerContext
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

VOCAB, CONTEXT, WIDTH = 11, 6, 8
FORMS: dict[str, InterfaceSettings | tuple[InterfaceSettings, ...]] = {
    "attention": parse_interface("attention:S=3,r=4"),
    "monarch": parse_interface("S=3,r=4,maps=monarch"),
    "bypass": parse_interface("residual:r=3,bypass=0.3"),
    "residual-ranks": parse_interfaces("residual:r=2/4/3", 3),
    "segments-ranks": parse_interfaces("S=3,r=5/3/4,pool=tail/mean/cumulative", 3),
    "published-ranks": parse_interfaces("published:r=5/3/4,read=both/both/message", 3),
    "residual": parse_interface("residual:r=3"),
    "residual-full": parse_interface(f"residual:r={WIDTH}"),
    "residual-learned": parse_interface("residual:r=3,basis=learned"),
    "published": parse_interface("published:r=5"),
    "own": Half(),
}
ENGINES: dict[str, GradientEngine] = {
    "loop": Scan(),
    "loop-untrimmed": Scan(trimmed=False),
    "batched": Scan("batched"),
    "forward": Scan("forward", 4),
    "tree": Scan(scan="tree"),
    "hybrid": Hybrid(),
}


def model(form: str, architecture: str = "transformer") -> tuple[GPT, Topology]:
    settings = FORMS[form]
    topology = Topology.regions("2,1,1,1", first_region=first(form).first_region)
    torch.manual_seed(0)
    stack = GPT(
        layers=5,
        width=WIDTH,
        heads=2,
        vocab=VOCAB,
        context=CONTEXT,
        architecture=architecture,
        ssm_state=4,
    ).double()
    add_interfaces(stack, settings, 4, WIDTH, CONTEXT)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return stack, topology


def first(form: str) -> InterfaceSettings:
    settings = FORMS[form]
    return settings[0] if isinstance(settings, tuple) else settings


def batch() -> tuple[Tensor, Tensor]:
    inputs, targets = torch.randint(VOCAB, (2, 2, CONTEXT), generator=torch.Generator().manual_seed(1))
    targets[0, 3] = -100
    return inputs, targets


def taken(stack: GPT) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in stack.named_parameters() if p.grad is not None}
    stack.zero_grad(set_to_none=True)
    return grads


def by_one_graph(stack: GPT, topology: Topology) -> dict[str, Tensor]:
    inputs, targets = batch()
    logits = stage_logits(stack, Plan.of(topology, 5), 3, inputs, lean=False)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    return taken(stack)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    off = {name: float((actual[name] - g).norm() / g.norm()) for name, g in expected.items()}
    assert max(off.values()) < 1e-12, off


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", ENGINES)
def test_every_gradient_is_autograd_s(form: str, way: str) -> None:
    stack, topology = model(form)
    expected = by_one_graph(stack, topology)
    learning = {name for name, p in stack.named_parameters() if p.requires_grad}
    assert expected.keys() == learning, "every parameter that learns reaches the loss"
    train_step(stack, topology, *batch(), gradient=ENGINES[way])
    assert_same(taken(stack), expected)


@pytest.mark.parametrize("form", ["residual", "published"])
@pytest.mark.parametrize("architecture", ["mamba3", "hybrid"])
def test_other_architectures(form: str, architecture: str) -> None:
    stack, topology = model(form, architecture)
    expected = by_one_graph(stack, topology)
    train_step(stack, topology, *batch(), gradient=Scan())
    assert_same(taken(stack), expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_form_says_whether_it_is_causal(form: str) -> None:
    stack, topology = model(form)
    leak = future_gradient(stack, Plan.of(topology, 5), batch()[0])
    assert (leak == 0) == first(form).causal


@pytest.mark.parametrize("way", ENGINES)
def test_inputs_within_the_first_segment(way: str) -> None:
    """No segment is over: messages have no states, and gradient is that of the last region and its canvas."""
    stack, topology = model("attention")
    inputs, targets = (one[:, :2] for one in batch())
    logits = stage_logits(stack, Plan.of(topology, 5), 3, inputs, lean=False)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    expected = taken(stack)
    train_step(stack, topology, inputs, targets, gradient=ENGINES[way])
    actual = taken(stack)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=0, atol=1e-12)


class DeafRelay(HalfRelay):
    """One that reads the canvas alone."""

    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        return self.gain * ctx.x0


@pytest.mark.parametrize("way", ENGINES)
def test_a_region_that_does_not_read_its_message_sends_no_gradient(way: str) -> None:
    stack, topology = model("own")
    for relay in stack.learned_relays().values():
        relay.__class__ = DeafRelay
    logits = stage_logits(stack, Plan.of(topology, 5), 3, batch()[0], lean=False)
    F.cross_entropy(logits.flatten(0, 1), batch()[1].flatten()).backward()
    expected = taken(stack)
    train_step(stack, topology, *batch(), gradient=ENGINES[way])
    actual = taken(stack)
    assert not any(actual.pop(name).any() for name in actual.keys() - expected.keys())
    assert_same(actual, expected)


@pytest.mark.parametrize("form", ["residual", "published", "attention"])
def test_formulas_by_hand_know_segments_only(form: str) -> None:
    stack, topology = model(form)
    with refused(ConfigError, setting="jacobian", given="pullback"):
        train_step(stack, topology, *batch(), gradient=Scan("pullback"))
