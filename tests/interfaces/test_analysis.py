"""Norms, spectra and ranks of interface Jacobians: closed forms, and one whole graph as the other witness."""

import json
import math

import pytest
import torch
from torch import Tensor

from papers.latent_bounded_interfaces.measure import build_model, random_tokens
from papers.latent_bounded_interfaces.shape import Shape
from raising import refused
from topograd.errors import ConfigError, StackError
from topograd.exec.forward import run_stage
from topograd.exec.train_step import train_step
from topograd.interfaces import SegmentInterface
from topograd.interfaces.analysis import (
    adjoint_norms,
    analyse,
    describe_jacobians,
    message_rank,
    message_spread,
    singular_values,
)
from topograd.interfaces.engines import Scan
from topograd.interfaces.regions import Regions
from topograd.nn.gpt import GPT

SHAPE = Shape(regions=4, region_layers=1, width=16, heads=2, vocab=11, context=12, batch=2)
INTERFACE = SegmentInterface(segments=3, rank=5)


@pytest.fixture
def stack() -> GPT:
    stack = build_model(SHAPE, INTERFACE).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in stack.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(0.2 * noise)
    return stack


def rotated(*singular: float, seed: int) -> Tensor:
    """A matrix with these singular values."""
    generator = torch.Generator().manual_seed(seed)
    n = len(singular)
    left, right = torch.linalg.qr(torch.randn(2, n, n, generator=generator, dtype=torch.float64)).Q
    return left @ torch.diag(torch.tensor(singular, dtype=torch.float64)) @ right


def test_a_spectrum_and_what_follows_from_it() -> None:
    J = torch.stack([torch.stack([rotated(3, 1, 0, seed=k), rotated(5, 1, 0, seed=9 + k)]) for k in (1, 2)])
    found = describe_jacobians(J)
    assert found["local_norm"] == pytest.approx([4, 4])
    assert found["spectrum"][0] == pytest.approx([4, 1, 0])
    assert found["rms"] == pytest.approx([((10 / 3) ** 0.5 + (26 / 3) ** 0.5) / 2] * 2)
    entropies = [sum(-p * math.log(p) for p in ps) for ps in ((3 / 4, 1 / 4), (5 / 6, 1 / 6))]
    assert found["effective_rank"] == pytest.approx([sum(map(math.exp, entropies)) / 2] * 2)
    assert found["suffix_norm"][1] == pytest.approx(found["local_norm"][1])  # the last suffix is one Jacobian
    products = [torch.linalg.matrix_norm(J[1, b] @ J[0, b], 2).item() for b in range(2)]
    assert found["suffix_norm"][0] == pytest.approx(sum(products) / 2)
    assert found["suffix_norm"][0] < 16, "the leading directions are not aligned"


def test_the_product_is_in_the_order_of_the_regions() -> None:
    first, second = torch.zeros(2, 2), torch.zeros(2, 2)
    first[0, 1], second[0, 0] = 2.0, 3.0  # second @ first is not zero, first @ second is
    assert describe_jacobians(torch.stack([first, second])[:, None])["suffix_norm"] == pytest.approx([6, 3])
    assert describe_jacobians(torch.stack([second, first])[:, None])["suffix_norm"] == pytest.approx([0, 2])


def test_low_precision_is_raised() -> None:
    half = torch.eye(3, dtype=torch.bfloat16)
    assert singular_values(half).dtype == torch.float32
    assert singular_values(half.double()).dtype == torch.float64


def test_messages_around_their_mean() -> None:
    direction, mean = torch.tensor([1.0, -1.0, 0.0]), torch.tensor([5.0, 5.0, 5.0])
    line = mean + torch.arange(4.0).view(2, 2, 1) * direction
    assert message_rank(line).item() == pytest.approx(1, abs=1e-3)
    assert message_rank(mean.expand(2, 2, 3)).item() == 0
    square = torch.tensor([[[1.0, 0], [0, 1]], [[-1, 0], [0, -1]]])
    assert message_rank(square).item() == pytest.approx(2)


