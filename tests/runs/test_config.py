import math
from pathlib import Path
from typing import Any

import pytest

from raising import refused
from topograd.errors import ConfigError, StackError, TopogradError
from topograd.nn.config import GPTConfig
from topograd.pretrained import REFERENCE
from topograd.runs.config import (
    PRESETS,
    VERSION,
    OptimizerConfig,
    SearchConfig,
    StageOptimizer,
    TrainConfig,
    preset,
)
from topograd.runs.folder import Run
from topograd.runs.search_config import SoftConfig
from topograd.runs.session import build_stack
from topograd.runs.topology_config import TopologyConfig
from topograd.topology.dag import EMBEDDING, Edge, Stage

ODD = TrainConfig(
    topology=TopologyConfig(
        partition="1,2",
        heads="per-stage",
        objective="residual",
        grad_scale=0.25,
        bus="detached",
        reduction="sum",
    ),
    data='a "quoted" näme.txt',
    bf16=True,
    model=GPTConfig(layers=3, width=8, heads=2, windows=(4, 0), softcap=15.0, kv_heads=1, head_rank=2),
    optimizer=OptimizerConfig(betas=(0.7, 0.9), clip=1.0, lr_matrix=1e-5),
)


def test_presets() -> None:
    assert list(PRESETS) == ["tiny", "small", "base"]
    assert preset("tiny").model.layers == 4
    for name in PRESETS:
        assert len(preset(name).build_topology().stages) == 1, "without a partition it is backprop"
    assert preset("tiny", partition="2,2", seed=3).seed == 3
    with refused(ConfigError, setting="preset", given="huge"):
        preset("huge")


