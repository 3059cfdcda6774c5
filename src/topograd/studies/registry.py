"""The experiments of "Stage-Partitioned Learning" by name, and one run of one of them.

The paper states Experiments A to E as an agenda (§10.7) and has run none; the depth sweep (§8) it has run,
with one seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from topograd.errors import ConfigError
from topograd.studies import (
    experiment_a,
    experiment_b,
    experiment_c,
    experiment_d,
    experiment_e,
    stage0_depth,
)
from topograd.studies.staged_runs import PRESETS, OnMore, Preset, Sizes
from topograd.studies.verdicts import Found, settled, worst


@dataclass(frozen=True)
class Study:
    """What a study asks, and how it is run."""

    title: str
    prediction: str
    run: Callable[[Sizes, int, OnMore], Found]


STUDIES: Mapping[str, Study] = {
    "stage0-depth": Study("The depth of the first stage", stage0_depth.PREDICTION, stage0_depth.run),
    "experiment-a": Study("Residual Log-OP objective", experiment_a.PREDICTION, experiment_a.run),
    "experiment-b": Study("Detached input bus", experiment_b.PREDICTION, experiment_b.run),
    "experiment-c": Study("Stage forest against chain", experiment_c.PREDICTION, experiment_c.run),
    "experiment-d": Study("Soft boundaries, two objectives", experiment_d.PREDICTION, experiment_d.run),
    "experiment-e": Study("Bandwidth: rank and gates", experiment_e.PREDICTION, experiment_e.run),
}


def study_named(name: str) -> Study:
    """The study called `name`."""
    if name not in STUDIES:
        raise ConfigError(f"study {name!r} is unknown; choose one of {', '.join(STUDIES)}")
    return STUDIES[name]


def run_study(name: str, preset: Preset, seeds: int | None, on_more: OnMore) -> dict[str, Any]:
    """Run a study and give everything that it found as plain numbers and words."""
    study, sizes = study_named(name), PRESETS[preset]
    seeds = sizes.seeds if seeds is None else seeds
    began = time.perf_counter()
    found = study.run(sizes, seeds, on_more)
    claims = settled(found.claims, found.rows)
    return {
        "study": name,
        "title": study.title,
        "preset": preset,
        "seeds": seeds,
        "sizes": asdict(sizes),
        "prediction": study.prediction,
        "rows": found.rows,
        "table": {"caption": found.caption, "header": found.header, "rows": found.cells},
        "figure": asdict(found.drawing),
        "claims": [asdict(claim) for claim in claims],
        "verdict": worst([claim.verdict for claim in claims]),
        "seconds": time.perf_counter() - began,
    }
