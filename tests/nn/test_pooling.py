import math

import pytest
import torch
from torch import Tensor

from raising import refused
from topograd.errors import ConfigError
from topograd.nn.pooling import POOLINGS, pool, shrinkage_weight


@pytest.fixture
def logits() -> list[Tensor]:
    """Three stages' logits (2, 5, 11), far from uniform."""
    torch.manual_seed(0)
    return list(3 * torch.randn(3, 2, 5, 11, dtype=torch.float64))


def test_the_sum_is_the_product_of_the_experts_renormalised(logits: list[Tensor]) -> None:
    """ "Product of Experts" Prop. 2.2."""
    product = torch.stack([z.softmax(-1) for z in logits]).prod(0)
    expected = product / product.sum(-1, keepdim=True)
    torch.testing.assert_close(pool(logits, "sum").softmax(-1), expected, rtol=1e-12, atol=1e-15)


def test_the_mean_is_the_geometric_mean_renormalised(logits: list[Tensor]) -> None:
    mean = torch.stack([z.softmax(-1) for z in logits]).prod(0) ** (1 / 3)
    expected = mean / mean.sum(-1, keepdim=True)
    torch.testing.assert_close(pool(logits, "mean").softmax(-1), expected, rtol=1e-12, atol=1e-15)


def test_last_is_the_last_stage_itself(logits: list[Tensor]) -> None:
    assert pool(logits, "last") is logits[-1]


def test_given_weights(logits: list[Tensor]) -> None:
    expected = 0.5 * logits[0] - 2 * logits[1] + logits[2]
    torch.testing.assert_close(pool(logits, (0.5, -2.0, 1.0)), expected)
    assert torch.equal(pool(logits, (0.0, 0.0, 1.0)), logits[-1])


def test_shrinkage_by_hand() -> None:
    sure, even = torch.tensor([0.0, -1e9, -1e9, -1e9]), torch.zeros(4)
    half = torch.tensor([0.0, 0.0, -1e9, -1e9])
    z = torch.stack((sure, even, half)).double()
    torch.testing.assert_close(shrinkage_weight(z)[:, 0], torch.tensor([1.0, 0.0, 0.5]).double())
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    entropy = -sum(q * math.log(q) for q in p.tolist())
    assert shrinkage_weight(p.log()).item() == pytest.approx(1 - entropy / math.log(3), abs=1e-14)


def test_shrinkage_weighs_each_token_of_each_stage(logits: list[Tensor]) -> None:
    pooled = pool(logits, "shrinkage")
    for b in range(2):
        for t in range(5):
            rows = [z[b, t] for z in logits]
            expected = sum(shrinkage_weight(row) * row for row in rows)
            torch.testing.assert_close(pooled[b, t], expected)
    uniform = [torch.zeros_like(logits[0]), logits[1]]
    weight = shrinkage_weight(logits[1])
    torch.testing.assert_close(pool(uniform, "shrinkage"), weight * logits[1], msg="unsure stages are silent")


def test_one_stage_alone_is_itself_however_it_is_pooled(logits: list[Tensor]) -> None:
    for how in ("last", "sum", "mean"):
        assert torch.equal(pool(logits[:1], how), logits[0])
    assert set(POOLINGS) == {"last", "sum", "mean", "shrinkage"}


@pytest.mark.parametrize("how", ["median", (1.0, 2.0)])
def test_what_does_not_exist_is_refused(logits: list[Tensor], how: str) -> None:
    with refused(ConfigError, setting="how", given=how):
        pool(logits, how)
