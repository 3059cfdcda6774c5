"""Whether an engine's gradients are those of backprop: every parameter, the worst of many trials.

Statement. With g the gradients by autograd and ĝ those of the engine, on the same model and batch,

    max_abs = max |ĝ - g|      rel_l2 = ‖ĝ - g‖ / ‖g‖      cosine = ⟨ĝ, g⟩ / (‖ĝ‖ ‖g‖)

over all parameters put end to end, and worst_tensor the largest rel_l2 that one tensor has by itself.
Reported is the worst over `trials` initialisations and `batches` batches of each, in float64, float32 and
bfloat16 (weights and all). Promised: in float64 at most 1e-12 for each tensor; in float32 at most 1e-6 over
all. A single float32 tensor may be worse: a scalar whose gradient is a sum that almost cancels has few digits
left, whoever computes it. In bfloat16 nobody is exact, so each side is also held against float64 gradients of
the same weights, rounded as they are: what the engine adds is small beside what bfloat16 loses.

The model is small (K = 4 regions of 2 layers, width 32, S = 4, r = 6, 32 positions, 2 samples), and every
parameter is random (its usual start plus NOISE), because behind a matrix of zeros most gradients are zero and
agree for nothing. A parameter that has no gradient by either engine is an error; none is skipped.

Limits. A tensor of one number has no bound: its gradient is a sum that may almost cancel, and then every
engine's rounding is large beside what is left. Targets are the inputs, to be copied, so that sums add up
rather than cancel. The float32 promise is one about NOISE: two float32 engines differ by a part of what
float32 itself loses in the model, and a wilder model loses more. docs/results has what `python -m papers
check parity` measured.

Source: "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces", appendix D.2 and Table 5: 20
initialisations × 5 batches, Mamba-2 and transformer in float32 (rel_l2 2.07e-8 and 1.41e-7), Mamba-3 and
hybrid in bfloat16 (1.66e-3 and 1.37e-2), none in float64. Cost: 2 · trials · batches steps of each engine,
about a second for each batch on one core, bfloat16 included.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from topograd.errors import ConfigError, StackError
from topograd.exec.gradient import BACKWARDS
from topograd.exec.train_step import train_step
from topograd.nn.config import Architecture, GPTConfig, SegmentInterface
from topograd.nn.gpt import GPT
from topograd.nn.interface import add_interfaces
from topograd.nn.stack import Stack
from topograd.runs.topology_config import Backward, Jacobian
from topograd.topology.dag import Topology

REGIONS = Topology.regions("2,2,2,2")
CONTEXT, WIDTH, VOCAB, BATCH = 32, 32, 29, 2
INTERFACE = SegmentInterface(segments=4, rank=6)
NOISE = 0.1
PRECISIONS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """How far one set of gradients is from another; `cosine` is of the two put end to end."""

    max_abs: float
    rel_l2: float
    cosine: float
    worst: tuple[float, str]
    """The largest rel_l2 of one tensor, and its name."""

    def or_worse(self, other: Difference) -> Difference:
        """The worse of two trials, number by number."""
        return Difference(
            max(self.max_abs, other.max_abs),
            max(self.rel_l2, other.rel_l2),
            min(self.cosine, other.cosine),
            max(self.worst, other.worst),
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "max_abs": self.max_abs,
            "rel_l2": self.rel_l2,
            "cosine": self.cosine,
            "worst_tensor": self.worst[0],
            "worst_tensor_name": self.worst[1],
        }


def parity(
    architecture: Architecture = "transformer",
    trials: int = 20,
    batches: int = 5,
    engine: Backward = "scan",
    jacobian: Jacobian = "loop",
    seed: int = 0,
) -> dict[str, Any]:
    """The worst difference between an engine's gradients and autograd's, in three precisions."""
    for name, count in (("trials", trials), ("batches", batches)):
        if count < 1:
            raise ConfigError(setting=name, given=count, remedy="parity needs at least 1")
    result: dict[str, Any] = {"architecture": architecture, "trials": trials, "batches": batches}
    for name, dtype in PRECISIONS.items():
        worst: dict[str, Difference] = {}
        for trial in range(trials):
            stack = random_model(architecture, INTERFACE, seed + trial, dtype)
            result["parameters"] = len(list(stack.parameters()))
            for batch in range(batches):
                given = random_batch(((seed + trial) * batches + batch) % 2**63)
                for what, here in _compared(stack, given, engine, jacobian).items():
                    worst[what] = here.or_worse(worst.get(what, here))
        result[name] = worst.pop("autograd").as_json() | {what: off.rel_l2 for what, off in worst.items()}
    return result


def _compared(
    stack: GPT, given: tuple[Tensor, Tensor], engine: Backward, jacobian: Jacobian
) -> dict[str, Difference]:
    """The engine's gradients against autograd's; where weights are coarse, both against float64's too."""
    expected = gradients(stack, *given, "autograd", jacobian)
    actual = gradients(stack, *given, engine, jacobian)
    result = {"autograd": difference(actual, expected)}
    if next(stack.parameters()).dtype == torch.bfloat16:
        exact = gradients(copy.deepcopy(stack).double(), *given, "autograd", jacobian)
        result["from_float64"] = difference(actual, exact)
        result["autograd_from_float64"] = difference(expected, exact)
    return result


