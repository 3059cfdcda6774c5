"""The JSON schema of a training's settings takes what the program takes, and refuses what it refuses."""

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from topograd.cli.config import train_schema
from topograd.runs.config import TrainConfig, preset
from topograd.runs.folder import Run

ROOT = Path(__file__).parents[2]
SCHEMA = train_schema()


def problems(values: Any) -> list[str]:
    validator = jsonschema_rs.Draft202012Validator(SCHEMA)
    return [f"{'.'.join(map(str, e.instance_path))}: {e.message}" for e in validator.iter_errors(values)]


def test_the_command_prints_it(call: Any) -> None:
    answer = call("config", "schema")
    assert answer.code == 0
    assert json.loads(answer.out) == json.loads(json.dumps(SCHEMA))
    assert jsonschema_rs.meta.is_valid(SCHEMA)


@pytest.mark.parametrize("file", sorted(ROOT.glob("examples/*.toml")), ids=lambda file: file.name)
def test_it_takes_the_examples(file: Path) -> None:
    assert problems(tomllib.loads(file.read_text())) == []


def test_it_takes_what_runs_write(straight: Run, image_config: TrainConfig, tmp_path: Path) -> None:
    assert problems(tomllib.loads(straight.config_file.read_text())) == []
    from topograd.files import dump_toml

    for config in (preset("base"), image_config):
        assert problems(tomllib.loads(dump_toml(config.as_dict()))) == []


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("stpes = 3", ""),
        ("steps = 'many'", "steps"),
        ("tokenizer = 'words'", "tokenizer"),
        ("[model]\nlayrs = 3", "model"),
        ("[model]\nkind = 'lama'", "model.kind"),
        ("[model]\nkind = 'llama'\nsmear = true", "model"),
        ("[topology]\npartition = 3", "topology.partition"),
        ("[[topology.stages]]\nstart = 0\nstop = 2\nsouces = []", "topology.stages.0"),
        ("[optimizer]\nbetas = [0.9]", "optimizer.betas"),
    ],
)
def test_it_refuses_what_is_wrong(text: str, where: str) -> None:
    assert {problem.partition(":")[0] for problem in problems(tomllib.loads(text))} == {where}


def test_every_setting_is_explained() -> None:
    table = SCHEMA["properties"]
    assert [name for name, schema in table.items() if "description" not in schema] == ["model", "version"]
    assert table["steps"] == {"type": "integer", "description": "Length of the schedule.", "default": 2500}
