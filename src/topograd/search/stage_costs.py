"""Stage costs from probes: what each interval of layers would cost as a stage, by training it briefly.

Statement. Q(a, b) is the held-out loss, in bits per byte, of a stage of layers a+1..b with a head of its own,
after n steps of training on hidden states h_a that do not move. The sum over a partition then estimates its
loss Σ_k CE(z_k, y), and `dynamic.best_partition` finds the least one.

Each probe works on a copy of the stack cut off after layer b, through the executor: layers 1..a are a frozen
stage, layers a+1..b the stage that learns. Every probe sees the same batches. Only its layers and its head
learn, also where a = 0: embedding and shared head stay.

Symbols. n the number of `batches`. Cost: L (L + 1)/2 probes of n steps and one evaluation; nothing is kept.
Source: "Stage-Partitioned Learning: A Configuration Space Between Backpropagation and Local Learning" §10.2.3
("a shallow probe trained for K steps").
Limits. h_a comes from the stack as it is. Under another partition the layers below would have learned
something else. Layers must follow one another: a run with branches, relays or an input bus has no such h_a.
"""

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from topograd.data import Loader
from topograd.data.windows import Text
from topograd.errors import ConfigError
from topograd.nn.preparation import prepare
from topograd.nn.stack import Stack
from topograd.runs.session import LoadedTextRun, heldout_text, load_data
from topograd.topology.dag import EMBEDDING, Edge, Stage, Topology
from topograd.training.evaluation import evaluate
from topograd.training.optimizers import OptimizerSet
from topograd.training.step_runner import StepRunner

Batch = tuple[Tensor, Tensor]
"""Inputs and targets (batch, time)."""
OnProbe = Callable[[int, int], None]
"""Called with the probes that are done, and of how many."""
HELDOUT_BYTES, HELDOUT_WINDOWS = 4000, 32
"""A probe is judged by this much held-out text, and by this many windows of a byte a token at least."""


def costs_of_run(
    session: LoadedTextRun, batches: int, seed: int, min_depth: int = 1, on_probe: OnProbe | None = None
) -> dict[tuple[int, int], float]:
    """Q of a trained run, on its own text: `batches` steps of its batch size in the order of `seed`."""
    table = session.config.topology
    plain = table.graph in ("chain", "soft") and table.interface is None
    if not plain or table.relay != "identity" or table.source is not None:
        raise ConfigError(
            f"{session.run.folder} has branches, relays or an input bus",
            remedy="probe the stages of a plain chain",
        )
    config, data = load_data(session.config, session.tokenizer)
    loader = Loader(data.train, config.model.context, config.batch, seed)
    some = max(HELDOUT_BYTES, HELDOUT_WINDOWS * config.model.context)
    heldout = heldout_text(session, None, min(some, config.eval_bytes))
    stack = copy.deepcopy(session.stack)
    stack.layers = nn.ModuleList(list(stack.layers)[: config.model.layers])  # without private decoders
    text = [next(loader) for _ in range(batches)]
    return probe_costs(stack, text, heldout, min_depth=min_depth, on_probe=on_probe)


def probe_costs(
    stack: Stack,
    batches: Sequence[Batch],
    heldout: Text,
    *,
    rate: float = 0.003,
    min_depth: int = 1,
    on_probe: OnProbe | None = None,
) -> dict[tuple[int, int], float]:
    """Q(a, b) of every interval of at least `min_depth` layers; the stack stays as it is."""
    layers = len(stack.layers)
    if not batches or not 1 <= min_depth <= layers:
        raise ConfigError(
            setting="min_depth", given=min_depth, allowed=f"from 1 to {layers}, with at least one batch"
        )
    intervals = [(a, b) for a in range(layers) for b in range(a + min_depth, layers + 1)]
    costs = {}
    for done, (a, b) in enumerate(intervals, start=1):
        costs[a, b] = probe(stack, a, b, batches, heldout, rate)
        if on_probe:
            on_probe(done, len(intervals))
    return costs


def probe(stack: Stack, a: int, b: int, batches: Iterable[Batch], heldout: Text, rate: float) -> float:
    """Q(a, b): the held-out loss of the stage of layers a+1..b after one AdamW step for each batch."""
    copied = copy.deepcopy(stack).train()
    copied.layers = nn.ModuleList(list(copied.layers)[:b])
    topology = _probe_topology(a, b)
    plan = prepare(copied, topology)
    learning = [p for layer in list(copied.layers)[a:b] for p in layer.parameters()]
    learning += copied.head_parameters(len(topology.stages) - 1)
    copied.requires_grad_(False)
    for parameter in learning:
        parameter.requires_grad_()
    loop = StepRunner(copied, OptimizerSet.of(torch.optim.AdamW(learning, lr=rate, weight_decay=0.0)))
    for number, batch in enumerate(batches, start=1):
        loop.step(plan, [batch], number)
    return evaluate(copied, plan, heldout).bpb.prediction


def _probe_topology(a: int, b: int) -> Topology:
    """Layers 1..a frozen, where there are any, and layers a+1..b learning."""
    root = Edge(EMBEDDING, grad_scale=1.0)
    if a == 0:
        return Topology(b, (Stage(0, b, (root,)),), heads="per-stage", bus="detached")
    frozen = Stage(0, a, (root,), weight=0.0, frozen=True, head=False)
    return Topology(b, (frozen, Stage(a, b, (Edge(0),))), heads="per-stage", bus="detached")