def random_model(
    architecture: Architecture, settings: SegmentInterface, seed: int, dtype: torch.dtype = torch.float64
) -> GPT:
    """A small model of regions, for `REGIONS`, with noise on every parameter: none is at zero."""
    config = GPTConfig(
        architecture=architecture,
        layers=REGIONS.layers,
        width=WIDTH,
        heads=2,
        vocab=VOCAB,
        context=CONTEXT,
        ssm_state=8,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        stack = GPT(config).to(dtype)
        add_interfaces(stack, settings, len(REGIONS.stages), WIDTH, CONTEXT)
        with torch.no_grad():
            for parameter in stack.parameters():
                parameter.add_(NOISE * torch.randn_like(parameter))
    return stack


def random_batch(seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (2, 32) for `random_model`: random tokens, to be copied."""
    inputs = torch.randint(VOCAB, (BATCH, CONTEXT), generator=torch.Generator().manual_seed(seed))
    return inputs, inputs.clone()


def gradients(
    stack: Stack, inputs: Tensor, targets: Tensor, engine: Backward, jacobian: Jacobian
) -> Gradients:
    """Every parameter's gradient by one engine; the stack has none before and after."""
    stack.zero_grad(set_to_none=True)
    how = {} if engine == "autograd" else {"jacobian": jacobian}
    train_step(stack, REGIONS, inputs, targets, gradient=BACKWARDS[engine](**how))
    taken = taken_gradients(stack, engine)
    stack.zero_grad(set_to_none=True)
    return taken


def taken_gradients(stack: nn.Module, engine: str) -> Gradients:
    """Every `.grad` by name; a parameter without one is an error."""
    taken: Gradients = {}
    for name, parameter in stack.named_parameters():
        if parameter.grad is None:
            raise StackError(
                f"engine {engine!r} gave {name} no gradient, so it cannot be compared",
                setting="engine",
                given=engine,
                remedy="every parameter of the model must reach the loss",
            )
        taken[name] = parameter.grad
    return taken


def difference(actual: Gradients, expected: Gradients) -> Difference:
    """Compare two sets of gradients with the same names, in float64."""
    assert actual.keys() == expected.keys()
    worst, max_abs = (0.0, ""), 0.0
    for name, g in expected.items():
        off = actual[name].double() - g.double()
        worst = max(worst, (_relative(off, g.double()), name))
        max_abs = max(max_abs, float(off.abs().nan_to_num(nan=torch.inf).max()))
    ours, theirs = (torch.cat([g.double().flatten() for g in side.values()]) for side in (actual, expected))
    cosine = float(ours @ theirs / (ours.norm() * theirs.norm()))
    return Difference(max_abs, _relative(ours - theirs, theirs), cosine, worst)


def _relative(off: Tensor, value: Tensor) -> float:
    """‖off‖ / ‖value‖; 0 of 0 is 0, and what is not a number is infinite."""
    distance, size = float(off.norm()), float(value.norm())
    if distance == 0:
        return 0.0
    ratio = distance / size if size else float("inf")
    return ratio if ratio == ratio else float("inf")
