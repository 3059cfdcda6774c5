"""Which calls are linear maps, what their rows are, and the reason for every parameter that is left out."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.layers import Call, CallTracer, recognise


class Seen:
    """A reducer that keeps the rows."""

    def __init__(self, unwanted: str | None = None) -> None:
        self.unwanted = unwanted
        self.inputs: dict[str, list[Tensor]] = {}
        self.gradients: dict[str, list[Tensor]] = {}

    def refuses(self, layer: str, sides: tuple[int, int]) -> str | None:
        return "not wanted" if layer == self.unwanted else None

    def see_inputs(self, layer: str, call: Call) -> None:
        self.inputs.setdefault(layer, []).append(call.inputs(call.source))

    def see_gradients(self, layer: str, rows: Tensor) -> None:
        self.gradients.setdefault(layer, []).append(rows)


def watched(model: nn.Module, *inputs: Tensor, unwanted: str | None = None) -> tuple[CallTracer, Seen]:
    """One forward and backward pass of the sum of the outputs."""
    model.requires_grad_(False)
    seen = Seen(unwanted)
    watch = CallTracer(model, seen)
    with watch:
        outputs = model(*inputs)
    torch.autograd.grad(outputs.sum(), watch.leaves, allow_unused=True)
    return watch, seen


class Columns(nn.Module):
    """W x of columns, as Mamba's steps."""

    bias = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight @ x


CONVOLUTIONS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Conv2d(2, 3, 3), (4, 2, 7, 6)),
    (nn.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=(1, 2), dilation=(3, 1)), (4, 2, 7, 6)),
    (nn.Conv2d(2, 3, (4, 3), padding="same", dilation=(1, 2)), (4, 2, 7, 6)),
    (nn.Conv2d(2, 3, 2, padding="valid"), (2, 7, 6)),
    (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (4, 2, 7, 6)),
    (nn.Conv1d(2, 3, 3, stride=2, padding=1), (4, 2, 9)),
    (nn.Conv1d(2, 3, 4, padding="same"), (2, 9)),
    (nn.Conv1d(2, 3, 1, bias=False), (4, 2, 9)),
]
DENSE: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Linear(3, 2), (5, 3)),
    (nn.Linear(3, 2, bias=False), (5, 4, 3)),
    (nn.Linear(3, 2), (3,)),
    (Conv1D(2, 3), (5, 4, 3)),
    (Columns(), (4, 3, 5)),
]


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch pads an even kernel by a copy
@pytest.mark.parametrize(("module", "shape"), CONVOLUTIONS + DENSE)
def test_the_weight_times_the_rows_is_the_output(module: nn.Module, shape: tuple[int, ...]) -> None:
    module = module.double().requires_grad_(False)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    caught: list[tuple[Call, Tensor]] = []

    class Catch(Seen):
        def see_inputs(self, layer: str, call: Call) -> None:
            caught.append((call, call.inputs(call.source)))

    with CallTracer(module, Catch()):
        output = module(x)
    ((call, rows),) = caught
    W, b = module.weight, module.bias
    assert isinstance(W, Tensor)
    W = W.T if isinstance(module, Conv1D) else W.flatten(1)
    z = rows @ W.T + (b if isinstance(b, Tensor) else 0)
    assert call.sides == (W.shape[1], W.shape[0])
    space = output if not isinstance(module, Conv1D) else output.flatten(0, -2)  # its call has flat rows
    torch.testing.assert_close(call.gradients(space), z, rtol=1e-12, atol=1e-12)


def test_products_and_what_is_none() -> None:
    x, W = torch.randn(5, 3), torch.randn(3, 2)
    for func in (torch.matmul, torch.mm, Tensor.__matmul__, Tensor.matmul):
        call = recognise(func, (x, W), {})
        assert isinstance(call, Call)
        assert call.sides == (3, 2)
    of_columns = recognise(torch.matmul, (x, torch.randn(4, 3, 2)), {})
    assert isinstance(of_columns, Call)
    assert (of_columns.weight is x, of_columns.sides) == (True, (3, 5)), "the first is the weight, if any is"
    assert recognise(torch.matmul, (torch.randn(4, 5, 3), torch.randn(4, 3, 2)), {}) is None
    assert recognise(torch.addmm, (torch.zeros(2), x, W), {"alpha": 2.0}) is None
    assert recognise(torch.add, (x, x), {}) is None
    assert recognise(F.linear, (x,), {"weight": W.T, "bias": None}) is not None
    matrix_added = recognise(torch.addmm, (torch.zeros(5, 2), x, W), {})
    assert isinstance(matrix_added, Call)
    assert matrix_added.bias is None


