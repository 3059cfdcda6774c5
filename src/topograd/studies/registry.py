"""The experiments of "Stage-Partitioned Learning" by name, and one run of one of them.

The paper states Experiments A to E as an agenda (§10.7) and has run none; the depth sweep (§8) it has run,
with one seed. This table needs no torch, so that studies can be listed at once: the module of a study is
imported when it runs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from topograd.errors import ConfigError

if TYPE_CHECKING:
    from topograd.studies.staged_runs import OnMore, Sizes
    from topograd.studies.verdicts import Found

Preset = Literal["tiny", "small"]


@dataclass(frozen=True)
class Study:
    """What a study asks, and where it is."""

    title: str
    prediction: str
    home: str
    """`module:function` in this folder."""

    def run(self, sizes: Sizes, seeds: int, on_more: OnMore) -> Found:
        """Train its arms and judge."""
        module, function = self.home.split(":")
        found: Found = getattr(import_module(f"topograd.studies.{module}"), function)(sizes, seeds, on_more)
        return found


STUDIES: Mapping[str, Study] = {
    "stage0-depth": Study(
        "The depth of the first stage",
        "At a fixed number of stages, BPB falls with the depth of the first one, the tails behind it are "
        "exchangeable, and no partition beats backprop (Lemma 8.1, Obs. 2, Corollary 8.12).",
        "stage0_depth:run",
    ),
    "experiment-a": Study(
        "Residual Log-OP objective",
        "Under the residual Log-OP the fall of BPB with the depth of the first stage weakens, later stages "
        "become more useful, and tails of another order are no longer the same (§10.5.4, §10.7 A).",
        "experiment_a:run",
    ),
    "experiment-b": Study(
        "Detached input bus",
        "A detached input bus improves BPB where the first stage is shallow, flattens the slope by its "
        "depth, and makes later stages more useful (§10.5.1, §10.7 B).",
        "experiment_b:run",
    ),
    "experiment-c": Study(
        "Stage forest against chain",
        "A forest has no single root: its BPB does not hang on the depth of the first branch as a chain's "
        "does, its branches are independent experts, and pooled they compete with the chain (Prop. 10.12, "
        "§10.7 C).",
        "experiment_c:run",
    ),
    "experiment-d": Study(
        "Soft boundaries, two objectives",
        "With the expected number of boundaries fixed at two, learning under the losses alone hardens at a "
        "large first stage, and with U_cap in the objective at an interior partition (Prop. 8.11, Prop. "
        "10.2, §10.7 D).",
        "experiment_d:run",
    ),
    "experiment-e": Study(
        "Bandwidth: rank and gates",
        "The effective rank at the end of the first stage goes with a better BPB, a multiplicative gate "
        "there lowers BPB, and a bounded relay narrows what it passes on and raises it (§8.9, §10.5.5, "
        "§10.7 E).",
        "experiment_e:run",
    ),
}


def study_named(name: str) -> Study:
    """The study called `name`."""
    if name not in STUDIES:
        raise ConfigError(f"study {name!r} is unknown; choose one of {', '.join(STUDIES)}")
    return STUDIES[name]


def run_study(name: str, preset: Preset, seeds: int | None, on_more: OnMore) -> dict[str, Any]:
    """Run a study and give everything that it found as plain numbers and words."""
    from topograd.studies.staged_runs import PRESETS
    from topograd.studies.verdicts import settled, worst

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
