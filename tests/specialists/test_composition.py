"""Compositions: the base without any, a specialist alone, sums and deltas, and what is refused."""

from __future__ import annotations

import pytest
import torch

from raising import refused
from topograd.errors import ConfigError
from topograd.exec.forward import Predictor
from topograd.runs.session import LoadedTextRun
from topograd.specialists.attach import Attached, attach, new_specialist
from topograd.specialists.composition import composed, composed_terms, parse_specialists

TOKENS = torch.randint(200, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def attached(gpt: LoadedTextRun, tmp_path_factory: pytest.TempPathFactory) -> Attached:
    place = tmp_path_factory.mktemp("specialists")
    made = attach(gpt, [new_specialist(place / name, gpt, seed=ord(name)) for name in ("a", "b")])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in made.stages:
            for parameter in made.part(name).parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return made


@torch.no_grad()
def test_deltas_and_sums(attached: Attached) -> None:
    def z(weights: dict[str, float], pool: str = "deltas") -> torch.Tensor:
        return Predictor(attached.stack, composed(attached, weights, pool))(TOKENS)  # type: ignore[arg-type]

    base, a, b = z({}), z({"a": 1}), z({"b": 1})
    assert torch.equal(base, Predictor(attached.base.stack, attached.base.plan)(TOKENS))
    assert not torch.allclose(a, b)
    torch.testing.assert_close(z({"a": 0.3, "b": 0.5}), base + 0.3 * (a - base) + 0.5 * (b - base))
    torch.testing.assert_close(z({"a": 1, "b": 1}, "sum"), base + a + b)
    assert torch.equal(z({"a": 0.0}), base)


def test_what_is_inactive_does_not_run(attached: Attached) -> None:
    assert composed_terms(attached, {"b": 1.0}) == ((4, 1.0),)
    assert composed_terms(attached, {}) == attached.base.plan.prediction.full
    plan = composed(attached, {"a": 1.0})
    assert plan.prediction.after(plan.last) == ((3, 1.0),)
    assert [p.index for p in plan.needed(3)] == [0, 1, 2, 3]


def test_what_users_write() -> None:
    assert parse_specialists("a") == {"a": 1.0}
    assert parse_specialists("runs/a*0.5, b*-1") == {"runs/a": 0.5, "b": -1.0}
    for words in ("", "a,,b", "a*x", "*2", "a*nan", "a,a"):
        with refused(ConfigError, setting="specialists"):
            parse_specialists(words)


def test_unknown_names_and_weights_are_refused(attached: Attached) -> None:
    with refused(ConfigError, setting="specialists", given="c"):
        composed(attached, {"c": 1.0})
    with refused(ConfigError, setting="specialists['a']", given=1e9):
        composed(attached, {"a": 1e9})
