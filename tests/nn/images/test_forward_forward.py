"""Forward-Forward: logits are goodness, each copy by itself, and no length is handed on."""

from collections.abc import Callable

import torch
from torch import Tensor

from raising import refused
from topograd.errors import StackError
from topograd.nn.images.stack import ImageStack
from topograd.nn.preparation import prepare
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology

Make = Callable[..., ImageStack]


def test_logits_are_the_goodness_of_each_label(small: Make, batch: tuple[Tensor, Tensor]) -> None:
    stack = small("forward-forward")
    x0 = stack.embed(batch[0])
    assert x0.shape == (6, 3, 64)
    ctx = stack.layer_context(x0, batch[0])
    h = stack.layers[0](x0, ctx)
    assert torch.allclose(stack.readout(h, 0), (h**2).mean(-1))
    for label in range(3):
        alone = stack.layers[0](x0[:, label], ctx)
        torch.testing.assert_close(h[:, label], alone)
    torch.testing.assert_close(stack.layers[1](7 * h, ctx), stack.layers[1](h, ctx), rtol=1e-4, atol=1e-4)


def test_labels_are_all_that_differs(small: Make, batch: tuple[Tensor, Tensor]) -> None:
    x0 = small("forward-forward").embed(batch[0])
    assert torch.equal(x0[:, 0, 3:], x0[:, 2, 3:])
    assert torch.equal(x0[0, :, :3], x0[0, 0, 0] * torch.eye(3, dtype=torch.float64))


def test_there_are_no_heads(small: Make) -> None:
    stack = small("forward-forward")
    assert not list(stack.head.parameters())
    with refused(StackError, setting="heads", given="per-stage"):
        prepare(stack, Topology.chain(Configuration.parse("1,1,1", heads="per-stage")))