@pytest.mark.parametrize("config", [*(make() for make in PRESETS.values()), ODD])
def test_settings_survive_a_run_folder(config: TrainConfig, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run")
    run.write_config(config.as_dict())
    assert TrainConfig.from_dict(run.read_config()) == config


def test_a_setting_that_is_absent_takes_its_default() -> None:
    assert TrainConfig.from_dict({"version": VERSION, "steps": 7}) == TrainConfig(steps=7)
    assert TrainConfig.from_dict({"version": VERSION, "optimizer": {"clip": 2}}).optimizer.clip == 2.0


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
    assert topology.stages[1].sources[0].grad_scale == 0.25
    assert (topology.heads, topology.bus, topology.reduction) == ("per-stage", "detached", "sum")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stepz": 3}, "unknown setting stepz; known are"),
        ({"model": {"widht": 3}}, "unknown setting model.widht"),
        ({"model": 3}, "model is 3; it must be a table"),
        ({"steps": "many"}, "setting steps is 'many'"),
        ({"steps": True}, "setting steps is True"),
        ({"steps": 2.5}, "setting steps is 2.5"),
        ({"bf16": 1}, "setting bf16 is 1"),
        ({"topology": {"bus": "loud"}}, "setting topology.bus is 'loud'"),
        ({"optimizer": {"betas": 0.9}}, "setting optimizer.betas is 0.9"),
        ({"optimizer": {"clip": "hard"}}, "setting optimizer.clip is 'hard'"),
        ({"model": {"windows": ["a"]}}, r"setting model.windows\[0\] is 'a'; it must be a whole number"),
        ({"model": {"windows": [4, True]}}, r"setting model.windows\[1\] is True"),
        ({"model": {"windows": 4}}, "setting model.windows is 4; it must be a list, each a whole number"),
        ({"optimizer": {"betas": ["x", 0.9]}}, r"setting optimizer.betas\[0\] is 'x'; it must be a number"),
        ({"optimizer": {"betas": [0.8, 0.9, 0.9]}}, "it must have 2 entries"),
        ({"optimizer": {"betas": [[0.8], 0.9]}}, r"setting optimizer.betas\[0\] is \[0.8\]"),
        ({"model": {"width": [16]}}, r"setting model.width is \[16\]; it must be a whole number"),
        ({"model": {"mlp_ratio": [4.0]}}, r"setting model.mlp_ratio is \[4.0\]; it must be a number"),
        ({"model": {"mlp_ratio": True}}, "setting model.mlp_ratio is True"),
        ({"model": {"layers": False}}, "setting model.layers is False"),
        ({"model": {"smear": 0}}, "setting model.smear is 0; it must be true or false"),
        ({"model": {"kv_heads": "two"}}, "is 'two'; it must be a whole number or left out"),
        ({"model": {"mlp_ratio": 10**400}}, "setting model.mlp_ratio has 401 digits"),
        ({"seed": {"value": 1}}, "setting seed is {'value': 1}; it must be a whole number"),
        (
            {"topology": {"branches": "2,2", "graph": "forest"}},
            "topology.branches is '2,2'; it must be a list",
        ),
        (
            {"topology": {"intervals": [[0, 2], [2]], "graph": "cover"}},
            r"intervals\[1\] is \[2\]; .* 2 entries",
        ),
        (
            {"topology": {"stages": [{"start": 0}], "graph": "stages"}},
            "setting topology.stages.*stop is missing",
        ),
        ({"topology": {"stages": [3], "graph": "stages"}}, r"topology.stages\[0\] is 3; it must be a table"),
        ({"optimizer": {"stages": [{"stage": "1"}]}}, r"optimizer.stages\[0\].stage is '1'"),
        ({"search": {"soft": {"hot": "very"}}}, "setting search.soft.hot is 'very'"),
    ],
)
def test_a_foreign_file_is_refused_by_the_name_of_the_setting(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainConfig.from_dict({"version": VERSION, **values})


@pytest.mark.parametrize(
    ("change", "error", "setting"),
    [
        ({"steps": 0}, ConfigError, "steps"),
        ({"batch": -1}, ConfigError, "batch"),
        ({"accumulate": 0}, ConfigError, "accumulate"),
        ({"keep": 0}, ConfigError, "keep"),
        ({"eval_bytes": 0}, ConfigError, "eval_bytes"),
        ({"eval_every": -1}, ConfigError, "eval_every"),
        ({"save_every": -5}, ConfigError, "save_every"),
        ({"seed": -1}, ConfigError, "seed"),
        ({"seed": 2**63}, ConfigError, "seed"),
        ({"partition": "3,3"}, ConfigError, "partition"),
        ({"partition": "2,x"}, ConfigError, "partition"),
        ({"partition": "2,2", "grad_scale": 1.5}, ConfigError, "grad_scale"),
        ({"partition": "2,2", "grad_scale": 1.0, "grad_delay": -1}, ConfigError, "grad_delay"),
        ({"partition": "2,2", "grad_scale": 1.0, "grad_delay": 65}, ConfigError, "grad_delay"),
        ({"partition": "2,2", "grad_scale": 1.0, "grad_bits": 2}, ConfigError, "grad_bits"),
        ({"partition": "2,2", "grad_scale": 1.0, "grad_bits": 5}, ConfigError, "grad_bits"),
        ({"partition": "2,2", "grad_delay": 1}, ConfigError, "grad_delay"),
        ({"partition": "2,2", "grad_bits": 4}, ConfigError, "grad_bits"),
        ({"partition": "4", "grad_scale": 1.0, "grad_delay": 1}, ConfigError, "grad_delay"),
        ({"partition": "L", "grad_scale": 1.0, "grad_bits": 4}, ConfigError, "grad_bits"),
        (
            {"partition": "2,2", "grad_scale_schedule": "0:1,0.5:0", "grad_delay": 1},
            ConfigError,
            "grad_delay",
        ),
    ],
)
def test_settings_outside_their_range(
    change: dict[str, Any], error: type[TopogradError], setting: str
) -> None:
    with refused(error, setting=setting):
        preset("tiny", **change)


def test_surgery_may_merge_thin_stages_into_one() -> None:
    thin = preset("tiny", partition="4", grad_scale=1.0, grad_bits=4, search=SearchConfig(kind="surgery"))
    assert len(thin.build_topology().stages) == 1


@pytest.mark.parametrize(("name", "given"), [("delay", 2), ("grad_bits", 4)])
def test_an_edge_without_gradient_is_neither_late_nor_thin(name: str, given: int) -> None:
    def table(grad_scale: float, schedule: str | None = None) -> TopologyConfig:
        change: dict[str, Any] = {name: given}
        edge = Edge(0, grad_scale=grad_scale, **change)
        stages = Stage(0, 2, (Edge(EMBEDDING, grad_scale=1.0),)), Stage(2, 4, (edge,))
        return TopologyConfig(graph="stages", stages=stages, grad_scale_schedule=schedule)

    with refused(ConfigError, setting=name, given=given):
        table(0.0)
    assert table(0.5).stages[1].sources[0].grad_scale == 0.5
    assert table(0.0, "0:0,0.5:1").grad_scale_schedule is not None, "gradient crosses it later"


def test_every_stage_learns_before_the_run_ends() -> None:
    late = {"partition": "1,1,2", "grad_scale": 1.0, "grad_delay": 4}
    with refused(ConfigError, setting="steps", given=8) as error:
        preset("tiny", steps=8, **late)
    assert error.value.allowed.startswith("above 8, since stage 1 ")
    assert preset("tiny", steps=9, **late).steps == 9, "the first stage learns in the last step"
    assert preset("tiny", steps=1, partition="1,1,2").steps == 1


HUGE = 99999999999999999999


@pytest.mark.parametrize("name", ["steps", "batch", "accumulate", "keep", "eval_bytes", "save_every", "seed"])
def test_huge_numbers_are_slips_of_the_keyboard(name: str) -> None:
    with refused(ConfigError, setting=name, given=HUGE):
        preset("tiny", **{name: HUGE})


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"width": 0}, "width"),
        ({"width": HUGE}, "width"),
        ({"context": HUGE}, "context"),
        ({"vocab": HUGE}, "vocab"),
        ({"ssm_state": HUGE}, "ssm_state"),
        ({"mlp_ratio": math.inf}, "mlp_ratio"),
        ({"mlp_ratio": math.nan}, "mlp_ratio"),
        ({"mlp_ratio": -1.0}, "mlp_ratio"),
        ({"mlp_ratio": 1e300}, "mlp_ratio"),
        ({"rope_base": 0.0}, "rope_base"),
        ({"rope_base": math.inf}, "rope_base"),
        ({"rope_base": math.nan}, "rope_base"),
        ({"head_std": math.nan}, "head_std"),
        ({"softcap": math.inf}, "softcap"),
        ({"architecture": "perceptron"}, "architecture"),
        ({"architecture": "my package:make"}, "architecture"),
    ],
)
def test_a_model_that_cannot_be_built(change: dict[str, Any], setting: str) -> None:
    with refused(StackError, setting=setting):
        preset("tiny").model.changed(**change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"windows": (HUGE,)}, "windows is .*; it must be spans of at least 0"),
        ({"count_from": "middle"}, "count_from is 'middle'; it must be one of first, last"),
    ],
)
def test_a_model_that_cannot_be_built_in_words(change: dict[str, Any], words: str) -> None:
    with pytest.raises(StackError, match=words) as caught:
        preset("tiny").model.changed(**change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, 1.5])
