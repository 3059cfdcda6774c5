"""The same factors from curvlinops, with the scales between its conventions and ours pinned.

It is asked for `expand`, weights apart from biases, one batch. A is the same. With C outputs of a term and N
terms, of G:

    its loss                      is ours times    so its G is ours times: empirical    type-2, mc
    cross-entropy, mean           1                                        1            1
    cross-entropy, sum            1                                        N            N
    squared error, mean           2 / C                                    4 / C        2 / C
    squared error, sum            2                                        4 N          2 N

Classes are second in its outputs, last in ours. Its type-2 sends all positions of a sequence in one pass.
"""

import pytest
import torch
import torch.nn.functional as F
from curvlinops import KFACLinearOperator
from torch import Tensor, nn

from tests.oracles.fisher import explicit_factors
from topograd.geometry import losses
from topograd.geometry.factors import Factors, kfac_factors
from topograd.geometry.losses import Fisher, SquaredError

TYPES: dict[Fisher, str] = {"empirical": "empirical", "expected": "type-2", "monte-carlo": "mc"}
SEED = 11


class Attending(nn.Module):
    """Positions that hear one another; every parameter is in a layer, as curvlinops wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.head = nn.Linear(4, 12), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head(x + self.out(F.scaled_dot_product_attention(q, k, v)))


class ClassesSecond(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.inner(x)
        return outputs.movedim(-1, 1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4, bias=False), nn.ReLU(), nn.Linear(4, 3))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(8, 3)
    )


MODELS = {
    "mlp": (mlp, (6, 4)),
    "convolutions": (convolutions, (5, 2, 5, 5)),
    "positions apart": (mlp, (3, 4, 4)),
    "attention": (Attending, (3, 4, 4)),
}

COMPARABLE = [
    (name, fisher) for name in MODELS for fisher in TYPES if (name, fisher) != ("attention", "expected")
]
"""The one pair left out has a test of its own: theirs is another matrix."""


def made(name: str, loss: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model, x = build().double(), torch.randn(shape, dtype=torch.float64)
    y = torch.randn_like(model(x))
    return model, x, y.argmax(-1) if loss == "cross-entropy" else y


def theirs(
    model: nn.Module, x: Tensor, y: Tensor, loss: str, fisher: Fisher, reduction: str
) -> dict[str, tuple[Tensor, Tensor]]:
    entropy = loss == "cross-entropy"
    outer = ClassesSecond(model) if entropy else model
    operator = KFACLinearOperator(
        outer,
        nn.CrossEntropyLoss(reduction=reduction) if entropy else nn.MSELoss(reduction=reduction),
        list(outer.parameters()),
        [(x, y)],
        fisher_type=TYPES[fisher],
        kfac_approx="expand",
        separate_weight_and_bias=True,
        check_deterministic=False,
        seed=SEED,
    )
    operator.compute_kronecker_factors()
    A, G = operator._input_covariances, operator._gradient_covariances
    return {name.removeprefix("inner."): (A[name], G[name]) for name in A}


def scale(loss: str, fisher: Fisher, reduction: str, terms: int, classes: int) -> float:
    if loss == "cross-entropy":
        return 1.0 if reduction == "mean" else terms
    return (4.0 if fisher == "empirical" else 2.0) * (1 / classes if reduction == "mean" else terms)


def multinomial(p: Tensor, generator: torch.Generator) -> Tensor:
    """Labels as curvlinops draws them."""
    return p.flatten(0, -2).multinomial(1, generator=generator).view(p.shape[:-1])


def ours(model: nn.Module, x: Tensor, y: Tensor, loss: str, fisher: Fisher) -> Factors:
    return kfac_factors(model, (x, y), loss, fisher, generator=torch.Generator().manual_seed(SEED))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", ["cross-entropy", "squared-error"])
@pytest.mark.parametrize(("name", "fisher"), COMPARABLE)
def test_agreement(
    name: str, loss: str, fisher: Fisher, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_drawn", multinomial)  # both draw the same labels
    model, x, y = made(name, loss)
    found, expected = ours(model, x, y, loss, fisher), theirs(model, x, y, loss, fisher, reduction)
    factor = scale(loss, fisher, reduction, found.samples, 3)
    assert set(found) == set(expected)
    for layer, (A, G) in expected.items():
        torch.testing.assert_close(found[layer].A, A, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(factor * found[layer].G, G, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loss", ["cross-entropy", "squared-error"])
def test_attention_under_type_2_has_products_between_positions(loss: str) -> None:
    """Ours are the loops' factors. Theirs differ where positions meet, and agree behind that, at the head."""
    model, x, y = made("attention", loss)
    found, expected = ours(model, x, y, loss, "expected"), theirs(model, x, y, loss, "expected", "mean")
    factor = scale(loss, "expected", "mean", found.samples, 3)
    explicit = explicit_factors(model, x, y, loss, "expected")
    away = {}
    for layer, (_, G) in expected.items():
        torch.testing.assert_close(found[layer].G, explicit[layer][1], rtol=1e-10, atol=1e-12)
        away[layer] = ((factor * found[layer].G - G).norm() / G.norm()).item()
    assert away["head"] < 1e-12
    assert away["out"] < 1e-12
    assert away["qkv"] > 0.1


def test_the_noise_of_their_squared_error_has_variance_one_half() -> None:
    """‖f - y‖² is -log N(f, ½ I): its gradient 2 (f - y) has the covariance 2 I, which is ours for σ² = 2."""
    model, x, y = made("mlp", "squared-error")
    found = kfac_factors(model, (x, y), SquaredError(2.0), "expected")
    for layer, (_, G) in theirs(model, x, y, "squared-error", "expected", "sum").items():
        torch.testing.assert_close(found.samples * found[layer].G, G, rtol=1e-10, atol=1e-12)
