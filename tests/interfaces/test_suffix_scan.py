"""The three scans against explicit matrix products, against autograd, and by the calls that they make."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from raising import refused
from tests.oracles.adjoints import explicit_adjoints, explicit_products
from topograd.errors import ConfigError, StackError
from topograd.interfaces.suffix_scan import Method, suffix_adjoints, suffix_products

METHODS: list[Method] = ["matvec", "chunked", "tree"]


def chain(maps: int, batch: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    jacobians = torch.randn(maps, batch, width, width, generator=generator, dtype=torch.float64)
    terminal = torch.randn(batch, width, generator=generator, dtype=torch.float64)
    return jacobians / math.sqrt(width), terminal


@pytest.mark.parametrize("method", METHODS)
def test_two_maps_by_hand(method: Method) -> None:
    first = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    second = torch.tensor([[1.0, 0.0], [3.0, 1.0]])
    adjoints = suffix_adjoints(torch.stack([first, second]).unsqueeze(1), torch.tensor([[1.0, 10.0]]), method)
    # J_1ᵀ g = (1 + 3·10, 10), and J_0ᵀ of it (31, 2·31 + 10). The other order of the maps gives (37, 12).
    assert adjoints.squeeze(1).tolist() == [[31.0, 72.0], [31.0, 10.0], [1.0, 10.0]]


@settings(max_examples=25, deadline=None)
@given(
    maps=st.integers(0, 11),
    batch=st.integers(1, 3),
    width=st.integers(1, 4),
    method=st.sampled_from(METHODS),
    chunk=st.none() | st.integers(1, 13),
)
def test_value_and_gradients_equal_explicit_products(
    maps: int, batch: int, width: int, method: Method, chunk: int | None
) -> None:
    if method != "chunked":
        chunk = None
    jacobians, terminal = (x.requires_grad_() for x in chain(maps, batch, width, seed=maps))
    ours = suffix_adjoints(jacobians, terminal, method, chunk)
    slow = explicit_adjoints(jacobians, terminal)
    torch.testing.assert_close(ours, slow, rtol=1e-12, atol=1e-13)

    weights = torch.randn(slow.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours_grads, slow_grads = (
        torch.autograd.grad((x * weights).sum(), [jacobians, terminal], materialize_grads=True)
        for x in (ours, slow)
    )
    for mine, reference in zip(ours_grads, slow_grads, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)


def test_products_and_their_gradient_equal_explicit_products() -> None:
    jacobians = chain(5, 2, 3)[0].requires_grad_()
    ours, slow = suffix_products(jacobians), explicit_products(jacobians)
    assert ours.shape == (6, 2, 3, 3)
    torch.testing.assert_close(ours, slow, rtol=1e-13, atol=1e-13)
    weights = torch.randn(slow.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(
        *(torch.autograd.grad((P * weights).sum(), jacobians) for P in (ours, slow)), rtol=1e-12, atol=1e-12
    )


def test_products_carry_the_adjoint_and_end_with_the_identity() -> None:
    jacobians, terminal = chain(4, 2, 3)
    products = suffix_products(jacobians)
    carried = torch.einsum("kbij,bj->kbi", products, terminal)
    torch.testing.assert_close(carried, suffix_adjoints(jacobians, terminal), rtol=1e-13, atol=1e-13)
    assert torch.equal(products[-1], torch.eye(3, dtype=torch.float64).expand(2, 3, 3))
    assert torch.equal(products[-2], jacobians[-1].mT)


@pytest.mark.parametrize("method", METHODS)
def test_adjoints_of_a_nonlinear_chain_are_autograds(method: Method) -> None:
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(7, 4, 4, generator=generator, dtype=torch.float64)
    states = [torch.randn(2, 4, generator=generator, dtype=torch.float64).requires_grad_()]
    for W in weights:
        states.append(torch.tanh(states[-1] @ W.T))
    expected = torch.autograd.grad((states[-1] ** 3).sum(), states)
    jacobians = torch.stack(
        [(1 - m.detach() ** 2).unsqueeze(-1) * W for W, m in zip(weights, states[1:], strict=True)]
    )
    ours = suffix_adjoints(jacobians, 3 * states[-1].detach() ** 2, method)
    torch.testing.assert_close(ours, torch.stack(expected), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_arithmetic_is_float32_at_least(method: Method, dtype: torch.dtype) -> None:
    jacobians, terminal = (x.to(dtype) for x in chain(24, 2, 8))
    exact = explicit_adjoints(jacobians.double(), terminal.double())
    with torch.autocast("cpu", torch.bfloat16):  # must not reach the products
        adjoints = suffix_adjoints(jacobians, terminal, method)
        products = suffix_products(jacobians)
    assert adjoints.dtype == products.dtype == torch.float32
    # Rounding of 24 products in float32; one product in bfloat16 would already be wrong by 4e-3.
    for ours, truth in ((adjoints, exact), (products, explicit_products(jacobians.double()))):
        assert torch.linalg.vector_norm(ours - truth) < 1e-5 * torch.linalg.vector_norm(truth)


def test_one_float64_argument_makes_the_scan_float64() -> None:
    jacobians, terminal = chain(3, 1, 2)
    assert suffix_adjoints(jacobians.bfloat16(), terminal).dtype == torch.float64
    assert suffix_adjoints(jacobians, terminal.bfloat16()).dtype == torch.float64


@pytest.mark.parametrize("method", METHODS)
def test_a_chain_without_maps_is_its_terminal_adjoint(method: Method) -> None:
    jacobians, terminal = chain(0, 2, 3)
    assert torch.equal(suffix_adjoints(jacobians, terminal, method), terminal.unsqueeze(0))
    assert suffix_products(jacobians).shape == (1, 2, 3, 3)


class CountProducts(TorchDispatchMode):
    """Counts the calls of batched products, and their multiply-adds."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.macs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bmm.default:
            (batch, rows, inner), columns = args[0].shape, args[1].shape[-1]
            self.calls += 1
            self.macs += batch * rows * inner * columns
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("maps", [1, 2, 3, 16, 31, 64])
def test_calls_and_work_are_as_documented(maps: int) -> None:
    batch, width = 2, 3
    jacobians, terminal = chain(maps, batch, width)
    counts = {}
    for method in METHODS:
        with CountProducts() as counts[method]:
            suffix_adjoints(jacobians, terminal, method)
    size = math.isqrt(maps)
    chunks = math.ceil(maps / size)
    assert (counts["matvec"].calls, counts["matvec"].macs) == (maps, batch * maps * width**2)
    assert counts["chunked"].calls <= 2 * size + chunks
    assert counts["chunked"].macs <= batch * ((maps - size) * width**3 + (chunks * size + chunks) * width**2)
    assert counts["tree"].calls <= 4 * math.log2(maps) + 1
    assert counts["tree"].macs <= batch * maps * (width**3 + width**2)


def test_bad_input_is_one_clear_line() -> None:
    jacobians, terminal = chain(3, 2, 4)
    with refused(StackError, setting="terminal"):
        suffix_adjoints(jacobians, terminal[:, :3])
    for wrong in (jacobians[0], jacobians[..., :3]):
        with refused(StackError, setting="jacobians"):
            suffix_adjoints(wrong, terminal)
        with refused(StackError, setting="jacobians"):
            suffix_products(wrong)
    with refused(ConfigError, setting="method", given="scan"):
        suffix_adjoints(jacobians, terminal, "scan")  # type: ignore[arg-type]
    with refused(ConfigError, setting="chunk", given=2):
        suffix_adjoints(jacobians, terminal, "tree", chunk=2)
    with refused(ConfigError, setting="chunk", given=0):
        suffix_adjoints(jacobians, terminal, "chunked", chunk=0)
