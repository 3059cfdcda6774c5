"""What torchrun tells a process about itself. Nothing here needs torch, so that flags are refused at once.

torchrun starts the same command for every rank of a machine, and as soon as one rank has failed it ends the
others. So of a fault that all of them find, the first rank of a machine speaks, and the others wait a moment:
a rank that ended without a word would have the one that speaks ended before it did.
"""

from __future__ import annotations

import os
import time

LINGER = 10.0
"""Seconds in which the rank that speaks is waited for; torchrun ends the others when it has."""


def speaks_for_machine() -> bool:
    """Whether this process says what is wrong with a command that all ranks of the machine were given."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def let_the_first_speak() -> None:
    """Before a rank ends without a word: under torchrun, wait for the one that has it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(LINGER)
