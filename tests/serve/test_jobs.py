"""A job's own state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from topograd.decode.sampling import Sampling


def test_a_job_has_its_own_stream_of_numbers(make_desk: Callable[..., Any]) -> None:
    desk = make_desk()
    first, second = (desk.job([1, 2], 3, sampling=Sampling(temperature=1, seed=s)) for s in (5, 6))
    assert first.number < second.number
    drawn = torch.rand(3, generator=first.generator)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(5)))
    assert not torch.equal(drawn, torch.rand(3, generator=second.generator))
    assert (first.left, first.read, first.scores, first.cancelled) == (3, 0, [None], False)
