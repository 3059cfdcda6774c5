"""How large the presets of every study are, and how long they take. Needs no torch.

A study has the sizes that mean something for it: the steps of a training, the width of its models, the seeds
of its arms. Those that it lacks raise ConfigError. Minutes are of one core of the machine of docs/results,
about, and go roughly with steps, with seeds and, where models are wide, with the square of the width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from topograd.errors import ConfigError

Preset = Literal["tiny", "small", "long", "demo"]
Numbers = int | tuple[int, ...] | None


@dataclass(frozen=True)
class Size:
    """One preset of a study. Several numbers are those of its parts, in order; None is no choice."""

    minutes: float
    steps: Numbers = None
    width: Numbers = None
    seeds: int | None = None

    def changed(self, study: str, **args: int | None) -> Size:
        """With what was asked for instead; one number for all parts. What the study lacks is refused."""
        given = {name: number for name, number in args.items() if number is not None}
        for name, number in given.items():
            if getattr(self, name) is None:
                has = [f"--{other}" for other in args if getattr(self, other) is not None]
                can = f"it takes {' and '.join(has)}" if has else f"leave --{name} out"
                raise ConfigError(
                    f"--{name} is {number}",
                    setting=name,
                    given=number,
                    remedy=f"study {study} has no choice of {name}, {can}",
                )
        steps, width, seeds = (given.get(name) for name in ("steps", "width", "seeds"))
        return Size(
            self.minutes,
            _like(self.steps, steps),
            _like(self.width, width),
            self.seeds if seeds is None else seeds,
        )

    def as_dict(self) -> dict[str, Any]:
        """Without what it has no choice of."""
        numbers = {"steps": self.steps, "width": self.width, "seeds": self.seeds, "minutes": self.minutes}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in numbers.items()
            if value is not None
        }


def _like(numbers: Numbers, number: int | None) -> Numbers:
    """The number that was asked for, once for each part; without one, those of the preset."""
    if number is None:
        return numbers
    return (number,) * len(numbers) if isinstance(numbers, tuple) else number


def _staged(minutes: float) -> Mapping[Preset, Size]:
    """Experiments in staged learning, which differ in how many trainings they need."""
    return {
        "tiny": Size(0.2, 4, 8, 2),
        "small": Size(minutes, 300, 48, 3),
        "long": Size(4 * minutes, 1200, 48, 3),
    }


def _edges(minutes: float, length: int = 1, width: int = 48, seeds: int = 3) -> Mapping[Preset, Size]:
    """Further questions about edges, over as many steps as their first or so many times as many."""
    return {
        "tiny": Size(0.1, 2 * length, 8, 1),
        "small": Size(minutes / 4, 400 * length, width, seeds),
        "long": Size(minutes, 1600 * length, width, seeds),
    }


SIZES: Mapping[str, Mapping[Preset, Size]] = {
    "stage0-depth": _staged(3),
    "experiment-a": _staged(6),
    "experiment-b": _staged(6),
    "experiment-c": _staged(5),
    "experiment-d": _staged(3),
    "experiment-e": _staged(4),
    "partition-search": _staged(8),
    "property-profile": {"tiny": Size(0.5, 4, 8, 2), "small": Size(13, 300, 48, 3)},
    "front-scale": {"tiny": Size(0.2, seeds=2), "small": Size(20, seeds=3)},
    "gap": {
        "tiny": Size(0.2, 4, 8, 2),
        "small": Size(40, 400, 48, 3),
        "long": Size(30, 1600, 48, 3),
        "demo": Size(95, 1200, 96, 3),
    },
    "token-ratio": {"tiny": Size(0.2, width=8, seeds=2), "small": Size(55, width=24, seeds=3)},
    "distillation": {"tiny": Size(0.2, 4, 8, 1), "small": Size(7, 300, 48, 3), "long": Size(12, 300, 48, 3)},
    "specialists": {"tiny": Size(0.5, 4), "small": Size(35, (160, 80))},
    "specialist-surface": {
        "tiny": Size(0.1, seeds=1),
        "small": Size(20, seeds=3),
        "long": Size(20, seeds=1),
    },
    "specialist-widths": {"tiny": Size(0.1, 2, seeds=1), "small": Size(4, 80, seeds=3)},
    "image-topologies": {
        "tiny": Size(0.2, (8, 3, 3), seeds=2),
        "small": Size(30, (200, 400, 400), seeds=3),
    },
    "elastic": {"tiny": Size(0.1, 4, 8, 2), "small": Size(2, 150, 32, 3)},
    "continual": {"tiny": Size(0.1, 12, (32, 16), 2), "small": Size(5, 60, (256, 128), 3)},
    "composition": _staged(2),
    "head-perturbation": _staged(1.5),
    "interfaces": {"tiny": Size(0.1, 2, 64, 1), "small": Size(75, 300, 64, 3)},
    "interface-hypotheses": {
        "tiny": Size(0.2, 2, 8, 1),
        "small": Size(16, 400, 48, 3),
        "long": Size(40, 1600, 48, 3),
    },
    "interface-verdict": {
        "tiny": Size(0.1, 2, 8, 1),
        "small": Size(42, 1600, 48, 3),
        "long": Size(95, 1600, 48, 5),
    },
    "interface-rank": {"tiny": Size(0.1, 4, 8, 1), "small": Size(12, 1600, 48, 3)},
    "forward-sweeps": {"tiny": Size(0.1, 2, 8, 1), "small": Size(8, 400, 48, 3)},
    "masked-encoder": {"tiny": Size(0.1, 2, 8, 1), "small": Size(7, 400, 48, 3)},
    "planted-message": {
        "tiny": Size(0.1, (2, 2), 8, 1),
        "small": Size(12, (400, 1600), 48, 3),
    },
    "leak": {"tiny": Size(0.1, (5,)), "small": Size(3, (500, 400))},
    "jacobians": {"tiny": Size(0.1, 2), "small": Size(5, 300)},
    "learning-coefficient": {"tiny": Size(0.1), "small": Size(2)},
    "minilm": {"tiny": Size(0.5), "small": Size(1)},
    "pruning": {"tiny": Size(0.3, 1), "small": Size(8, 30)},
    "adapter-placement": {"tiny": Size(0.2, (2, 2), seeds=1), "small": Size(10, (24, 16), seeds=3)},
    "edges": {
        "tiny": Size(0.1, 2, 8, 1),
        "small": Size(11, 400, 48, 3),
        "long": Size(40, 1600, 48, 5),
    },
    "edges-stages": _edges(10),
    "edges-uniform": _edges(12),
    "edges-alone": _edges(10),
    "edges-adamw": _edges(20),
    "edges-length": _edges(27, length=3, seeds=2),
    "edges-rates": _edges(20),
    "edges-size": _edges(30, width=96, seeds=2),
    "edges-early": _edges(10),
    "safe-adapters": {
        "tiny": Size(0.3, 3, seeds=1),
        "small": Size(60, 16, seeds=3),
        "long": Size(180, 32, seeds=3),
    },
    "adapter-peers": {
        "tiny": Size(0.3, 3, seeds=1),
        "small": Size(5, 16, seeds=3),
        "long": Size(35, 16, seeds=3),
    },
    "adapter-reach": {
        "tiny": Size(0.3, 3, seeds=1),
        "small": Size(3, 16, seeds=3),
        "long": Size(5, 16, seeds=1),
    },
    "chain-rates": {"tiny": Size(0.1, 10, 8, 1), "small": Size(5, 3000, 8, 3)},
    "optimizers": {
        "tiny": Size(0.1, (10,), seeds=1),
        "small": Size(25, (300, 600, 1500, 1500, 1000), seeds=3),
    },
    "optimizer-parts": {
        "tiny": Size(0.1, (4, 4), seeds=1),
        "small": Size(18, (1500, 600), seeds=10),
    },
    "rate-recovery": {"tiny": Size(0.1, seeds=1), "small": Size(0.5, seeds=3)},
    "grokking": {"tiny": Size(0.1, 2, 8, 2), "small": Size(18, 4000, 32, 3)},
    "fields": {"tiny": Size(0.1, 30, 24, 3), "small": Size(1.5, 500, 128, 5)},
    "fields-digits": {"tiny": Size(0.1, 30, 24, 3), "small": Size(1.5, 500, 128, 5)},
    "tail-fits": {"tiny": Size(0.1, 30, 24, 2), "small": Size(1, 500, 128, 10)},
}
"""By study and preset."""


def size_of(study: str, preset: Preset) -> Size:
    """The size of a preset that the study has."""
    presets = SIZES[study]
    if preset not in presets:
        raise ConfigError(
            f"--preset is {preset}",
            setting="preset",
            given=preset,
            remedy=f"study {study} has the presets {', '.join(presets)}",
        )
    return presets[preset]
