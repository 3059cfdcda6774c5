import dataclasses
from pathlib import Path
from typing import Any

import pytest

from topograd.errors import ConfigError, StackError, TopogradError
from topograd.nn.config import GPTConfig
from topograd.runs.config import PRESETS, OptimizerConfig, TrainConfig, preset
from topograd.runs.folder import Run
from topograd.runs.topology_config import TopologyConfig

ODD = TrainConfig(
    topology=TopologyConfig(
        partition="1,2",
        heads="per-stage",
        objective="residual",
        transmissivity=0.25,
        bus="detached",
        reduction="sum",
    ),
    data='a "quoted" näme.txt',
    bf16=True,
    model=GPTConfig(layers=3, width=8, heads=2, windows=(4, 0), softcap=15.0, kv_heads=1, head_rank=2),
    optimizer=OptimizerConfig(betas=(0.7, 0.9), clip=1.0, matrices=1e-5),
)


def test_presets() -> None:
    assert list(PRESETS) == ["tiny", "small", "base"]
    assert preset("tiny").model.layers == 4
    for name in PRESETS:
        assert len(preset(name).build_topology().stages) == 1, "without a partition it is backprop"
    assert preset("tiny", partition="2,2", seed=3).seed == 3
    with pytest.raises(ConfigError, match="preset 'huge' is unknown; choose one of tiny, small, base"):
        preset("huge")


@pytest.mark.parametrize("config", [*(make() for make in PRESETS.values()), ODD])
def test_settings_survive_a_run_folder(config: TrainConfig, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run")
    run.write_config(config.as_dict())
    assert TrainConfig.from_dict(run.read_config()) == config


def test_a_setting_that_is_absent_takes_its_default() -> None:
    assert TrainConfig.from_dict({"version": 2, "steps": 7}) == TrainConfig(steps=7)
    assert TrainConfig.from_dict({"version": 2, "optimizer": {"clip": 2}}).optimizer.clip == 2.0


@pytest.mark.parametrize("backprop", ["L", "l", " L ", "4"])
def test_one_part_or_l_is_backprop(backprop: str) -> None:
    stages = preset("tiny", partition=backprop).build_topology().stages
    assert [(stage.start, stage.stop) for stage in stages] == [(0, 4)]


def test_the_topology_has_everything_that_was_asked() -> None:
    topology = ODD.build_topology()
    assert [(s.start, s.stop, s.objective) for s in topology.stages] == [
        (0, 1, "residual"),
        (1, 3, "residual"),
    ]
    assert topology.stages[1].sources[0].transmissivity == 0.25
    assert (topology.heads, topology.bus, topology.reduction) == ("per-stage", "detached", "sum")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stepz": 3}, "unknown setting stepz; known are"),
        ({"model": {"widht": 3}}, "unknown setting model.widht"),
        ({"model": 3}, "setting model is 3; it must be a table"),
        ({"steps": "many"}, "setting steps is 'many'"),
        ({"steps": True}, "setting steps is True"),
        ({"steps": 2.5}, "setting steps is 2.5"),
        ({"bf16": 1}, "setting bf16 is 1"),
        ({"topology": {"bus": "loud"}}, "setting topology.bus is 'loud'"),
        ({"optimizer": {"betas": 0.9}}, "setting optimizer.betas is 0.9"),
        ({"optimizer": {"clip": "hard"}}, "setting optimizer.clip is 'hard'"),
    ],
)
def test_a_foreign_file_is_refused_by_the_name_of_the_setting(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainConfig.from_dict({"version": 2, **values})


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"steps": 0}, ConfigError, "steps is 0; it must be at least 1"),
        ({"batch": -1}, ConfigError, "batch is -1"),
        ({"accumulate": 0}, ConfigError, "accumulate is 0"),
        ({"keep": 0}, ConfigError, "keep is 0"),
        ({"eval_bytes": 0}, ConfigError, "eval_bytes is 0"),
        ({"eval_every": -1}, ConfigError, "eval_every is -1; it must be at least 0"),
        ({"save_every": -5}, ConfigError, "save_every is -5"),
        ({"seed": -1}, ConfigError, "seed is -1"),
        ({"seed": 2**63}, ConfigError, "below 2"),
        ({"partition": "3,3"}, ConfigError, "partition 3,3 has 6 layers and the model has 4"),
        ({"partition": "2,x"}, ConfigError, "part 2 is 'x'"),
        ({"partition": "2,2", "transmissivity": 1.5}, ConfigError, "transmissivity is 1.5"),
    ],
)
def test_settings_outside_their_range(change: dict[str, Any], error: type[TopogradError], words: str) -> None:
    with pytest.raises(error, match=words):
        preset("tiny", **change)


def test_a_model_that_cannot_be_built() -> None:
    with pytest.raises(StackError, match="width is 0"):
        preset("tiny", model=dataclasses.replace(preset("tiny").model, width=0))
