"""Factors against the loops of `tests/oracles/fisher.py` and the exact Fisher matrix; what a pass leaves."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from raising import refused
from tests.oracles.fisher import exact_fisher, explicit_factors
from topograd.errors import GeometryError
from topograd.geometry.factors import Factors, kfac_factors
from topograd.geometry.gram_sums import HalfGram, gram
from topograd.geometry.heads import find_heads
from topograd.geometry.losses import Fisher, SquaredError
from topograd.nn.gpt import GPT


class Transformer(nn.Module):
    """One block with a fused QKV, causal, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.out = nn.Linear(4, 4, bias=False)
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return self.head(self.norm(x + self.down(F.gelu(self.up(x)))))


class Twice(nn.Module):
    """One layer that is called two times."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def make(self) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        return self.build().double(), torch.randn(self.shape, dtype=torch.float64)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5, bias=False), nn.ReLU(), nn.Linear(5, 3))


CASES = {
    "mlp": Case(mlp, (6, 4)),
    "positions": Case(mlp, (3, 2, 4)),
    "convolutions": Case(
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, stride=2, padding=1),
            nn.Tanh(),
            nn.Conv2d(3, 2, (1, 2), dilation=(1, 2)),
            nn.Flatten(),
            nn.Linear(16, 3),
        ),
        (4, 2, 7, 7),
    ),
    "convolutions of a line": Case(
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3, padding=2), nn.GELU(), nn.Flatten(), nn.Linear(18, 3)),
        (4, 2, 4),
    ),
    "transformer": Case(Transformer, (3, 3, 4)),
    "twice": Case(Twice, (5, 4)),
}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    return CASES[request.param].make()


def labelled(model: nn.Module, x: Tensor, loss: str) -> Tensor:
    with torch.no_grad():
        outputs = model(x)
    y = torch.randn(outputs.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(3))
    return y.argmax(-1) if loss == "cross-entropy" else y


def same(found: Factors, expected: dict[str, tuple[Tensor, Tensor]]) -> None:
    assert set(found) == set(expected)
    for name, (A, G) in expected.items():
        torch.testing.assert_close(found[name].A, A, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found[name].G, G, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("fisher", ["empirical", "expected"])
@pytest.mark.parametrize("loss", ["squared-error", "cross-entropy"])
def test_factors_are_those_of_the_loops(case: tuple[nn.Module, Tensor], loss: str, fisher: Fisher) -> None:
    model, x = case
    y = labelled(model, x, loss)
    if loss == "cross-entropy" and y.dim() > 1:
        y[0, 0] = -100
    found = kfac_factors(model, (x, y), SquaredError(0.3) if loss == "squared-error" else loss, fisher)
    same(found, explicit_factors(model, x, y, loss, fisher, 0.3))
    assert all(name.startswith("norm.") for name in found.uncovered)
    terms = (y != -100).sum() if loss == "cross-entropy" else y[..., 0].numel()
    assert (found.loss, found.fisher, found.samples) == (loss, fisher, terms)


def test_batches_add_up(case: tuple[nn.Module, Tensor]) -> None:
    model, x = case
    y = labelled(model, x, "cross-entropy")
    whole = kfac_factors(model, (x, y), fisher="expected")
    parts = kfac_factors(model, zip(x.split(2), y.split(2), strict=True), fisher="expected")
    same(parts, {name: (layer.A, layer.G) for name, layer in whole.items()})
    assert parts.samples == whole.samples
    assert [layer.rows for layer in parts.values()] == [layer.rows for layer in whole.values()]


def test_the_exact_fisher_of_one_linear_layer() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3).double(), torch.randn(7, 4, dtype=torch.float64)
    layer = kfac_factors(model, (x, None), SquaredError(0.3), "expected")["weight"]
    exact = exact_fisher(model, [model.weight], x, "squared-error", 0.3)
    torch.testing.assert_close(torch.kron(layer.G, layer.A), exact, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(layer.G, exact_fisher(model, [model.bias], x, "squared-error", 0.3))


def test_exact_in_a_deep_linear_network_and_not_with_curves() -> None:
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 3)).double()
    curved = nn.Sequential(linear[0], nn.Tanh(), linear[1], nn.Tanh(), linear[2])
    x = torch.randn(9, 3, dtype=torch.float64)
    for model, exact in ((linear, True), (curved, False)):
        for name, layer in kfac_factors(model, (x, None), "squared-error", "expected").items():
            block = exact_fisher(model, [model.get_parameter(f"{name}.weight")], x, "squared-error")
            last = name == list(dict(model.named_children()))[-1]
            assert torch.allclose(torch.kron(layer.G, layer.A), block, rtol=1e-10, atol=1e-13) == (
                exact or last
            )


def test_monte_carlo_nears_the_expected_factors() -> None:
    model, x = CASES["transformer"].make()
    many = x.repeat(1000, 1, 1)
    drawn = kfac_factors(
        model, (many, None), fisher="monte-carlo", generator=torch.Generator().manual_seed(0)
    )
    again = kfac_factors(
        model, (many, None), fisher="monte-carlo", generator=torch.Generator().manual_seed(0)
    )
    for name, layer in kfac_factors(model, (x, None), fisher="expected").items():
        assert torch.equal(drawn[name].G, again[name].G)
        # 3000 sequences of one draw each: a standard error is about 2 in 100 of the norm.
        assert (drawn[name].G - layer.G).norm() < 0.1 * layer.G.norm()
        torch.testing.assert_close(drawn[name].A, layer.A)


def test_a_gpt_with_a_tied_head() -> None:
    torch.manual_seed(0)
    model = GPT(layers=2, width=8, heads=2, vocab=5, context=4, tied=True).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    x, y = torch.randint(5, (2, 3, 4))
    found = kfac_factors(model, (x, y))
    layers = explicit_factors(model, x, y, "cross-entropy", "empirical")
    assert set(found) == {*layers, "head"}
    for name, (A, G) in layers.items():
        torch.testing.assert_close(found[name].A, A, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found[name].G, G, rtol=1e-10, atol=1e-12)
    logits = model(x)
    delta = (logits.softmax(-1) - F.one_hot(y, 5)).flatten(0, 1)
    torch.testing.assert_close(found["head"].G, delta.mT @ delta / 12)
    assert found.uncovered["embedding.weight"] == "used by embedding"
    assert {name for name in found.uncovered if not name.startswith(("embedding", "previous"))} == {
        *("layers.0.x0_scale", "layers.1.x0_scale"),
        *("layers.1.attention.value_gate", "layers.1.attention.value_embedding.weight"),
    }


def test_layers_of_hugging_face() -> None:
    torch.manual_seed(0)
    theirs = nn.Sequential(Conv1D(5, 4), nn.GELU(), Conv1D(3, 5)).double()
    ours = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3)).double()
    for i in (0, 2):
        ours[i].weight.data, ours[i].bias.data = theirs[i].weight.data.T, theirs[i].bias.data
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    y = labelled(ours, x, "cross-entropy")
    same(kfac_factors(theirs, (x, y)), explicit_factors(ours, x, y, "cross-entropy", "empirical"))


def test_how_a_model_may_answer_and_be_asked() -> None:
    model, x = CASES["mlp"].make()
    y = labelled(model, x, "cross-entropy")

    class Answer:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    class Wrapped(nn.Module):
        def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
            super().__init__()
            self.inner, self.wrap = model, wrap

        def forward(self, x: Tensor, scale: float = 1.0) -> Any:
            return self.wrap(self.inner(scale * x))

    expected = kfac_factors(model, (x, y))
    as_mapping = Wrapped(lambda z: {"logits": z})
    for found in (
        kfac_factors(Wrapped(Answer), (x, y)),
        kfac_factors(as_mapping, [({"x": x}, y)]),
        kfac_factors(as_mapping, ({"x": x / 2, "scale": 2.0}, y)),
        kfac_factors(as_mapping, [((x / 2, 2.0), y)]),
        kfac_factors(as_mapping, [[x, y]], lambda z, y: F.cross_entropy(z, y, reduction="none")),  # type: ignore[list-item]
        kfac_factors(Wrapped(lambda z: [z]), (x, y), outputs=lambda model, x: model(x)[0]),
        kfac_factors(as_mapping, (x.clone().requires_grad_(), y)),
    ):
        same(found, {f"inner.{name}": (layer.A, layer.G) for name, layer in expected.items()})
    with refused(GeometryError, setting="outputs"):
        kfac_factors(Wrapped(lambda z: [z]), (x, y))


def test_the_model_is_left_as_it_was() -> None:
    model, x = CASES["transformer"].make()
    y = labelled(model, x, "cross-entropy")
    model.head.bias.requires_grad_(False)  # type: ignore[union-attr]
    model.train()
    gradients: dict[str, Tensor | None] = {}
    for i, (name, parameter) in enumerate(model.named_parameters()):
        parameter.grad = torch.full_like(parameter, 7.0) if i % 2 and parameter.requires_grad else None
        gradients[name] = parameter.grad
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def check() -> None:
        for name, parameter in model.named_parameters():
            assert parameter.grad is gradients[name]
            assert parameter.grad is None or bool((parameter.grad == 7).all())
            assert parameter.requires_grad == (name != "head.bias")
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert model.training
        assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())

    with torch.no_grad():
        kfac_factors(model, (x, y))
    check()
    with refused(GeometryError, setting="targets", given=5):
        kfac_factors(model, [(x, y), (x, y + 3)])
    check()
    with pytest.raises(RuntimeError):
        kfac_factors(model, (x[..., :2], y))
    check()
    assert model(x).requires_grad, "nothing watches the model any more"


def test_a_frozen_model_has_the_same_factors() -> None:
    model, x = CASES["mlp"].make()
    y = labelled(model, x, "squared-error")
    expected = kfac_factors(model, (x, y), "squared-error")
    found = kfac_factors(model.requires_grad_(False), (x, y), "squared-error")
    same(found, {name: (layer.A, layer.G) for name, layer in expected.items()})


def test_an_input_that_changes_between_two_readers() -> None:
    class Changing(nn.Module):
        def __init__(self, change: bool) -> None:
            super().__init__()
            self.a, self.b, self.change = nn.Linear(3, 2), nn.Linear(3, 2), change

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            first = self.a(x)
            return first + self.b(x.mul_(2) if self.change else x)

    x = torch.randn(5, 3, dtype=torch.float64)
    for change in (False, True):
        found = kfac_factors(Changing(change).double(), (x, None), "squared-error", "expected")
        torch.testing.assert_close(found["a"].A, x.T @ x / 5)
        torch.testing.assert_close(found["b"].A, x.T @ x / 5 * (4 if change else 1))


def test_readers_of_one_tensor_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[torch.Size] = []

    def counting(total: HalfGram, rows: Tensor) -> None:
        counted.append(rows.shape)

    monkeypatch.setattr(HalfGram, "add", counting)
    model = GPT(layers=1, width=8, heads=2, vocab=5, context=4)
    kfac_factors(model, (torch.randint(5, (3, 4)), torch.randint(5, (3, 4))))
    assert len(counted) == 5 + 7, "queries, keys and values read one tensor; gradients are of seven"


def test_no_gradient_of_a_weight_is_computed() -> None:
    class Noticing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            return weight.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> None:
            raise AssertionError("somebody asked for the gradient of a weight")

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x * Noticing.apply(self.scale))

    model = Scaled()
    found = kfac_factors(model, (torch.randn(6, 4), torch.randn(6, 3)), "squared-error")
    assert list(found.uncovered) == ["scale"]
    with pytest.raises(AssertionError, match="gradient of a weight"):
        model(torch.randn(6, 4)).sum().backward()


def test_single_precision_is_added_up_in_double() -> None:
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(4000, 4)
    y = torch.randint(3, (4000,))
    exact = kfac_factors(mlp_like(model).double(), (x.double(), y))
    found = kfac_factors(model, zip(x.split(100), y.split(100), strict=True))
    for name, layer in found.items():
        assert layer.A.dtype == layer.G.dtype == torch.float64
        torch.testing.assert_close(layer.A, exact[name].A, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(layer.G, exact[name].G, rtol=1e-5, atol=1e-7)
    half = kfac_factors(mlp_like(model).bfloat16(), (x.bfloat16(), y))
    for name, layer in half.items():  # 8 bits of an activation, but sums of 4000 that do not stall
        assert (layer.A - exact[name].A).norm() < 0.02 * exact[name].A.norm()
    with torch.autocast("cpu"):
        automatic = kfac_factors(model, (x, y))
    torch.testing.assert_close(automatic["0"].A, exact["0"].A, rtol=1e-5, atol=1e-7)


def mlp_like(model: nn.Module) -> nn.Module:
    copy = mlp()
    copy.load_state_dict(model.state_dict())
    return copy


@pytest.mark.parametrize("width", [3, 512, 513, 700])
def test_grams_of_any_width(width: int) -> None:
    rows = torch.randn(5, width, dtype=torch.float64)
    torch.testing.assert_close(gram(rows), rows.T @ rows, rtol=1e-12, atol=1e-12)


def test_eigenvalues() -> None:
    model, x = CASES["mlp"].make()
    layer = kfac_factors(model, (x, None), "squared-error", "expected")["4"]
    inputs, outputs = layer.eigenvalues()
    assert outputs.tolist() == pytest.approx([1, 1, 1])
    assert inputs.sum().item() == pytest.approx(layer.A.trace().item())
    assert bool((inputs.diff() >= 0).all())


def test_a_factor_that_is_too_wide_is_left_out_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 9)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    found = kfac_factors(model, (x, None), "squared-error", "expected", widest=8)
    assert list(found) == ["0"]
    assert found.uncovered == dict.fromkeys(("2.weight", "2.bias"), "a factor of side 9 is wider than 8")
    whole = kfac_factors(model, (x, None), "squared-error", "expected")
    assert torch.equal(found["0"].G, whole["0"].G)


def test_what_is_refused() -> None:
    model, x = CASES["mlp"].make()
    y = labelled(model, x, "cross-entropy")
    cases: list[tuple[str, Callable[[], object]]] = [
        ("batches", lambda: kfac_factors(model, [])),
        ("batches", lambda: kfac_factors(model, (x[:0], y[:0]))),
        ("batches", lambda: kfac_factors(model, (x, torch.full_like(y, -100)))),
        ("batches", lambda: kfac_factors(model, x)),
        ("fisher", lambda: kfac_factors(model, (x, y), fisher="exact")),  # type: ignore[arg-type]
        ("model", lambda: kfac_factors(nn.Tanh(), (x, y))),
        (
            "model",
            lambda: kfac_factors(nn.LayerNorm(4).double(), (x, y)),
        ),
        ("batches", lambda: kfac_factors(model, (x / 0, y))),
        ("model", lambda: kfac_factors(normalised(), (x, y))),
    ]
    for setting, call in cases:
        with refused(GeometryError, setting=setting):
            call()
    assert len(kfac_factors(normalised().eval(), (x, y))) == 2
    with pytest.raises(KeyError, match="layers with factors are 0, 2, 4"):
        kfac_factors(model, (x, y))["head"]


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()


def test_factors_are_saved_and_loaded(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.ones(5, 3)
    factors = kfac_factors(model, (x, torch.zeros(5, 2)), "squared-error")
    factors.save(tmp_path / "factors.pt")
    read = Factors.load(tmp_path / "factors.pt")
    assert (read.loss, read.fisher, read.samples) == (factors.loss, factors.fisher, factors.samples)
    assert list(read) == list(factors)
    for name, one in factors.items():
        assert torch.equal(read[name].A, one.A)
        assert torch.equal(read[name].G, one.G)
        assert read[name].rows == one.rows
    (tmp_path / "other.pt").write_bytes(b"nothing")
    for path in ("other.pt", "missing.pt"):
        with refused(GeometryError, setting="path"):
            Factors.load(tmp_path / path)


def test_heads_have_blocks_of_the_factors() -> None:
    model = GPT(layers=1, width=8, heads=2, vocab=11, context=6).double()
    torch.nn.init.normal_(model.get_parameter("layers.0.attention.output.weight"))
    ids = torch.arange(6)[None]
    factors = kfac_factors(model, (ids, ids.roll(-1, 1)))
    head = find_heads(model)[1]
    found = factors.of_head(head)
    query, output = "layers.0.attention.query", "layers.0.attention.output"
    assert torch.equal(found[query].G, factors[query].G[4:, 4:])
    assert torch.equal(found[query].A, factors[query].A)
    assert torch.equal(found[output].A, factors[output].A[4:, 4:])


def test_compiled_models_run_as_they_are_written() -> None:
    """The compiler would trace the hooks of a reading, and compile a kernel for each of them."""
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)
    batch = (x, torch.zeros(5, 2))
    plain = kfac_factors(model, batch, "squared-error")
    made: Any = torch.compile(model, backend=backend)
    found = kfac_factors(made, batch, "squared-error")
    assert not compiled
    for one, other in zip(plain.values(), found.values(), strict=True):
        assert torch.equal(one.A, other.A)
        assert torch.equal(one.G, other.G)