@pytest.mark.parametrize("name", ["grad_scale", "source_grad_scale"])
def test_a_grad_scale_is_checked_where_there_is_one_stage_too(name: str, value: float) -> None:
    with refused(ConfigError, setting=name, allowed="in [0, 1]"):
        preset("tiny", **{name: value})


@pytest.mark.parametrize(
    ("table", "setting"),
    [
        ({"graph": "tree"}, "graph"),
        ({"graph": "forest"}, "branches"),
        ({"graph": "cover"}, "intervals"),
        ({"graph": "soft"}, "grad_scales"),
        ({"graph": "stages"}, "stages"),
        ({"branches": ("2", "2")}, "branches"),
        ({"graph": "forest", "branches": ("2", "2"), "partition": "2,2"}, "partition"),
        ({"graph": "forest", "branches": ("2", "3")}, "branches"),
        ({"graph": "soft", "grad_scales": (0.5,)}, "grad_scales"),
        ({"partition": "2,2", "grad_scales": (0.1, 0.2)}, "grad_scales"),
        ({"partition": "2,2", "grad_scale": 0.1, "grad_scales": (0.1,)}, "grad_scale"),
        ({"partition": "2,2", "weights": (1.0,)}, "weights"),
        ({"partition": "2,2", "loss_every": (2,)}, "loss_every"),
        ({"partition": "2,2", "objectives": ("residual",)}, "objectives"),
        ({"relay": "pigeon"}, "relay"),
        ({"source": "embedding", "join": "pigeon"}, "join"),
        ({"source": "layer"}, "source"),
        ({"source": "layer:9"}, "source"),
        ({"decoder": -1}, "decoder"),
        ({"relay": "gate", "relay_rank": 0}, "relay_rank"),
        ({"relay_rank": 4}, "relay_rank"),
        ({"head_rank": 4}, "head_rank"),
        ({"join": "gate"}, "join"),
        ({"source_grad_scale": 0.5}, "source_grad_scale"),
        ({"partition": "2,2", "objective": "residual", "objectives": ("residual", "residual")}, "objective"),
        ({"prediction": "best"}, "prediction"),
        ({"objective": "distillation"}, "teacher"),
        ({"teacher": " "}, "teacher"),
        ({"teacher_mix": 1.5}, "teacher_mix"),
        ({"teacher_temperature": 0.0}, "teacher_temperature"),
        ({"backward": "scan"}, "backward"),
        ({"jacobian": "pullback"}, "jacobian"),
        ({"jacobian_chunk": 2}, "jacobian_chunk"),
        ({"jacobian_chunk": 0}, "jacobian_chunk"),
        (
            {
                "interface": "S=4,r=4",
                "partition": "2,2",
                "backward": "scan",
                "jacobian": "pullback",
                "bf16": True,
            },
            "jacobian",
        ),
        ({"interface": "S=4,r=4"}, "partition"),
        ({"interface": "S=4,r=4", "partition": "2,2", "heads": "per-stage"}, "heads"),
    ],
)
def test_topologies_that_do_not_exist_are_one_line(table: dict[str, Any], setting: str) -> None:
    with refused(ConfigError, setting=setting):
        preset("tiny", **table)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"graph": "cover", "intervals": ((0, 2), (3, 4))}, "interval 3..4 starts after layer 3"),
        ({"partition": "2,2", "grad_scales": (math.nan,)}, "grad_scale nan"),
        ({"partition": "2,2", "loss_every": (0, 1)}, "stage 0 has every 0; it must be at least 1"),
        ({"partition": "2,2", "weights": (1.0, math.nan)}, "weight nan"),
        ({"partition": "2,2", "weights": (0.0, 0.0)}, "every stage has weight 0"),
        ({"partition": "2,2", "source": "layer:4"}, "behind which no stage lies"),
        ({"decoder": 10**9}, "there may be at most 10000"),
        ({"partition": "2,2", "prediction": "1,2,3"}, "3 weights for 2 stages"),
        ({"partition": "2,2", "prediction": "nan,1"}, "it must be finite weights"),
        ({"partition": "2,2", "prediction": "path:2"}, "begins with stage 2"),
        ({"interface": "S=3,r=4", "partition": "2,2"}, "S must divide the context"),
    ],
)
def test_topologies_that_do_not_exist_are_one_line_in_words(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        preset("tiny", **table)
    assert "\n" not in str(caught.value)


def test_stages_with_their_own_optimizers_must_exist() -> None:
    own = OptimizerConfig(stages=(StageOptimizer(stage=3),))
    with refused(ConfigError, setting="optimizer.stages.stage", given=3):
        preset("tiny", partition="2,2", optimizer=own)
    with refused(ConfigError, setting="optimizer.stages"):
        OptimizerConfig(stages=(StageOptimizer(stage=1), StageOptimizer(stage=1)))
    with refused(ConfigError, setting="stage", given=0):
        StageOptimizer(stage=0)
    with refused(ConfigError, setting="rate"):
        StageOptimizer(stage=1, rate=math.nan)
    with pytest.raises(ConfigError, match="adam"):
        StageOptimizer(stage=1, name="adam")
    with refused(ConfigError, setting="warmup", given=0.9):
        OptimizerConfig(warmdown=0.5, stages=(StageOptimizer(stage=1, warmup=0.9),))


def test_an_empty_data_path_is_not_the_current_folder() -> None:
    for empty in ("", "  "):
        with refused(ConfigError, setting="data"):
            preset("tiny", data=empty)


def test_changed_settings_find_their_table() -> None:
    config = preset("tiny").changed(partition="2,2", heads="per-stage", steps=3)
    assert (config.steps, config.topology.partition, config.topology.heads) == (3, "2,2", "per-stage")
    again = config.changed(topology=TopologyConfig(partition="1,3"), bus="detached")
    assert again.topology == TopologyConfig(partition="1,3", bus="detached")
    with pytest.raises(TypeError, match="partitoin"):
        config.changed(partitoin="2,2")


def test_private_decoders_make_the_stack_deeper() -> None:
    config = preset("tiny", partition="2,2", decoder=2)
    assert config.model.layers == 4
    assert build_stack(config)[0].config == config.model.changed(layers=8)


def test_a_part_of_a_file_is_laid_over_settings_table_by_table() -> None:
    base = preset(
        "tiny", heads="per-stage", search=SearchConfig(kind="soft", soft=SoftConfig(stages=3, hot=4.0))
    )
    found = base.overlaid(
        {
            "steps": 7,
            "topology": {"graph": "forest", "branches": ["2", "2"]},
            "model": {"width": 32},
            "search": {"soft": {"stages": 2}},
        }
    )
    expected = base.changed(steps=7, graph="forest", branches=("2", "2"))
    expected = expected.changed(
        model=base.model.changed(width=32),
        search=SearchConfig(kind="soft", soft=SoftConfig(stages=2, hot=4.0)),
    )
    assert found == expected
    assert found.topology.heads == "per-stage", "what the part does not name stays"
    assert base.overlaid({}) == base
    for bad, words in (
        ({"topology": {"grph": "forest"}}, "unknown setting topology.grph"),
        ({"topology": "forest"}, "setting topology is 'forest'; it must be a table"),
        ({"version": 1}, "version is 1; it must be 3"),
        ({"version": "new"}, "version is 'new'"),
    ):
        with pytest.raises(ConfigError, match=words):
            base.overlaid(bad)


def test_an_unknown_version_is_refused() -> None:
    with refused(ConfigError, setting="version", given=4):
        TrainConfig.from_dict({"version": 4})


OLD = {
    "partition": "1,2",
    "stage_heads": "per-stage",
    "objective": "residual",
    "transmissivity": 0.25,
    "bus": "detached",
    "reduction": "sum",
    "steps": 9,
    "model": {"layers": 3, "width": 8, "heads": 2},
    "optimizer": {"matrices": 0.01},
}
"""As version 0.1 wrote them: no version, no [topology] table."""


def test_settings_of_version_1_are_read() -> None:
    found = TrainConfig.from_dict(OLD)
    assert found.topology == ODD.topology
    assert (found.steps, found.optimizer.lr_matrix, found.optimizer.name) == (9, 0.01, "muon+adamw")
    assert found.model == GPTConfig(layers=3, width=8, heads=2, count_from="last")
    assert TrainConfig.from_dict({"version": 1, **OLD}) == found
    assert TrainConfig.from_dict(found.as_dict() | {"data": "x"}).model == found.model
    with pytest.raises(ConfigError, match="unknown setting bus"):
        TrainConfig.from_dict({"version": 2, **OLD})
    with refused(ConfigError, setting="model", given=3):
        TrainConfig.from_dict({"model": 3})


@pytest.mark.parametrize("layers", [2, 3, 4, 5])
def test_version_1_alternates_from_the_last_layer(layers: int) -> None:
    """The last layer had a value embedding, whatever the number of layers; hybrids ended with attention."""
    old = TrainConfig.from_dict({"model": {"layers": layers}}).gpt
    valued = [old.has_value_embedding(i) for i in range(layers)]
    assert valued == [(layers - 1 - i) % 2 == 0 for i in range(layers)]
    new = TrainConfig.from_dict({"version": 2, "model": {"layers": layers}}).gpt
    assert [new.has_value_embedding(i) for i in range(layers)] == [i % 2 == 1 for i in range(layers)]
    hybrid = TrainConfig.from_dict({"model": {"layers": layers, "architecture": "hybrid"}}).gpt
    assert hybrid.mixer(layers - 1) == "attention"


def test_the_reference_runs_settings_are_read() -> None:
    """Its model has the layers that its weights are of, which alternate counted from the last."""
    found = TrainConfig.from_dict(Run.open(REFERENCE).read_config())
    assert (found.topology.partition, found.topology.heads) == ("2,2,2,2", "shared")
    assert (found.model.layers, found.gpt.count_from) == (8, "last")
