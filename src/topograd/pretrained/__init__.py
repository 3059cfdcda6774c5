"""Models that come with the package.

`reference` is a run like any other: a staged GPT trained by `topograd train` on the embedded corpus, with its
settings, log, tokenizer, results and calibration. Its weights are kept in bfloat16, and are float32 once
loaded; its optimizer is left out, so it cannot be trained further. How it was made: `reference/README.md`.
"""

from pathlib import Path

REFERENCE = Path(__file__).parent / "reference"
"""The run's folder."""