def test_the_spread_of_messages_by_hand() -> None:
    same = torch.tensor([1.0, -1.0]).expand(3, 2, 2)
    assert message_spread(same) == 0, "constant: it tells nothing of the data"
    apart = torch.tensor([[[1.0, -1.0]], [[-1.0, 1.0]]])
    assert message_spread(apart) == 1, "no mean is left"
    assert message_spread(torch.cat((apart, same[:2, :1]))).item() == pytest.approx(math.sqrt(3) / 2)


def test_adjoint_norms() -> None:
    adjoints = torch.tensor([[[3.0, 4.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 2.0]]])
    assert adjoint_norms(adjoints).tolist() == [3, 1]


def test_a_model_against_one_whole_graph(stack: GPT) -> None:
    inputs, targets = random_tokens(SHAPE)
    found = analyse(stack, SHAPE.topology, inputs, targets)
    regions = Regions.of(stack, SHAPE.topology)
    x0 = stack.embed(inputs)
    ctx = stack.layer_context(x0, inputs)
    messages = regions.messages(x0, ctx)
    h, _ = run_stage(stack, regions.plan.stages[-1], [messages[-1]], ctx)
    logits = stack.readout(h, 3)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    adjoints = torch.autograd.grad(loss, messages)
    assert found["loss"] == pytest.approx(loss.item())
    norms = [g.flatten(1).norm(dim=1).mean().item() for g in adjoints]
    assert found["adjoint_norm"] == pytest.approx(norms)
    assert found["message_rank"] == pytest.approx([message_rank(m.detach()).item() for m in messages])
    assert found["message_spread"] == pytest.approx([message_spread(m.detach()).item() for m in messages])
    engine = Scan()
    train_step(stack, SHAPE.topology, inputs, targets, gradient=engine)
    J = engine.jacobians
    assert J is not None
    assert {name: found[name] for name in describe_jacobians(J)} == describe_jacobians(J)


def test_what_a_layer_norm_takes_away(stack: GPT) -> None:
    found = analyse(stack, SHAPE.topology, *random_tokens(SHAPE))
    n, states = 10, 2
    assert [len(found[name]) for name in ("local_norm", "suffix_norm", "adjoint_norm", "message_rank")] == [
        *(2, 2, 3, 3)
    ]
    for spectrum, rank in zip(found["spectrum"], found["effective_rank"], strict=True):
        assert len(spectrum) == n
        assert max(spectrum[n - 2 * states :]) < 1e-12 < spectrum[n - 2 * states - 1]
        assert rank <= n - 2 * states
    assert all(1 < rank < INTERFACE.rank - 1 for rank in found["message_rank"])
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_gradients_stay_as_they_were(stack: GPT) -> None:
    inputs, targets = random_tokens(SHAPE)
    parameters = list(stack.parameters())
    kept = {id(p): torch.full_like(p, 7.0) for p in parameters[::2]}
    for parameter in parameters:
        parameter.grad = kept.get(id(parameter))
    analyse(stack, SHAPE.topology, inputs, targets)
    with refused(ConfigError, setting="targets"):
        analyse(stack, SHAPE.topology, inputs, targets[:, :-1])
    for parameter in parameters:
        assert parameter.grad is kept.get(id(parameter))
    assert all(bool((gradient == 7).all()) for gradient in kept.values())


def test_two_regions_have_no_jacobian(stack: GPT) -> None:
    topology = type(SHAPE.topology).regions("2,2")
    found = analyse(stack, topology, *random_tokens(SHAPE))
    assert (found["local_norm"], found["suffix_norm"], found["spectrum"]) == ([], [], [])
    assert len(found["adjoint_norm"]) == len(found["message_rank"]) == 1


def test_a_region_that_is_not_exact_is_refused(stack: GPT) -> None:
    stack.layers[1].mlp.extra = torch.nn.Dropout(0.5)  # type: ignore[union-attr]
    with pytest.raises(StackError, match="dropout"):
        analyse(stack, SHAPE.topology, *random_tokens(SHAPE))
