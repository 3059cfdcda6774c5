"""Every study by name, and all of them in miniature through the same door."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import papers
from papers.latent_bounded_interfaces import interfaces
from papers.outcome import asked
from papers.presets import SIZES
from papers.run import asked_for, run_study, setting_of
from papers.staged_runs import PRESETS, Sizes
from papers.studies import STUDIES, study_named
from papers.verdicts import UNDECIDED
from raising import refused
from topograd.errors import ConfigError

STAGED = [name for name in STUDIES if name.startswith(("stage", "experiment"))]
ELSEWHERE = {
    "experiment-c": "its probes take most of a minute; its parts are tested in test_experiments.py",
    "property-profile": "test_property_profile.py runs it on a smaller grid",
    "front-scale": "test_front_scale.py runs it",
    "continual": "test_continual.py runs it",
    "elastic": "test_elastic.py runs it",
    "image-topologies": "test_image_topologies.py runs it",
    "fields": "test_field_training.py runs it",
    "gap": "test_gap.py runs it",
    "interface-hypotheses": "test_interface_hypotheses.py runs it",
    "specialists": "test_specialist_facts.py runs it",
    "specialist-surface": "test_specialist_surface.py runs it on a smaller model",
    "optimizers": "test_optimizer_comparison.py runs it",
    "optimizer-parts": "test_optimizer_parts.py runs it",
    "pruning": "test_pruning.py runs it on a smaller model",
    "adapter-placement": "test_adapter_placement.py runs it on a smaller model",
    "adapter-peers": "test_adapter_peers.py runs it on a smaller model",
    "adapter-reach": "test_adapter_reach.py runs it on a smaller model",
    "safe-adapters": "test_safe_adapters.py runs it on a smaller model",
    "rate-recovery": "test_rate_recovery.py runs it with fewer networks",
    "minilm": "it needs weights that are not installed here",
    "tail-fits": "it needs a program that is not installed here; test_tail_fits.py has a stand-in",
}
"""Studies that are not run here, and why."""


@pytest.fixture
def record(name: str, sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The study in miniature, with how far it said that it was."""
    monkeypatch.setitem(PRESETS, "tiny", replace(sizes, steps=2, soft_steps=4))
    monkeypatch.setattr(interfaces, "HELDOUT_BYTES", 2000)
    told: list[tuple[int, int]] = []
    seeds = 1 if name in STAGED else None
    found = run_study(asked(name, "tiny", seeds=seeds, on_more=lambda *done: told.append(done)))
    assert told, "it says how far it is"
    assert told[-1][0] == told[-1][1]
    return found


@pytest.mark.parametrize("name", [name for name in STUDIES if name not in ELSEWHERE])
def test_every_study_has_one_shape(name: str, record: dict[str, Any]) -> None:
    assert record.keys() >= {
        "study",
        "title",
        "prediction",
        "setting",
        "rows",
        "tables",
        "verdict",
        "seconds",
    }
    assert record["tables"]
    for table in record["tables"]:
        assert table["caption"]
        assert table["rows"]
        assert all(len(row) == len(table["header"]) for row in table["rows"]), table["caption"]
        assert all(isinstance(cell, str) for row in table["rows"] for cell in row)
    assert record["setting"].endswith(".")
    if name in STAGED:
        assert record["verdict"] == UNDECIDED, "one seed"
        assert {"partition", "bpb", "seed"} <= record["rows"][-1].keys()
        assert record["seeds"] == 1
        assert record["sizes"]["width"] == 8


def test_an_unknown_study() -> None:
    with refused(ConfigError, setting="study", given="f"):
        study_named("f")


def test_studies_are_listed_without_torch() -> None:
    said = (
        "import sys, papers.studies as studies;"
        "print(len(studies.STUDIES), 'torch' in sys.modules, 'scipy' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert told.stdout.split() == [str(len(STUDIES)), "False", "False"]


def test_every_study_has_sizes_and_a_time() -> None:
    assert SIZES.keys() == STUDIES.keys()
    for name, presets in SIZES.items():
        assert {"tiny", "small"} <= presets.keys(), name
        assert presets["tiny"].minutes <= presets["small"].minutes, name
        assert all(size.minutes > 0 for size in presets.values()), name
        takes = [{*size.as_dict()} for size in presets.values()]
        assert all(sizes == takes[0] for sizes in takes), f"{name}: the presets have the same sizes"


def test_what_a_row_depends_on() -> None:
    usual, other = asked("leak", "tiny"), asked("leak", "tiny", steps=7)
    assert setting_of(usual)["steps"] == [5]
    assert setting_of(other)["steps"] == [7]
    assert setting_of(usual) != setting_of(other)
    assert asked_for(asked("elastic", "tiny", seeds=5))["seeds"] == 5


@pytest.mark.parametrize("name", STUDIES)
def test_the_readme_of_its_folder_has_a_study_with_its_minutes(name: str) -> None:
    folder = Path(papers.__file__).parent / STUDIES[name].module.partition(".")[0]
    lines = (folder / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if f"| `{name}` |" in line]
    assert len(rows) == 1
    assert rows[0].endswith(f"| {SIZES[name]['small'].minutes:g} |")