def test_gradients_arrive_with_the_rows() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    watch, seen = watched(model, x)
    hidden = model[0](x)
    assert torch.equal(seen.inputs["0"][0], x)
    assert torch.equal(seen.inputs["2"][0], hidden.relu())
    torch.testing.assert_close(seen.gradients["2"][0], torch.ones(5, 2, dtype=torch.float64))
    expected = (hidden > 0) * model.get_parameter("2.weight").sum(
        0
    )  # before the ReLU, though it writes in place
    torch.testing.assert_close(seen.gradients["0"][0], expected)
    assert watch.layers() == ["0", "2"]
    assert watch.uncovered() == {}


class Assorted(nn.Module):
    """Every way to use a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.table.weight
        self.twice = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.depthwise = nn.Conv1d(4, 4, 3, padding=1, groups=4)
        self.product = nn.Parameter(torch.randn(4, 4))
        self.transposed = nn.Parameter(torch.randn(4, 4))
        self.latent = nn.Parameter(torch.randn(4))
        self.idle = nn.Linear(4, 4)
        self.side = nn.Linear(4, 4)
        self.constant = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.twice(self.twice(self.table(tokens)))
        x = self.norm(x + self.attention(x, x, x)[0])
        x = self.depthwise(x.mT).mT @ self.product @ self.transposed.T
        self.side(x)
        with torch.no_grad():
            fixed = self.constant(x)
        x = x + fixed + self.twice(self.latent)
        assert self.product.shape == (4, 4)
        return self.head(x)


def test_every_parameter_is_covered_or_has_a_reason() -> None:
    watch, seen = watched(Assorted(), torch.arange(6).view(2, 3))
    assert watch.layers() == [
        "product",
        "transposed",
        "head",
        "twice",
        "attention.in_proj_weight",
        "attention.out_proj",
    ]
    assert [len(rows) for rows in seen.inputs["twice"]] == [6, 6, 1]
    assert [len(rows) for rows in seen.gradients["twice"]] == [1, 6, 6], "the backward order"
    reasons = watch.uncovered()
    assert reasons.pop("table.weight") == "used by embedding", "tied: covered as the head only"
    for name, why in {
        "norm": "used by layer_norm",
        "depthwise": "a convolution in 4 groups; only those in one group are covered",
        "idle": "not used in the forward pass",
        "side": "no gradient reaches it",
        "constant": "used where the model switches gradients off",
    }.items():
        assert reasons.pop(f"{name}.weight") == reasons.pop(f"{name}.bias") == why
    assert reasons == {"latent": "an input of twice"}


@pytest.mark.parametrize("width", [4, 3])
def test_a_matrix_that_is_used_with_its_transpose_has_the_factors_of_one(width: int) -> None:
    class Subspace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.basis = nn.Parameter(torch.randn(4, width))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.basis @ self.basis.T

    x = torch.randn(5, 4)
    watch, seen = watched(Subspace(), x)
    assert watch.layers() == ["basis"]
    assert [rows.tolist() for rows in seen.inputs["basis"]] == [x.tolist()]
    assert watch.uncovered() == {"basis": "used as W and as its transpose"}


def test_a_layer_that_the_reducer_refuses() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    watch, seen = watched(model, torch.randn(5, 3), unwanted="0")
    assert list(seen.inputs) == list(seen.gradients) == watch.layers() == ["1"]
    assert watch.uncovered() == {"0.weight": "not wanted", "0.bias": "not wanted"}


def test_a_model_that_hides_its_calls_is_not_covered() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.LSTM(3, 2)
            self.volume = nn.Conv3d(1, 1, 1)

        def forward(self, x: Tensor) -> Any:
            return self.volume(self.recurrent(x)[0][None, None])

    model = Plain().requires_grad_(False)
    watch = CallTracer(model, Seen())
    with watch:
        model(torch.randn(5, 4, 3))
    assert not watch.leaves
    assert set(watch.uncovered().values()) == {"used by lstm", "used by conv3d"}
    assert set(watch.uncovered()) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(value: float) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.get_parameter("1.bias").data[0] = value
    with refused(GeometryError, setting="model", given="1.bias"):
        CallTracer(model, Seen())
