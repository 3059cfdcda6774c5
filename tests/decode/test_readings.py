"""Top tokens, margins, shifts and rival gains of every stage."""

import pytest
import torch
from torch import Tensor

from raising import refused
from topograd.decode.calibration.measure import Readings, join, read
from topograd.errors import ConfigError

STAGES, TOKENS, VOCAB = 4, 300, 7


def drifting_logits(stages: int = STAGES, tokens: int = TOKENS, drift: float = 0.5) -> list[Tensor]:
    """Stages that each move the logits by noise: tops change for some tokens and stay for others."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(stages, tokens, VOCAB, generator=generator, dtype=torch.float64)
    noise[1:] *= drift
    return list(noise.cumsum(0))


def rows(tokens: int = TOKENS, length: int = 30) -> Tensor:
    return torch.arange(tokens) // length


def same(a: Readings, b: Readings) -> bool:
    names = ("top", "margin", "shift", "gain", "sequence")
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


def test_a_token_by_hand() -> None:
    first = torch.tensor([[3.0, 1.0, 0.5]], dtype=torch.float64)
    last = torch.tensor([[2.0, 3.0, 0.0]], dtype=torch.float64)  # D = (-1, 2, -0.5)
    readings = read([first, last], torch.tensor([5]))
    assert readings.top.tolist() == [[0], [1]]
    assert readings.margin.tolist() == [[2.0], [1.0]]
    assert readings.shift.tolist() == [[2.0]]
    assert readings.gain.tolist() == [[3.0]]
    assert readings.sequence.tolist() == [5]


def test_against_a_loop_over_tokens() -> None:
    logits = drifting_logits()
    readings = read(logits, rows())
    assert (len(readings), readings.stages) == (TOKENS, STAGES)
    for t in range(TOKENS):
        z = [stage[t].tolist() for stage in logits]
        for k in range(STAGES):
            order = sorted(range(VOCAB), key=lambda j: -z[k][j])
            assert readings.top[k, t] == order[0]
            assert readings.margin[k, t].item() == pytest.approx(z[k][order[0]] - z[k][order[1]], rel=1e-6)
            if k < STAGES - 1:
                change = [z[-1][j] - z[k][j] for j in range(VOCAB)]
                shift = max(abs(z[k + 1][j] - z[k][j]) for j in range(VOCAB))
                assert readings.shift[k, t].item() == pytest.approx(shift, rel=1e-6)
                gain = max(change) - change[order[0]]
                assert readings.gain[k, t].item() == pytest.approx(gain, rel=1e-6, abs=1e-12)


def test_a_margin_above_the_gain_keeps_the_argmax() -> None:
    """The theorem of the module's head. Both sides of it must occur, or the test would say nothing."""
    readings = read(drifting_logits(tokens=5000), rows(5000))
    safe = readings.margin[:-1] > readings.gain
    kept = readings.top[:-1] == readings.top[-1]
    assert 0 < safe.sum() < kept.sum() < kept.numel()
    assert kept[safe].all()


@pytest.mark.parametrize(("rise", "kept"), [(1.999, True), (2.001, False)], ids=["below", "above"])
def test_the_gain_is_sharp(rise: float, kept: bool) -> None:
    first = torch.tensor([[3.0, 1.0]], dtype=torch.float64)
    readings = read([first, first + torch.tensor([0.0, rise], dtype=torch.float64)], torch.tensor([0]))
    assert (readings.margin[0] > readings.gain[0]).item() is kept
    assert (readings.top[0] == readings.top[1]).item() is kept


def test_the_gain_is_at_most_twice_the_sum_of_shifts() -> None:
    readings = read(drifting_logits(), rows())
    assert (readings.gain >= 0).all()
    for k in range(STAGES - 1):
        assert (readings.gain[k] <= 2 * readings.shift[k:].sum(0) * (1 + 1e-6)).all()


def test_stored_as_float32_and_without_a_graph() -> None:
    logits = [z.requires_grad_() for z in drifting_logits()]
    readings = read(logits, rows().int())
    for numbers in (readings.margin, readings.shift, readings.gain):
        assert numbers.dtype == torch.float32
        assert not numbers.requires_grad
    assert readings.top.dtype == readings.sequence.dtype == torch.int64


def test_one_stage_has_no_transitions() -> None:
    readings = read(drifting_logits(stages=1), rows())
    assert readings.stages == 1
    assert readings.shift.shape == readings.gain.shape == (0, TOKENS)


def test_chunks_joined_are_the_whole() -> None:
    logits = drifting_logits()
    chunks = [slice(0, 100), slice(100, 107), slice(107, TOKENS)]
    parts = [read([z[chunk] for z in logits], rows()[chunk]) for chunk in chunks]
    assert same(join(parts), read(logits, rows()))


def test_halves_are_of_disjoint_sequences_and_keep_the_order() -> None:
    readings = read(drifting_logits(), rows())
    even, odd = readings.split()
    assert even.sequence.unique_consecutive().tolist() == [0, 2, 4, 6, 8]
    assert odd.sequence.unique_consecutive().tolist() == [1, 3, 5, 7, 9]
    where = torch.cat([torch.nonzero(rows() % 2 == parity).squeeze(-1) for parity in (0, 1)])
    assert same(join([even, odd]), readings.take(where))
    assert torch.equal(even.margin, readings.margin[:, rows() % 2 == 0])


def test_what_cannot_be_read() -> None:
    with refused(ConfigError, setting="vocab", given=1):
        read([torch.zeros(3, 1)], torch.zeros(3))
    with refused(ConfigError, setting="parts", given=[]):
        join([])
    two, three = (read(drifting_logits(stages=k), rows()) for k in (2, 3))
    with refused(ConfigError, setting="parts", given=[2, 3]):
        join([two, three])
