"""A Jacobian that is not that of the forward that ran is refused, and nothing else is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from papers.latent_bounded_interfaces.parity import INTERFACE, REGIONS, random_batch, random_model
from topograd.errors import StackError
from topograd.exec.gradient import BACKWARDS
from topograd.exec.train_step import train_step
from topograd.interfaces import exactness
from topograd.nn.config import ARCHITECTURES, Architecture, SegmentInterface
from topograd.nn.gpt import GPT

INNER, FIRST, LAST = 3, 0, 7
"""A layer of region 2 of four, which has a Jacobian; of region 1 and of region 4, which have none."""


def changed(change: Callable[[Tensor], Tensor], layer: int = INNER, **settings: Any) -> GPT:
    """A model with `change` behind the MLP of one layer."""
    stack = random_model("transformer", SegmentInterface(segments=4, rank=6, **settings), seed=0)
    mlp = stack.layers[layer].mlp
    assert isinstance(mlp, nn.Module)
    mlp.register_forward_hook(lambda _, __, output: change(output))
    return stack


def dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 0.2)


def gradients(stack: GPT, engine: str = "autograd", **settings: Any) -> Tensor:
    torch.manual_seed(0)
    train_step(stack, REGIONS, *random_batch(0), gradient=BACKWARDS[engine](**settings))
    taken = torch.cat([p.grad.flatten() for p in stack.parameters() if p.grad is not None])
    stack.zero_grad(set_to_none=True)
    return taken


@pytest.mark.parametrize("engine", ["scan", "hybrid"])
def test_functional_dropout_is_refused(engine: str) -> None:
    stack = changed(dropped)
    why = r"of region 2 \(layers.2 to layers.3\) is off by .*% .* two runs of it differ, .* F.dropout"
    with pytest.raises(StackError, match=why) as refusal:
        train_step(stack, REGIONS, *random_batch(0), gradient=BACKWARDS[engine]())
    assert "\n" not in str(refusal.value)
    assert all(p.grad is None for p in stack.parameters()), "nothing was added before the refusal"


def test_a_refusal_comes_again_and_a_change_of_mode_is_looked_at() -> None:
    """Dropout that eval() turns off: refused, allowed, refused."""
    stack = changed(lambda x: F.dropout(x, 0.2, training=stack.training))
    for _ in range(2):
        with pytest.raises(StackError, match="two runs of it differ"):
            gradients(stack, engine="scan")
    stack.eval()
    torch.testing.assert_close(gradients(stack, engine="scan"), gradients(stack), rtol=1e-9, atol=1e-12)
    stack.train()
    with pytest.raises(StackError, match="two runs of it differ"):
        gradients(stack, engine="scan")


@pytest.mark.parametrize("layer", [FIRST, LAST])
def test_dropout_where_no_jacobian_is_built_is_exact(layer: int) -> None:
    stack = changed(dropped, layer)
    torch.testing.assert_close(gradients(stack, engine="scan"), gradients(stack), rtol=1e-9, atol=1e-12)


def test_jacobians_of_the_very_graph_are_exact_even_with_dropout() -> None:
    stack = changed(dropped)
    ours = gradients(stack, engine="scan", trimmed=False)
    torch.testing.assert_close(ours, gradients(stack), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "settings", "why"),
    [
        (lambda x: x - x.mean(0, keepdim=True), {}, "a sample of the batch reaches another"),
        (lambda x: x + x.flip(1), {"pool": "mean"}, "a position reads a later one"),
    ],
)
def test_what_binds_samples_or_looks_ahead_is_refused(
    change: Callable[[Tensor], Tensor], settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(StackError, match=why):
        gradients(changed(change, **settings), engine="scan")


def test_a_state_that_is_kept_is_refused() -> None:
    kept: list[float] = []

    def counted(x: Tensor) -> Tensor:
        kept.append(1.0)
        return x * len(kept)

    with pytest.raises(StackError, match="kept from one call to the next"):
        gradients(changed(counted), engine="scan")


def test_a_block_that_the_pullback_does_not_know() -> None:
    stack = changed(torch.tanh)
    torch.testing.assert_close(gradients(stack, engine="scan"), gradients(stack), rtol=1e-9, atol=1e-12)
    with pytest.raises(StackError, match="pullback does not know; use jacobian='loop'"):
        gradients(stack, engine="scan", jacobian="pullback")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_not_refused(architecture: Architecture, dtype: torch.dtype) -> None:
    stack = random_model(architecture, INTERFACE, 0, torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        assert gradients(stack, engine="scan").isfinite().all()


def test_the_price_is_paid_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real, tried = exactness._is_exact, []

    def counted(one: Any, *rest: Any) -> bool:
        tried.append(one.region)
        return real(one, *rest)

    monkeypatch.setattr(exactness, "_is_exact", counted)
    stack = random_model("transformer", INTERFACE, seed=0)
    for _ in range(3):
        gradients(stack, engine="scan")
    assert tried == [1, 2]
    gradients(stack, engine="scan", jacobian="pullback")
    gradients(stack, engine="hybrid")
    assert tried == [1, 2, 1, 2], "a region that held by loop is not tried again by another engine"


def test_numbers_that_are_not_finite_are_not_its_matter() -> None:
    stack = random_model("transformer", INTERFACE, seed=0)
    with torch.no_grad():
        stack.embedding.weight.fill_(float("nan"))
    assert gradients(stack, engine="scan").isnan().any()


@pytest.mark.parametrize("trimmed", [True, False])
def test_a_jacobian_of_a_second_run_that_differs_is_refused(trimmed: bool) -> None:
    """With `recompute` a region runs again for its Jacobian, which must be that of the forward that ran."""
    stack = changed(dropped)
    engine = BACKWARDS["scan"](trimmed=trimmed)
    with pytest.raises(StackError, match="two runs of it differ"):
        train_step(stack, REGIONS, *random_batch(0), gradient=engine, recompute=True)
    assert all(p.grad is None for p in stack.parameters())
