"""What the fitted pools of a run's exits gain on text that they were not fitted to."""

import math
from typing import Any

import numpy as np
import torch

from topograd.decode.calibration.fit_pool import ExitStates, window_nats
from topograd.decode.exit_pool import KINDS, ExitWeights
from topograd.evaluation.intervals import mean_interval
from topograd.runs.session import LoadedTextRun


def measure(session: LoadedTextRun, states: ExitStates, weights: ExitWeights) -> dict[str, Any]:
    """Bits per byte of the model and of each pool, and what each gains with its 95 % interval over windows.

    The interval is of windows that are drawn again (`evaluation/intervals.py`): one model, no other training.
    """
    nats = window_nats(states, weights)
    lengths = torch.as_tensor(session.tokenizer.byte_lengths)
    nbytes = int(sum(lengths[targets.cpu()].sum() for _, targets in states.windows))
    unit = len(states.windows) / (math.log(2) * nbytes)
    columns = np.array([[nats["last"][i] - nats[k][i] for k in KINDS] for i in range(len(states.windows))])
    return {
        "tokens": sum(len(targets) for _, targets in states.windows),
        "bpb": {name: math.fsum(rows) / (math.log(2) * nbytes) for name, rows in nats.items()},
        "gain": dict(zip(KINDS, (unit * columns.mean(0)).tolist(), strict=True)),
        "interval": {k: list(ends) for k, ends in zip(KINDS, mean_interval(unit * columns), strict=True)},
    }
