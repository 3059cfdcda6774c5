"""Packed linear layers against F.linear, and what a packed copy shares with its original."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.nn import mkl_linear as module
from topograd.nn.gpt import GPT
from topograd.nn.mkl_linear import MAX_ROWS, MIN_ELEMENTS, MklLinear, packed
from topograd.nn.stack import Stack

ROWS = (1, 2, 5, 64, 65)
FLOAT32 = 5e-6
"""Of the largest result: sums of up to 1024 products, each step rounded to 6e-8; in any order."""
SHAPES = {"square": (16, 16), "wide": (24, 8), "tall": (8, 24), "one out": (1, 7), "one in": (7, 1)}
BIG = {"square": (512, 512), "wide": (1024, 512), "tall": (512, 1024)}
needs_blocks = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


def parts(shape: tuple[int, int], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(shape, dtype=dtype), torch.randn(shape[0], dtype=dtype)


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance * b.abs().max().item())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_float64(shape: tuple[int, int], rows: int, bias: bool) -> None:
    weight, offset = parts(shape)
    layer, x = MklLinear(weight, offset if bias else None), torch.randn(rows, shape[1]).double()
    assert layer.blocks is None
    close(layer(x), F.linear(x, weight, offset if bias else None), 1e-14)


def test_float64_is_exact_on_small_whole_numbers() -> None:
    weight = torch.arange(-6, 6, dtype=torch.float64).view(3, 4)
    x = torch.arange(8, dtype=torch.float64).view(2, 4)
    assert torch.equal(MklLinear(weight)(x), F.linear(x, weight))
    assert torch.equal(MklLinear(weight.t())(x[:, :3]), F.linear(x[:, :3], weight.t()))


@needs_blocks
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", BIG.values(), ids=BIG.keys())
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_float32_in_blocks(shape: tuple[int, int], rows: int, bias: bool) -> None:
    weight, offset = parts(shape, torch.float32)
    given = offset if bias else None
    layer, x = MklLinear(weight, given), torch.randn(rows, shape[1])
    assert layer.blocks is not None
    exact = F.linear(x.double(), weight.double(), None if given is None else given.double())
    close(layer(x).double(), exact, FLOAT32)
    if bias:
        return
    h = torch.randn(rows, shape[0])
    before = h.clone()
    close(layer.onto(h, x).double(), exact + h.double(), FLOAT32)
    assert torch.equal(h, before), "what it is added to is not changed"


@needs_blocks
def test_blocks_are_used_for_several_rows_only() -> None:
    layer = MklLinear(parts((512, 512), torch.float32)[0])
    layer.matrix = torch.full_like(layer.matrix, float("nan"))
    by_blocks = [rows for rows in ROWS if layer(torch.ones(rows, 512)).isfinite().all()]
    assert by_blocks == [rows for rows in ROWS if 1 < rows <= MAX_ROWS]


@needs_blocks
def test_blocks_are_made_where_they_pay() -> None:
    made = {
        shape: MklLinear(torch.ones(shape)).blocks is not None
        for shape in ((512, 511), (512, 512), (256, 1024), (1024, 256), (1024, 512))
    }
    assert made == {
        (512, 511): False,
        (512, 512): True,
        (256, 1024): True,
        (1024, 256): False,
        (1024, 512): True,
    }
    assert MIN_ELEMENTS == 512 * 512


@pytest.mark.parametrize("shape", BIG.values(), ids=BIG.keys())
def test_without_blocks_it_is_the_same(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_blocks", lambda weight: None)
    weight, offset = parts(shape, torch.float32)
    layer = MklLinear(weight, offset)
    assert layer.blocks is None
    for rows in ROWS:
        x = torch.randn(rows, shape[1])
        exact = F.linear(x.double(), weight.double(), offset.double())
        close(layer(x).double(), exact, FLOAT32)


def test_without_the_private_operators_there_are_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def __getattr__(self, name: str) -> object:
            raise AttributeError(name)

    monkeypatch.setattr(torch.ops, "mkldnn", Gone())
    layer = MklLinear(torch.ones(512, 512))
    assert layer.blocks is None
    assert torch.equal(layer(torch.ones(2, 512)), torch.full((2, 512), 512.0))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_onto(shape: tuple[int, int], rows: int) -> None:
    weight, _ = parts(shape)
    x, h = torch.randn(rows, shape[1]).double(), torch.randn(rows, shape[0]).double()
    before = h.clone()
    close(MklLinear(weight).onto(h, x), h + F.linear(x, weight), 1e-14)
    assert torch.equal(h, before)


class Net(nn.Module):
    """Linear layers at two depths, a table, a gain, a buffer, and a Linear that is a subclass."""

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 4)
        self.first = nn.Linear(4, 6)
        self.more = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Dropout(0.5))
        self.odd = self.Doubled(4, 4)
        self.gain = nn.Parameter(torch.randn(4))
        self.register_buffer("offset", torch.randn(4))

    def forward(self, ids: Tensor) -> Tensor:
        return self.odd(self.more(self.first(self.table(ids)))) * self.gain + self.offset


def test_a_packed_copy_computes_the_same_on_any_leading_shape() -> None:
    net = Net().double()
    twin = packed(net)
    for shape in ((2,), (3, 5), (2, 1, 4)):
        ids = torch.randint(9, shape)
        close(twin(ids), net.eval()(ids), 1e-14)


def test_a_packed_layer_of_no_rows_gives_none() -> None:
    """As an interface's that is read before its first segment is over."""
    twin = packed(nn.Sequential(nn.Linear(4, 3)))
    assert twin(torch.empty(1, 0, 4)).shape == (1, 0, 3)


