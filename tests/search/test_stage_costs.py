from pathlib import Path

import pytest
import torch

from raising import refused
from topograd.data.windows import Text
from topograd.errors import ConfigError
from topograd.nn.gpt import GPT
from topograd.runs.config import TrainConfig
from topograd.runs.session import LoadedTextRun, open_session
from topograd.search.dynamic import best_partition
from topograd.search.stage_costs import Batch, costs_of_run, probe, probe_costs
from topograd.training.runs import start


@pytest.fixture
def stack() -> GPT:
    torch.manual_seed(0)
    made = GPT(layers=3, width=16, heads=2, vocab=12, context=8)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def batches(count: int) -> list[Batch]:
    """Counting upwards by a step that the first two tokens tell."""
    made = []
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        start, by = torch.randint(0, 12, (2, 8, 1), generator=generator)
        tokens = (start + by * torch.arange(9)) % 12
        made.append((tokens[:, :-1], tokens[:, 1:]))
    return made


def text(batch: Batch) -> Text:
    return Text(*batch, nbytes=batch[1].numel())


def test_every_interval_has_a_cost_and_the_stack_stays(stack: GPT) -> None:
    before = {name: value.clone() for name, value in stack.state_dict().items()}
    told: list[tuple[int, int]] = []
    *train, heldout = batches(4)
    costs = probe_costs(stack, train, text(heldout), on_probe=lambda done, of: told.append((done, of)))
    assert set(costs) == {(a, b) for a in range(3) for b in range(a + 1, 4)}
    assert told == [(i, 6) for i in range(1, 7)]
    assert all(torch.equal(before[name], value) for name, value in stack.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in stack.parameters())
    assert best_partition(costs, 3, stages=2).composition.stages == 2
    assert set(probe_costs(stack, train, text(heldout), min_depth=2)) == {(0, 2), (0, 3), (1, 3)}


@pytest.mark.parametrize("a", [0, 1])
def test_a_probe_learns_its_layers_alone(stack: GPT, a: int) -> None:
    *train, heldout = batches(25)
    short = probe(stack, a, 3, train[:1], text(heldout), rate=0.01)
    long = probe(stack, a, 3, train, text(heldout), rate=0.01)
    assert long < short - 0.05
    before = probe(stack, a, 2, train[:3], text(heldout), 0.01)
    with torch.no_grad():  # what comes after layer b does not count
        for parameter in stack.layers[2].parameters():
            parameter.add_(1.0)
    assert probe(stack, a, 2, train[:3], text(heldout), 0.01) == before


def test_nothing_to_probe(stack: GPT) -> None:
    with refused(ConfigError, setting="min_depth", given=1):
        probe_costs(stack, [], text(batches(1)[0]))
    with refused(ConfigError, setting="min_depth", given=4):
        probe_costs(stack, batches(1), text(batches(1)[0]), min_depth=4)


@pytest.fixture(scope="module")
def trained(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> LoadedTextRun:
    folder = tmp_path_factory.mktemp("costs") / "run"
    start(config.changed(partition="2,2", decoder=1), folder).train()
    return open_session(folder)


def test_the_costs_of_a_run_are_of_its_layers_on_its_text(trained: LoadedTextRun) -> None:
    """Private decoders lie behind the layers and are no part of a partition."""
    costs = costs_of_run(trained, batches=2, seed=1)
    assert set(costs) == {(a, b) for a in range(4) for b in range(a + 1, 5)}
    assert costs_of_run(trained, batches=2, seed=1) == costs
    assert costs_of_run(trained, batches=2, seed=2) != costs
    assert all(1 < cost < 9 for cost in costs.values())
    assert len(trained.stack.layers) == 6


def test_layers_that_do_not_follow_one_another_have_no_stage_costs(
    config: TrainConfig, tmp_path: Path
) -> None:
    start(config.changed(graph="forest", branches=("2", "2"), steps=1), tmp_path / "run").train()
    with pytest.raises(ConfigError, match="has branches, relays or an input bus"):
        costs_of_run(open_session(tmp_path / "run"), batches=1, seed=0)
