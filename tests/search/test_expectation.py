import itertools

import pytest
import torch
from torch import Tensor

from lattice import from_bits
from topograd.search.soft import (
    expected_boundaries,
    expected_capability,
    expected_depths,
    length_penalty,
)
from topograd.search.utility import hard, structural_capability
from topograd.topology.composition import Composition, enumerate_compositions

LAMBDA = torch.tensor([0.3, 0.9, 0.5, 0.05, 0.6], dtype=torch.float64)


def all_partitions(lam: Tensor) -> list[tuple[Composition, float]]:
    """Every partition with its probability under independent boundaries."""
    found = []
    for vector in itertools.product((0, 1), repeat=len(lam)):
        p = 1.0
        for bit, x in zip(vector, lam.tolist(), strict=True):
            p *= 1 - x if bit else x
        found.append((from_bits(vector), p))
    return found


def test_depths_are_those_of_the_enumeration() -> None:
    expected = [0.0] * 6
    for pi, p in all_partitions(LAMBDA):
        for k, part in enumerate(pi.parts):
            expected[k] += p * part
    assert expected_depths(LAMBDA, 6).tolist() == pytest.approx(expected, abs=1e-14)
    assert expected_depths(LAMBDA, 2).tolist() == pytest.approx(expected[:2], abs=1e-14)
    assert expected_depths(LAMBDA, 6).sum().item() == pytest.approx(6)


@pytest.mark.parametrize("min_depth", [1, 2, 3, 6, 7])
def test_the_capability_is_that_of_the_enumeration(min_depth: int) -> None:
    expected = sum(p * structural_capability(pi, min_depth) for pi, p in all_partitions(LAMBDA))
    assert expected_capability(LAMBDA, min_depth).item() == pytest.approx(expected, abs=1e-14)


def test_a_vertex_is_its_partition() -> None:
    for pi in enumerate_compositions(5):
        lam = torch.tensor(hard(pi), dtype=torch.float64)
        assert expected_depths(lam, pi.stages).tolist() == list(pi.parts)
        assert expected_boundaries(lam).item() == pi.stages - 1
        assert expected_capability(lam, 2).item() == pytest.approx(structural_capability(pi, 2))
        short = sum(max(0, 2 - part) ** 2 for part in pi.parts)
        assert length_penalty(lam, pi.stages, 2).item() == short


def test_everything_is_differentiable() -> None:
    lam = LAMBDA.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: expected_depths(x, 4), (lam,))
    assert torch.autograd.gradcheck(lambda x: expected_capability(x, 2), (lam,))
    assert torch.autograd.gradcheck(lambda x: length_penalty(x, 3, 2.5), (lam,))


def test_a_mixture_hides_short_stages() -> None:
    """The limit that the module states: half (3, 1) and half (1, 2, 1) looks like a first stage of 2."""
    half = torch.tensor([0.5, 1.0, 0.0], dtype=torch.float64)
    assert expected_depths(half, 2)[0].item() == 2.0
    assert length_penalty(half, 1, 2).item() == 0.0
