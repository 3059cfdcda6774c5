"""The stacks, batches and topologies of `tests/exec`, for the tests of this folder too."""

from tests.exec.conftest import case, logits_watch, tiny

__all__ = ["case", "logits_watch", "tiny"]
