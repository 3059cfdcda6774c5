import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from topograd.errors import ConfigError, TopologyError
from topograd.nn.gpt import GPT
from topograd.reference.executor import graph_losses
from topograd.runs.config import TrainConfig
from topograd.search.expectation import expected_boundaries
from topograd.search.soft import SoftBoundaries, SoftConfig, learn_boundaries
from topograd.training.executor import prepare, train_step


def learned(losses: list[float], steps: int = 150, **settings: float) -> SoftBoundaries:
    """The boundaries after `steps` under losses that stay as they are."""
    boundaries = SoftBoundaries(len(losses), SoftConfig(**settings), steps)  # type: ignore[arg-type]
    for step in range(steps):
        boundaries.update(torch.tensor(losses), step / (steps - 1))
    return boundaries


def test_the_temperature_falls_and_the_count_is_right_at_first() -> None:
    config = SoftConfig(stages=3, hot=4.0, cold=0.25)
    assert [config.temperature(p) for p in (0.0, 0.5, 1.0)] == pytest.approx([4.0, 1.0, 0.25])
    assert expected_boundaries(SoftBoundaries(9, config, 1).transmissivities(0.0)).item() == pytest.approx(2)


def test_the_derivative_of_the_soft_loss_by_lambda_is_the_stage_loss() -> None:
    """Of the reference's whole graph, by finite differences, against what the executor returns."""
    torch.manual_seed(0)
    boundaries = SoftBoundaries(3, SoftConfig(stages=2), 9)
    stack = GPT(layers=3, width=16, heads=2, vocab=20, context=8, head_rank=2).double()
    prepare(stack, boundaries.topology(0.0))
    inputs, targets = torch.randint(0, 20, (2, 2, 8))
    losses = train_step(stack, boundaries.topology(0.0), inputs, targets)
    h = 1e-4
    for i in range(2):
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                boundaries.logits[i] += sign * h
                values.append(graph_losses(stack, boundaries.topology(0.0), inputs, targets)[0].item())
                boundaries.logits[i] -= sign * h
        lam = boundaries.transmissivities(0.0)[i].item()
        slope = lam * (1 - lam) / boundaries.config.hot
        assert (values[0] - values[1]) / (2 * h) == pytest.approx(-losses[i].item() * slope, rel=1e-6)


def test_boundaries_go_where_the_loss_is_least() -> None:
    found = learned([4.0, 1.0, 4.0, 4.0, 1.0, 4.0, 1.0], stages=3, length=0.0)
    assert found.harden().parts == (2, 3, 2)
    lam = found.transmissivities(1.0)
    assert lam[[1, 4]].max() < 0.1
    assert lam[[0, 2, 3, 5]].min() > 0.9
    assert expected_boundaries(lam).item() == pytest.approx(2, abs=0.1)


def test_the_count_is_met_in_few_steps_while_the_level_of_the_losses_falls() -> None:
    """As in training, where the losses lose some nats together and differ by hundredths in the end."""
    boundaries = SoftBoundaries(12, SoftConfig(stages=3, length=0.0), 60)
    for step in range(60):
        level = 3 + 3 * (1 - step / 60) ** 4
        boundaries.update(level - 0.02 * torch.arange(12), step / 59)
    lam = boundaries.transmissivities(1.0)
    assert expected_boundaries(lam).item() == pytest.approx(2, abs=0.05)
    assert boundaries.harden().parts == (10, 1, 1)


def test_the_losses_alone_push_boundaries_to_the_end_and_capability_pulls_them_back() -> None:
    falling = [3.0, 2.9, 2.8, 2.7, 2.6, 2.5, 2.4, 2.3]
    alone = learned(falling, stages=3, length=0.0)
    assert alone.harden().parts == (6, 1, 1)
    capable = learned(falling, stages=3, length=0.0, min_depth=2, capability=5.0)
    assert min(capable.harden().parts) >= 2


def test_the_multiplier_holds_the_count_against_a_cost_of_coupling() -> None:
    found = learned([2.0, 1.0, 2.0, 1.1, 2.0], stages=2, coupling=3.0, length=0.0, steps=400)
    assert expected_boundaries(found.transmissivities(1.0)).item() == pytest.approx(1, abs=0.15)
    assert found.multiplier > 0  # losses of 1 to 2 less 3 for coupling: boundaries gain, and are held back


def test_hardening_keeps_to_the_least_depth() -> None:
    boundaries = SoftBoundaries(6, SoftConfig(stages=3, min_depth=2), 9)
    with torch.no_grad():
        boundaries.logits[:] = torch.tensor([-9.0, 1.0, -5.0, 2.0, -9.0])
    assert boundaries.harden().parts == (2, 2, 2)


def test_every_layer_keeps_a_loss_and_a_hard_boundary_can_open() -> None:
    boundaries = learned([5.0, 1.0, 5.0, 5.0], stages=2, length=0.0)
    lam = boundaries.transmissivities(1.0)
    assert 0 < lam.min() < 1e-3
    assert 1 - 1e-3 < lam.max() < 1
    assert all(stage.weight > 0 for stage in boundaries.topology(1.0).stages)
    for _ in range(100):
        boundaries.update(torch.tensor([1.0, 5.0, 5.0, 5.0]), 1.0)
    assert boundaries.harden().parts == (1, 3)


def test_learning_trains_the_model_and_gives_a_partition(config: TrainConfig) -> None:
    seen: list[list[float]] = []
    found = learn_boundaries(
        config, SoftConfig(stages=2, min_depth=2), lambda step, steps, lam: seen.append(lam)
    )
    assert found.composition.parts == (2, 2)
    assert len(seen) == config.steps
    assert seen[0] != seen[-1]
    assert len(found.losses) == 4
    assert found.losses[-1] < math.log(257) - 0.5
    assert len(found.readings["bpb"]["prefix"]) == 2
    assert found.readings["bpb"]["last"] < 8
    again = learn_boundaries(config, SoftConfig(stages=2, min_depth=2))
    assert again == found


def test_bad_settings(config: TrainConfig) -> None:
    with pytest.raises(TopologyError, match="5 stages need 5 layers and there are 4"):
        learn_boundaries(config, SoftConfig(stages=5))
    with pytest.raises(TopologyError, match="2 stages of at least 3 layers each"):
        learn_boundaries(config, SoftConfig(stages=2, min_depth=3))
    with pytest.raises(ConfigError, match="one layer has no place"):
        learn_boundaries(replace(config, model=replace(config.model, layers=1)), SoftConfig(stages=1))
    with pytest.raises(ConfigError, match="let it fall"):
        SoftConfig(hot=0.1, cold=1.0)
    with pytest.raises(ConfigError, match="rewards every boundary; set min_depth to 2"):
        SoftConfig(capability=1.0)
    with pytest.raises(ConfigError, match="travel is -1"):
        SoftConfig(travel=-1)


def test_losses_may_be_of_any_precision() -> None:
    boundaries = SoftBoundaries(3, SoftConfig(stages=2), 9)
    half: Tensor = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    boundaries.update(half, 0.0)
    assert boundaries.logits.dtype == torch.float64


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_temperature_that_falls_by_leaps_leaves_every_layer_its_loss(steps: int) -> None:
    """Logits that were bounded at one temperature are beyond the bound at the next."""
    boundaries = SoftBoundaries(6, SoftConfig(stages=3), steps)
    for step in range(steps):
        progress = step / max(steps - 1, 1)
        boundaries.update(torch.linspace(4, 1, 6), progress)
        lam = boundaries.transmissivities(1.0)
        assert ((lam > 0) & (lam < 1)).all()
    assert boundaries.harden().stages == 3
