"""Comparison of a staged run with backprop: quality gap, step time, step memory.

    gap = 100 (BPB_staged / BPB_backprop - 1) %, last stage against last layer

Time and memory are of forward and backward on one batch of the run's own text, measured here and now, with
the weights of the staged run. Time is a ratio of steps that take turns (`timing.py`); memory is counted
exactly (`memory.py`).
"""

from typing import Any

from torch import Tensor

from topograd.data import Loader
from topograd.errors import ConfigError
from topograd.exec.train_step import train_step
from topograd.memory import peak_step_bytes
from topograd.runs.session import LoadedTextRun, load_data
from topograd.timing import ratio, take_turns
from topograd.topology.dag import Topology

ROUNDS = 9


def gap_percent(bpb: float, backprop: float) -> float:
    """How much worse a prediction is than backprop's, in % of backprop's BPB."""
    return 100 * (bpb / backprop - 1)


def measure_step(session: LoadedTextRun) -> dict[str, Any]:
    """Step time and peak memory of the session's topology over backprop's, and memory by number of stages."""
    if session.plan.topology.heads != "shared":
        raise ConfigError(
            setting="heads",
            given=session.plan.topology.heads,
            allowed="shared: the step is compared with backprop on the same weights",
        )
    config = session.config
    _, data = load_data(config, session.tokenizer)
    inputs, targets = next(Loader(data.train, config.model.context, config.batch, config.seed))
    layers = config.model.layers
    staged, backprop = session.plan.topology, Topology.chain(str(layers))
    even = {
        k: Topology.chain(",".join([str(layers // k)] * k)) for k in range(1, layers + 1) if layers % k == 0
    }
    memory = {k: _peak(session, topology, inputs, targets) for k, topology in even.items()}
    peak = _peak(session, staged, inputs, targets)

    def step(topology: Topology) -> Tensor:
        return train_step(session.stack, topology, inputs, targets)

    seconds = take_turns({"staged": lambda: step(staged), "backprop": lambda: step(backprop)}, ROUNDS)
    session.stack.zero_grad(set_to_none=True)
    return {
        "step_time_ratio": ratio(seconds, "staged", "backprop").as_dict(),
        "memory": {
            "staged": peak,
            "backprop": memory[1],
            "ratio": peak / memory[1],
            "by_stages": {str(k): bytes_ for k, bytes_ in memory.items()},
        },
    }


def _peak(session: LoadedTextRun, topology: Topology, inputs: Tensor, targets: Tensor) -> int:
    parameters = list(session.stack.parameters())
    return peak_step_bytes(lambda: train_step(session.stack, topology, inputs, targets), parameters)
