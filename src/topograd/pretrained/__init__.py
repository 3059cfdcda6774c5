"""Models that come with the package.

`reference` is a run like any other: a staged GPT trained by `topograd train` on the embedded corpus, with its
settings, tokenizer, results and calibration. Its weights are in bfloat16 on a coarse grid and are float32
once loaded; log and optimizer are left out, so it cannot be trained further: `reference/README.md`.
"""

from pathlib import Path

REFERENCE = Path(__file__).parent / "reference"
"""The run's folder."""
