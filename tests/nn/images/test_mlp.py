"""The MLP is 784-256-128-10, and log-odds backprop leaves σ' out."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.exec.train_step import train_step
from topograd.nn.images.config import ImageConfig
from topograd.nn.images.mlp import Affine, LogOdds
from topograd.nn.images.stack import ImageStack, make_image_stack

Batch = tuple[Tensor, Tensor]


def matrices(stack: ImageStack) -> list[nn.Linear]:
    return [layer.linear for layer in stack.layers if isinstance(layer, Affine)]


def test_backprop_is_the_plain_network(small: Callable[..., ImageStack], batch: Batch) -> None:
    stack = small("mlp")
    images, labels = batch
    train_step(stack, "3", images, labels)
    linears = matrices(stack)
    sizes = [(m.in_features, m.out_features) for m in linears]
    assert sizes == [(64, 12), (12, 9), (9, 3)]
    plain = nn.Sequential(nn.Flatten(), linears[0], nn.ReLU(), linears[1], nn.ReLU(), linears[2])
    ours = [p.grad.clone() for p in plain.parameters() if p.grad is not None]
    plain.zero_grad()
    logits = plain(stack.embed(images))
    assert torch.equal(logits, stack(images))
    F.cross_entropy(logits, labels).backward()
    for mine, parameter in zip(ours, plain.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad)


def test_the_default_has_the_papers_sizes() -> None:
    stack = make_image_stack(ImageConfig())
    assert [tuple(linear.weight.shape) for linear in matrices(stack)] == [(256, 784), (128, 256), (10, 128)]


def test_log_odds_backprop_by_hand(batch: Batch) -> None:
    """δ_{l-1} = W_lᵀ δ_l: no factor σ'(a) anywhere, while the forward pass is the sigmoid's."""
    config = ImageConfig(widths=(5, 4), shape=(1, 8, 8), classes=3, activation="log-odds")
    stack = make_image_stack(config).double()
    images, labels = batch
    train_step(stack, "3", images, labels)
    first, second, last = matrices(stack)
    x = stack.embed(images).flatten(1)
    h1 = torch.sigmoid(first(x))
    h2 = torch.sigmoid(second(h1))
    error = (last(h2).softmax(-1) - F.one_hot(labels, 3)) / len(labels)
    torch.testing.assert_close(last.weight.grad, error.T @ h2)
    error = error @ last.weight
    torch.testing.assert_close(second.weight.grad, error.T @ h1)
    error = error @ second.weight
    torch.testing.assert_close(first.weight.grad, error.T @ x)
    a = torch.randn(4, requires_grad=True)
    assert torch.equal(LogOdds()(a), torch.sigmoid(a))
