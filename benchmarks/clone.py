"""Imported for its effect: `papers` and `tests.oracles` are found from any folder, though not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