def test_a_packed_copy_shares_all_but_the_matrices_and_leaves_the_original_as_it_was() -> None:
    net = Net()
    names = [name for name, _ in net.named_modules()]
    twin = packed(net)
    assert isinstance(twin.first, MklLinear)
    assert isinstance(twin.more[0], MklLinear)
    assert type(twin.odd) is Net.Doubled, "a subclass may compute something else"
    for own, shared in ((net.table.weight, twin.table.weight), (net.gain, twin.gain)):
        assert own.data_ptr() == shared.data_ptr()
    assert net.odd.weight.data_ptr() == twin.odd.weight.data_ptr()
    assert [name for name, _ in net.named_modules()] == names
    assert type(net.first) is nn.Linear
    assert type(net.more[0]) is nn.Linear
    assert net.training
    assert not twin.training
    assert all(p.requires_grad for p in net.parameters())
    assert not any(p.requires_grad for p in twin.parameters())
    assert not twin(torch.tensor([1, 2])).requires_grad
    net(torch.tensor([1, 2])).sum().backward()
    assert net.first.weight.grad is not None


def test_a_packed_layer_still_has_its_weight() -> None:
    net = Net().double()
    twin = packed(net)
    for own, layer in ((net.first, twin.first), (net.more[0], twin.more[0])):
        assert isinstance(own.weight, Tensor)
        assert isinstance(layer.weight, Tensor)
        assert torch.equal(layer.weight, own.weight)
        assert (layer.weight.shape, layer.weight.dtype) == (own.weight.shape, own.weight.dtype)


def test_what_every_stack_does_for_decoding_works_on_a_gpt() -> None:
    """A GPT has a way of its own; its layers look at their matrices, which the common way has to keep."""
    torch.manual_seed(0)
    gpt = GPT(layers=2, width=16, heads=2, vocab=30, context=8).double().eval()
    for parameter in gpt.parameters():
        nn.init.normal_(parameter, std=0.3)
    twin, inputs = Stack.for_decoding(gpt), torch.randint(30, (2, 8))
    assert isinstance(twin, GPT)
    assert any(isinstance(part, MklLinear) for part in twin.modules())
    with torch.no_grad():
        close(twin(inputs), gpt(inputs), 1e-12)
        pieces, states = [], [layer.new_state(2, 8) for layer in twin.layers]  # type: ignore[operator]
        for t in range(8):
            h = x0 = twin.embed(inputs[:, t : t + 1], inputs[:, t - 1] if t else None)
            ctx = twin.layer_context(x0, inputs[:, t : t + 1], t)
            for layer, state in zip(twin.layers, states, strict=True):
                h = layer(h, ctx, state)
            pieces.append(twin.readout(h, 0))
        close(torch.cat(pieces, 1), gpt(inputs), 1e-12)
