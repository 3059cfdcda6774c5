"""Random networks of equal and unequal widths, in float64."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from papers.gram_metrics.checks import Problem

Make = Callable[..., Problem]


@pytest.fixture
def make() -> Make:
    """A problem from its widths N_0, ..., N_L; the targets are random and positive."""

    def build(*widths: int, examples: int = 5, unseen: int = 3, seed: int = 0) -> Problem:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        weights = [(2 / n) ** 0.5 * normal(m, n) for n, m in pairwise(widths)]
        rows = normal(examples + unseen, widths[0])
        return Problem(weights, rows[:examples], normal(examples).abs(), rows[examples:])

    return build
