"""The router: it tells texts apart that want different specialists, and its regret is against the oracle."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from raising import refused
from topograd.errors import ConfigError, RunError
from topograd.exec.forward import stage_outputs
from topograd.runs.adapter import Adapter
from topograd.runs.session import LoadedTextRun
from topograd.runs.workspace import Workspace
from topograd.specialists.attach import Attached, attach, new_specialist, open_specialist
from topograd.specialists.router import Router, RouterTask, open_router, regret, save_router, train_router
from topograd.training.trainer import Trainer


@pytest.fixture(scope="module")
def made(gpt: LoadedTextRun, tmp_path_factory: pytest.TempPathFactory) -> tuple[Attached, dict[str, Adapter]]:
    """Two specialists that each expect the tokens of one text, whatever they read."""
    place = tmp_path_factory.mktemp("s")
    adapters = {name: new_specialist(place / name, gpt) for name in ("a", "b")}
    attached = attach(gpt, adapters)
    inputs = torch.cat([inputs for inputs, _ in texts()])
    with torch.no_grad():
        for name, token in (("a", 65), ("b", 90)):
            stage = attached.stages[name]
            h = stage_outputs(attached.stack, attached.plan, inputs, [stage])[stage]
            common = attached.stack.features(h).flatten(0, 1).mean(0)
            raised = 5 * common / common.square().sum()  # five nats more, on average
            attached.part(name).get_parameter("head.weight")[token - 1 : token + 2] += raised
    return attached, adapters


def texts() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for token in (65, 90):
        inputs = torch.randint(token - 1, token + 2, (16, 12), generator=generator)
        found.append((inputs, inputs.roll(-1, 1)))
    return found


def test_it_beats_every_fixed_choice(made: tuple[Attached, dict[str, Adapter]]) -> None:
    """On rows that it was not trained on, each text's own specialist is chosen."""
    router, found = train_router(made[0], texts())
    assert found["rows"] == 16
    assert found["chosen"] == {"base": 0, "a": 8, "b": 8}
    assert (found["agreement"], found["regret"]) == (1.0, 0.0)
    assert found["router"] == found["oracle"] < found["best_fixed"] - 0.3
    assert set(found["always"]) == {"base", "a", "b"}
    assert router.choose(made[0], [65, 66, 64, 65, 65]) == {"a": 1.0}
    assert router.choose(made[0], [90, 89, 91, 91, 90]) == {"b": 1.0}


def test_regret_of_a_perfect_and_of_a_bad_router() -> None:
    losses = torch.tensor([[1.0, 3.0], [2.0, 1.0]])
    router = Router(2, ["s"])
    with torch.no_grad():
        router.inner.weight.zero_()
        router.outer.weight.zero_()
        router.outer.bias.copy_(torch.tensor([1.0, 0.0]))
    found = regret(router, torch.zeros(2, 2), losses)
    assert (found["router"], found["oracle"], found["regret"]) == (2.0, 1.0, 1.0)
    assert found["agreement"] == 0.5
    assert found["always"] == {"base": 2.0, "s": 1.5}


def test_it_is_kept_and_belongs_to_its_specialists(
    made: tuple[Attached, dict[str, Adapter]], gpt: LoadedTextRun, tmp_path: Path
) -> None:
    attached, adapters = made
    router, found = train_router(attached, texts())
    save_router(tmp_path / "r", attached, adapters, router, found)
    again = open_router(tmp_path / "r", attached, adapters)
    x = torch.randn(3, 16)
    assert torch.equal(router(x), again(x))
    other = new_specialist(tmp_path / "a", gpt, seed=9)
    with pytest.raises(RunError, match="was trained for a, b as they were"):
        open_router(tmp_path / "r", attached, {"a": other, "b": adapters["b"]})
    with refused(RunError, setting="kind", given="specialist"):
        open_router(other.folder, attached, adapters)
    with refused(RunError, setting="kind", given="router"):
        open_specialist(tmp_path / "r")


def test_nothing_to_choose_is_refused(gpt: LoadedTextRun, made: tuple[Attached, dict[str, Adapter]]) -> None:
    with refused(ConfigError, setting="specialists"):
        train_router(attach(gpt, []), texts())
    with refused(ConfigError, setting="texts", given=1):
        train_router(made[0], [(i[:1], t[:1]) for i, t in texts()[:1]])


def test_a_training_that_was_stopped_goes_on_bit_for_bit(
    made: tuple[Attached, dict[str, Adapter]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, found = train_router(made[0], texts())
    one_step, steps = Trainer._one_step, list[int]()

    def interrupted(trainer: Trainer[RouterTask]) -> list[float]:
        steps.append(trainer.step)
        if len(steps) == 100:
            signal.raise_signal(signal.SIGTERM)
        return one_step(trainer)

    monkeypatch.setattr(Trainer, "_one_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_router(made[0], texts(), work=tmp_path)
    resumed, again = train_router(made[0], texts(), work=tmp_path)
    assert steps == list(range(300))
    assert again == found
    assert len(Workspace(tmp_path).metrics()) == 300
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
