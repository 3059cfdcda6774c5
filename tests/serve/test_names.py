"""Model ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from topograd.errors import ConfigError
from topograd.serve.texts import ServedModel, known_depths, model_name, split_id

IDS = {
    "m": ("m", None),
    "m:full": ("m", "full"),
    "m:prefix-1": ("m", "prefix:1"),
    "m:prefix:2": ("m", "prefix:2"),
    "m:speculate": ("m", "speculate"),
    "m:speculate-4": ("m", "speculate:4"),
    "m:speculate-4-0.5": ("m", "speculate:4:0.5"),
    "m:speculate-lookup+3": ("m", "speculate:lookup+3"),
    "m:wand": ("m", "wand"),
    "m:wand-0.001": ("m", "wand:flip-rate:0.001"),
    "m:wand-1e-3": ("m", "wand:flip-rate:1e-3"),
    "m:wand-rival-gain": ("m", "wand:rival-gain"),
    "m:wand-rival-gain-1.5": ("m", "wand:rival-gain:1.5"),
    "m:wand:sum-of-bounds:1.1": ("m", "wand:sum-of-bounds:1.1"),
    "m:path-1,3": ("m", "path:1,3"),
    "m:branches-1-4*3+1-2": ("m", "branches:1-4*3+1-2"),
}


@pytest.mark.parametrize("model", IDS)
def test_ids(model: str) -> None:
    assert split_id(model) == IDS[model]


@pytest.mark.parametrize("model", ["m:", "m:deep", "m:Prefix-1", "m:-1", "m" * 400])
def test_ids_that_name_nothing(model: str) -> None:
    with pytest.raises(ConfigError):
        split_id(model)


def test_a_folder_becomes_a_name(tmp_path: Path) -> None:
    assert model_name(tmp_path / "my run: two") == "my-run-two"
    assert model_name(tmp_path / "(!)") == "model"


def test_a_calibrated_model_knows_its_depths(served: ServedModel) -> None:
    found = known_depths(served.model.session, served.model.engine.runtime)
    assert found[:4] == ["full", "prefix-1", "prefix-2", "prefix-3"]
    assert {"speculate", "wand-0.001"} <= set(found)
