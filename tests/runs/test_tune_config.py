"""What may learn, and what is refused in words."""

from typing import Any

import pytest

from raising import refused
from topograd.errors import ConfigError
from topograd.nn.config import GPTConfig
from topograd.runs.config import TrainConfig, tuning
from topograd.runs.topology_config import TopologyConfig, depth_weight
from topograd.runs.tune_config import TuneConfig


def config(**changes: Any) -> TrainConfig:
    topology = {"partition": "2,1,1", **changes.pop("topology", {})}
    rest = {"init": "base", **changes.pop("rest", {})}
    return TrainConfig(
        topology=TopologyConfig(**topology), model=GPTConfig(layers=4), tune=TuneConfig(**changes), **rest
    )


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"lora_rank": -1}, "lora_rank"),
        ({"lora_alpha": 2.0}, "lora_alpha"),
        ({"frozen": True, "lora_rank": 2}, "lora_rank"),
        ({"exit_rank": 3}, "exit_rank"),
        ({"layer_dropout": 1.0}, "layer_dropout"),
        ({"first_layer": 1}, "first_layer"),
        ({"first_layer": 2, "topology": {"partition": "L"}}, "first_layer"),
        ({"frozen": True, "topology": {"partition": "L"}}, "partition"),
        ({"frozen": True, "topology": {"heads": "low-rank"}}, "heads"),
        ({"lora_rank": 2, "rest": {"init": None}}, "lora_rank"),
        ({"only_stage": 4}, "only_stage"),
        ({"only_stage": -1}, "only_stage"),
        ({"only_stage": 1, "first_layer": 2}, "only_stage"),
        ({"only_stage": 1, "rest": {"init": None}}, "only_stage"),
        ({"seq_len": 999}, "seq_len"),
        ({"lora_rank": 2, "topology": {"decoder": 1}}, "lora_rank"),
    ],
)
def test_refused(changes: dict[str, Any], setting: str) -> None:
    with refused(ConfigError, setting=setting):
        config(**changes)


def test_layers_before_the_first_that_learns_are_frozen() -> None:
    topology = config(first_layer=2, topology={"grad_scale": 1.0}).build_topology()
    assert [stage.frozen for stage in topology.stages] == [True, False, False]
    assert [stage.weight for stage in topology.stages] == [0.0, 1.0, 1.0]
    assert [stage.sources[0].grad_scale for stage in topology.stages[1:]] == [0.0, 1.0]


def test_a_frozen_model_learns_at_its_exits_alone() -> None:
    topology = config(frozen=True).build_topology()
    assert [stage.weight for stage in topology.stages] == [1.0, 1.0, 0.0]
    assert topology.stages[-1].frozen
    assert topology.stages[-1].head


def test_weights_by_depth() -> None:
    asked = config(topology={"depth_weights": 0.5}).build_topology()
    assert [stage.weight for stage in asked.stages] == [depth_weight(stop, 4, 0.5) for stop in (2, 3, 4)]
    assert [stage.weight for stage in asked.stages] == [0.5, 1.5, 4.5]
    with refused(ConfigError, setting="weights"):
        config(topology={"depth_weights": 0.5, "weights": (1.0, 1.0, 1.0)})
    with refused(ConfigError, setting="depth_weights", given=0.0):
        config(topology={"depth_weights": 0.0})


def test_the_last_stage_teaches_and_is_not_taught() -> None:
    asked = config(topology={"objective": "distillation", "teacher": "self"}).build_topology()
    assert [s.objective for s in asked.stages] == ["distillation", "distillation", "cross-entropy"]


def test_a_foreign_model_is_tuned_gently() -> None:
    whole, part = tuning(config()), tuning(config(), small=True)
    assert whole.optimizer.lr_matrix == whole.optimizer.lr_embedding == 5e-5
    assert part.optimizer.lr_matrix == 1e-3
    assert whole.seq_len == min(256, whole.model.context)


def test_settings_come_back() -> None:
    asked = config(lora_rank=4, lora_alpha=8.0)
    table = {k: v for k, v in asked.as_dict().items() if v is not None}
    table["tune"] = {k: v for k, v in table["tune"].items() if v is not None}
    for name in ("topology", "optimizer", "model"):
        table[name] = {k: v for k, v in table[name].items() if v is not None}
    assert TrainConfig.from_dict(table) == asked
