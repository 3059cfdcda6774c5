import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from topograd.errors import ConfigError
from topograd.runs.config import TrainConfig
from topograd.search.learner import Learner
from topograd.search.surgery import SurgeryConfig, choose, neighbours, operate, train_with_surgery
from topograd.topology.composition import Composition
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology

HERE, BETTER, BEST, WORSE = map(Composition.parse, ("2,2", "4", "1,3", "3,1"))
SCORES = {HERE: 1.0, BETTER: 0.9, BEST: 0.8, WORSE: 1.1}


def test_the_neighbours_keep_the_least_depth() -> None:
    near = {str(pi) for pi in neighbours(HERE, 1)}
    assert near == {"4", "1,1,2", "2,1,1", "1,3", "3,1"}
    assert [str(pi) for pi in neighbours(HERE, 2)] == ["4"]


def test_greedy_takes_the_best_if_it_is_better() -> None:
    greedy, generator = SurgeryConfig(), np.random.default_rng(0)
    assert choose(HERE, SCORES, greedy, generator) == BEST
    assert choose(BEST, SCORES, greedy, generator) == BEST
    assert choose(HERE, {HERE: 1.0}, greedy, generator) == HERE
    assert choose(HERE, {HERE: 1.0, WORSE: 1.0}, greedy, generator) == HERE


def test_stochastic_takes_a_worse_one_as_often_as_it_should() -> None:
    config = SurgeryConfig(acceptance="stochastic", temperature=0.1)
    generator = np.random.default_rng(0)
    draws = [choose(HERE, {HERE: 1.0, WORSE: 1.1}, config, generator) for _ in range(2000)]
    assert draws.count(WORSE) / 2000 == pytest.approx(math.exp(-1), abs=0.04)  # 3.7 standard deviations
    assert {choose(HERE, {HERE: 1.0, BEST: 0.8}, config, generator) for _ in range(20)} == {BEST}
    assert {choose(HERE, SCORES, config, generator) for _ in range(200)} == set(SCORES)


def test_an_operation_changes_boundaries_and_nothing_that_was_learned(config: TrainConfig) -> None:
    configuration = Configuration.parse("4", heads="per-stage")
    learner = Learner(config, Topology.chain(configuration))
    for _ in range(3):
        learner.advance(Topology.chain(configuration))
    layers = {name: value.clone() for name, value in learner.stack.layers.state_dict().items()}
    head = learner.stack.head.matrix(0).clone()
    modular = SurgeryConfig(deployment="modular", min_depth=2)
    after, done = operate(learner, configuration, modular, np.random.default_rng(0))
    assert after.composition.parts == (2, 2)  # the only neighbour, and coupling and capability speak for it
    assert (done.before, done.after) == (Composition.parse("4"), after.composition)
    assert done.gain > 0
    assert done.merge == {}
    assert set(done.split) == {2}
    assert all(torch.equal(layers[n], v) for n, v in learner.stack.layers.state_dict().items())
    assert torch.equal(learner.stack.head.matrix(0), head)
    assert torch.equal(learner.stack.head.matrix(1), head)
    losses = learner.advance(Topology.chain(after))
    assert losses.isfinite().all()
    assert not torch.equal(learner.stack.head.matrix(0), learner.stack.head.matrix(1))


@pytest.mark.parametrize("heads", ["shared", "per-stage"])
def test_training_with_surgery(config: TrainConfig, heads: str) -> None:
    config = replace(config, partition="L", stage_heads=heads)  # type: ignore[arg-type]
    seen: list[Composition] = []
    surgery = SurgeryConfig(every=4, deployment="modular")
    found = train_with_surgery(config, surgery, lambda step, steps, losses, pi: seen.append(pi))
    assert [done.step for done in found.operations] == [4, 8]  # none in the last 4 steps
    assert [str(pi) for pi in seen[:4]] == ["4"] * 4
    assert seen[4] == found.operations[0].after == found.operations[1].before
    assert found.operations[0].after.stages == 2
    assert found.composition == seen[-1]
    assert len(found.readings["bpb"]["prefix"]) == found.composition.stages
    assert found.readings["bpb"]["last"] < 8


def test_a_random_walk_is_recorded_and_repeatable(config: TrainConfig) -> None:
    """Hot enough to accept anything: every step goes to a neighbour, and the seed decides which."""
    config = replace(config, partition="1,1,2", stage_heads="shared")
    surgery = SurgeryConfig(
        every=4, deployment="datacenter", acceptance="stochastic", temperature=1e3, min_depth=1
    )
    found = train_with_surgery(config, surgery)
    for done in found.operations:
        assert done.after in {done.before, *neighbours(done.before, 1)}
    assert found.operations == train_with_surgery(config, surgery).operations


def test_bad_settings(config: TrainConfig) -> None:
    with pytest.raises(ConfigError, match="'moon' is unknown"):
        SurgeryConfig(deployment="moon")
    with pytest.raises(ConfigError, match="every is 0"):
        SurgeryConfig(every=0)
    with pytest.raises(ConfigError, match="temperature is 0"):
        SurgeryConfig(temperature=0)
    with pytest.raises(ConfigError, match="partition 1,3 has a stage below 2 layers"):
        train_with_surgery(replace(config, partition="1,3"), SurgeryConfig(min_depth=2))
