"""Difference target propagation, where it is known what comes back."""

import torch
from torch import Tensor, nn

from topograd.exec.train_step import train_step
from topograd.nn.images.config import ImageConfig
from topograd.nn.images.mlp import Affine
from topograd.nn.images.stack import make_image_stack
from topograd.nn.inverse import Inverse, TargetRelay
from topograd.nn.preparation import prepare
from topograd.topology.dag import Topology


def linear_relay(matrix: Tensor) -> TargetRelay:
    """A relay whose g is the inverse of x ↦ W x."""
    relay = TargetRelay((len(matrix),), (len(matrix),)).double()
    assert isinstance(relay.inverse.map, nn.Linear)
    with torch.no_grad():
        relay.inverse.map.weight.copy_(torch.linalg.inv(matrix))
        relay.inverse.map.bias.normal_()
    return relay


def sent_back(relay: TargetRelay, matrix: Tensor, error: Tensor) -> Tensor:
    message = torch.randn(len(error), len(matrix), dtype=torch.float64, requires_grad=True)
    h = relay.receive(message, None) @ matrix.T  # type: ignore[arg-type]
    relay.close(h.requires_grad_(), message).backward(error)
    assert message.grad is not None
    return message.grad


def test_a_linear_stage_sends_back_the_inverse_of_the_error() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(4, 4, dtype=torch.float64) + 3 * torch.eye(4)
    error = torch.randn(5, 4, dtype=torch.float64)
    back = sent_back(linear_relay(matrix), matrix, error)
    torch.testing.assert_close(back, error @ torch.linalg.inv(matrix).T)


def test_an_orthogonal_stage_is_backprop() -> None:
    torch.manual_seed(0)
    matrix = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    error = torch.randn(5, 4, dtype=torch.float64)
    torch.testing.assert_close(sent_back(linear_relay(matrix), matrix, error), error @ matrix)


def test_the_executor_gives_the_recursion_of_the_paper() -> None:
    """ĥ_1 = h_1 + g(ĥ_2) - g(h_2), ĥ_2 = h_2 - s ∂L/∂h_2, and each layer's gradient is that of its own
    miss."""
    torch.manual_seed(0)
    config = ImageConfig(widths=(6, 5), shape=(1, 3, 3), classes=4)
    topology = Topology.targets("1,1,1")
    stack = make_image_stack(config, topology).double()
    plan = prepare(stack, topology)
    images = torch.randint(0, 256, (7, 1, 3, 3), dtype=torch.uint8)
    labels = torch.randint(0, 4, (7,))
    losses = train_step(stack, plan, images, labels)
    assert losses[0].isnan()
    first, second, last = (layer.linear for layer in stack.layers if isinstance(layer, Affine))
    relay = stack.learned_relays()["target-1"]
    assert isinstance(relay, TargetRelay)
    x = stack.embed(images).flatten(1)
    with torch.no_grad():
        h1 = torch.relu(first(x))
        h2 = torch.relu(second(h1))
        error = (last(h2).softmax(-1) - nn.functional.one_hot(labels, 4)) / 7
        step = relay.step * 7
        wanted2 = h2 - step * error @ last.weight
        wanted1 = h1 + relay.inverse(wanted2) - relay.inverse(h2)
        miss2 = (h2 - wanted2) / step * (h2 > 0)
        miss1 = (h1 - wanted1) / step * (h1 > 0)
    torch.testing.assert_close(last.weight.grad, error.T @ h2)
    torch.testing.assert_close(second.weight.grad, miss2.T @ h1)
    torch.testing.assert_close(first.weight.grad, miss1.T @ x)


def test_maps_back_have_the_shapes_that_they_should() -> None:
    for given, taken in (((5,), (3,)), ((5,), (1, 2, 4)), ((6, 2, 2), (3, 4, 4)), ((4, 8), (4, 8))):
        assert Inverse(given, taken)(torch.randn(2, *given)).shape == (2, *taken)
    assert Inverse((5,), (3,))(torch.randn(2, 7, 5)).shape == (2, 7, 3)
