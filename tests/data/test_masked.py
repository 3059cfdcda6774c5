"""Hidden tokens: how many, where, and always the same ones at the same place of a text."""

from pathlib import Path

import torch

from topograd.data import IGNORED, Loader, prepare
from topograd.data.masked import HIDDEN, MaskedLoader, hide


def test_what_is_hidden_is_the_target_and_nothing_else() -> None:
    inputs = torch.arange(2000).view(20, 100)
    seen, targets = hide(inputs, 5000, torch.Generator().manual_seed(0))
    hidden = targets != IGNORED
    assert torch.equal(seen == 5000, hidden)
    assert torch.equal(targets[hidden], inputs[hidden])
    assert torch.equal(seen[~hidden], inputs[~hidden])
    assert abs(hidden.double().mean().item() - HIDDEN) < 0.03


def test_a_row_has_at_least_one_where_it_may_and_none_elsewhere() -> None:
    inputs = torch.ones(50, 4, dtype=torch.long)
    allowed = torch.zeros(50, 4, dtype=torch.bool)
    allowed[:40, 1] = True
    _, targets = hide(inputs, 9, torch.Generator().manual_seed(0), allowed)
    assert torch.equal(targets != IGNORED, allowed)


def test_a_loader_hides_the_same_wherever_it_begins(corpus: Path) -> None:
    data = prepare(corpus, "bytes", 257)
    given = (data.train, 16, 3, 5)
    plain, loader = Loader(*given), MaskedLoader(*given, 257)
    batches = [next(loader) for _ in range(4)]
    place = loader.position
    expected = next(loader)
    for (inputs, targets), (own, _) in zip(batches, plain, strict=False):
        assert torch.equal(torch.where(targets == IGNORED, inputs, targets), own)
    assert not torch.equal(batches[0][1], batches[1][1])
    again = MaskedLoader(*given, 257)
    again.seek(place)
    assert all(torch.equal(a, b) for a, b in zip(next(again), expected, strict=True))
