"""Shapes are read without torch, and refuse what would not fit before anything is built."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from papers.latent_bounded_interfaces.shape import Shape
from raising import refused
from topograd.errors import ConfigError
from topograd.nn.config import SegmentInterface

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("module", ["shape", "timeline", "planner"])
def test_what_needs_no_torch_does_not_import_it(module: str) -> None:
    program = f"import sys, papers.latent_bounded_interfaces.{module}; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 2**20, "context": 1024},
        {"width": 2**20},
        {"vocab": 2**24, "width": 1024},
        {"regions": 10_000, "region_layers": 100, "width": 1024},
    ],
)
def test_a_model_that_would_not_fit_is_refused(sizes: dict[str, int]) -> None:
    with refused(ConfigError, setting="width"):
        Shape(**sizes)


@pytest.mark.parametrize("interface", [{"rank": 2**20}, {"segments": 2048, "rank": 64}])
def test_an_interface_that_would_not_fit_is_refused(interface: dict[str, Any]) -> None:
    with refused(ConfigError, setting="width"):
        Shape(context=2048).check_size(SegmentInterface(**interface))


def test_large_models_that_fit_are_allowed() -> None:
    Shape(width=4096, heads=32, vocab=32_000, context=2048, batch=2)
