"""One pass over a model: against the monitors and factors by themselves, and what it says is missing."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.factors import kfac_factors
from topograd.geometry.inspection import inspect, spectrum
from topograd.geometry.monitors.stream import StreamMonitor
from topograd.nn.gpt import GPT


class Block(nn.Module):
    """x + tanh(W norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Residual(nn.Module):
    """Pre-norm blocks and a head, with a norm that is never called."""

    def __init__(self, width: int = 6, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 4)
        self.spare = nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net() -> Residual:
    torch.manual_seed(0)
    return Residual().double()


def batches(count: int = 2) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(40, 6, dtype=torch.float64), torch.randint(4, (40,))) for _ in range(count)]


def test_it_says_what_its_parts_say() -> None:
    model = net()
    found = inspect(model, batches(), fisher="empirical")
    with StreamMonitor(model) as monitor, torch.no_grad():
        for inputs, _ in batches():
            model(inputs)
    assert found.stream == monitor.profile()
    factors = kfac_factors(model, batches(), fisher="empirical")
    assert list(found.layers) == list(factors)
    for name, layer in found.layers.items():
        A, G = factors[name].eigenvalues()
        assert layer.A.values == pytest.approx(A.flip(0).tolist())
        assert layer.G is not None
        assert layer.G.trace == pytest.approx(float(G.sum()))
    head = found.layers["head"].G
    assert head is not None
    assert (head.size, head.rank) == (4, 3), "cross-entropy has one symmetric direction"
    assert found.uncovered == dict(factors.uncovered)


def test_norms_and_what_never_ran() -> None:
    found = inspect(net(), batches())
    assert {name: norm.found for name, norm in found.norms.items()} == {
        f"blocks.{i}.norm": True for i in range(3)
    }
    assert "spare was never called as a module" in found.notes
    assert "spare.weight" in found.uncovered


def test_without_a_loss_there_is_a_alone() -> None:
    with_loss = inspect(net(), batches(), fisher="empirical")
    found = inspect(net(), [(inputs, None) for inputs, _ in batches()], loss=None)
    assert (found.loss, found.fisher) == (None, None)
    assert list(found.layers) == list(with_loss.layers)
    for name, layer in found.layers.items():
        assert layer.G is None
        assert layer.A == with_loss.layers[name].A
    assert found.uncovered == with_loss.uncovered
    assert any("A alone" in note for note in found.notes)


def test_the_model_is_left_as_it_was() -> None:
    model = net()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    model.blocks[0].requires_grad_(False)
    before = {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()}
    inspect(model, batches())
    assert {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()} == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.training


def test_as_json() -> None:
    plain = inspect(net(), batches()).as_dict()
    again = json.loads(json.dumps(plain, allow_nan=False))
    assert again["stream"]["verdict"] == "preserved"
    assert again["norms"]["blocks.0.norm"]["found"] is True
    assert again["layers"]["head"]["A"]["size"] == 6


def test_a_stream_that_collapses_is_json() -> None:
    """Its trend is -∞."""
    model = net()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("blocks") and "linear" in name:
                parameter.zero_()
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: output * torch.eye(6).double()[0])
    found = inspect(model, batches())
    assert found.stream is not None
    assert found.stream.trend == float("-inf")
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["stream"]["trend"] is None


def test_factors_are_given_one_layer_after_the_other_or_kept() -> None:
    kept = inspect(net(), batches(), generator=torch.Generator().manual_seed(0))
    seen: dict[str, Any] = {}
    taken = inspect(
        net(),
        batches(),
        generator=torch.Generator().manual_seed(0),
        on_factors=lambda layer, A, G, layout: seen.update({layer: (A, G)}),
    )
    assert not taken.factors
    assert list(seen) == list(kept.factors) == list(kept.layers)
    for layer, pair in seen.items():
        for one, other in zip(pair, kept.factors[layer], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert taken.as_dict() == kept.as_dict()


def test_two_threads_read_what_one_does() -> None:
    def read() -> Any:
        return inspect(net(), batches(), generator=torch.Generator().manual_seed(0))

    one, before = read(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        two = read()
    finally:
        torch.set_num_threads(before)
    assert list(two.layers) == list(one.layers) == list(two.factors)
    for name, found in one.layers.items():
        assert two.layers[name].A.values == pytest.approx(found.A.values, rel=1e-12, abs=1e-14)


def test_our_gpt() -> None:
    torch.manual_seed(0)
    stack = GPT(layers=2, width=16, heads=2, vocab=20, context=8).double()
    found = inspect(stack, (torch.randint(20, (8, 8)), None), generator=torch.Generator().manual_seed(0))
    assert found.stream is not None
    assert found.stream.names == ("layers.0", "layers.1")
    assert {"layers.1.mlp.down", "head"} <= found.layers.keys()
    assert "embedding.weight" in found.uncovered
    assert any("no LayerNorm or RMSNorm was called" in note for note in found.notes)


def test_few_rows_and_no_list_of_layers_are_said() -> None:
    few = inspect(net(), [(torch.randn(4, 6).double(), torch.zeros(4, dtype=torch.long))])
    assert any("only 4 rows were read" in note for note in few.notes)
    plain = nn.Sequential(nn.Linear(6, 4)).double()
    found = inspect(plain, batches())
    assert found.stream is None
    assert any("no residual stream" in note for note in found.notes)
    with refused(GeometryError, setting="layers", given="blocks"):
        inspect(plain, batches(), layers="blocks")


def test_a_float32_model_resolves_less() -> None:
    narrow = torch.randn(50, 2) @ torch.randn(2, 6)
    model = net().float()
    found = inspect(model, (narrow, torch.zeros(50, dtype=torch.long)))
    assert found.resolution == 1024 * torch.finfo(torch.float32).eps ** 2
    assert found.stream is not None
    assert found.stream.rank == 2


def test_one_massive_row_of_float32_does_not_bury_the_others() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    inputs = torch.randn(50, 6)
    inputs[0, 1] = 1e5
    targets = torch.randint(3, (50,))
    coarse = inspect(model, (inputs, targets), fisher="empirical").layers["0"].A
    fine = inspect(model.double(), (inputs.double(), targets), fisher="empirical").layers["0"].A
    assert coarse.rank == fine.rank == 6
    assert coarse.values[-1] == pytest.approx(fine.values[-1], rel=1e-6)
    assert fine.values[-1] < 1e-7 * fine.values[0], "a float32 sum would not have seen it"


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ("blocks.1.linear.weight", "model"),
        ("blocks.1.norm.weight", "gain"),
    ],
)
def test_nan_weights_are_named(change: str, setting: str) -> None:
    model = net()
    with torch.no_grad():
        model.get_parameter(change).view(-1)[0] = float("nan")
    with refused(GeometryError, setting=setting):
        inspect(model, batches())


def test_bad_requests() -> None:
    empty: list[Any] = []
    with refused(GeometryError, setting="batches"):
        inspect(net(), empty)
    with refused(GeometryError, setting="model"):
        inspect(nn.Sequential(nn.Tanh()), batches())


def test_a_long_spectrum_keeps_its_ends() -> None:
    values = torch.logspace(0, -20, 200, dtype=torch.float64)
    found = spectrum(torch.diag(values))
    assert (found.size, len(found.values)) == (200, 64)
    assert (found.places[0], found.places[-1]) == (0, 199)
    assert found.values[0] == 1
    assert found.values[-1] == 0, "below the resolution"
    assert found.rank == int((values > 200 * torch.finfo(torch.float64).eps).sum())
