"""The learning coefficient of reduced-rank regression: read from rates, and sampled, at what cost and error.

"Dead Directions: Geometric Singular Learning" (§13.5) holds that a reading of Fisher rates replaces posterior
sampling. Here both start at the same singular parameter of the same two-layer linear module, and the answer
is known (Aoyagi and Watanabe, "Stochastic complexities of reduced rank regression in Bayesian estimation").

The reading, derived here for a hidden width one above the teacher's rank r. Near the singular point

    K ≈ Σ (regular directions)² + |u|²|v|²,    u ∈ R^b the dead unit's outgoing weights, v ∈ R^a its incoming,

a crossing of orders (1, 1); polar coordinates of u and v give the Jacobian |u|^{b-1} |v|^{a-1}. So
λ = (regular directions)/2 + min(a, b)/2. The reading is told that there are two layers, and this rule.
It measures

    the regular directions    nonzero eigenvalues of the Fisher at the point
    the components' normals   bottoms of both factors of the hidden layer, lifted (`_dead_unit`)
    the orders                two anchored lines and a generic one (`recover_crossing`)
    a and b                   how many eigenvalues rise as ε^{2k} when the other component is held at ε

and refuses if these contradict one another. The sampling is that of `geometry/singular/sgld.py` with labels
without noise, which spares it the fluctuation of the data. Costs are counted in gradients of a batch, and of
one example: a Jacobian is one for each output, a forward-mode derivative is one.

Limits. The reading must stand at the singular point itself, with one dead unit, and refuses elsewhere;
sampling asks for neither, and needs no rule. Cost: under two minutes on one core.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vmap

from papers.dead_directions.crossings import Crossing, recover_crossing
from papers.dead_directions.families.reduced_rank import ReducedRank, learning_coefficient
from papers.dead_directions.sgld import Sgld, sample_learning_coefficient
from papers.outcome import Asked, Result, ResultTable, Row
from topograd.errors import GeometryError
from topograd.geometry.rates import log_grid

CASES = (ReducedRank(5, 2, 4, 1), ReducedRank(4, 3, 4, 2), ReducedRank(8, 3, 5, 2))
SAMPLES, BATCH, CHAINS, RUNS = 1000, 50, 4, 8
TINY = ((10, 0.2), (20, 0.1))
BUDGETS = ((250, 0.2), (500, 0.14), (1000, 0.1), (2000, 0.07), (4000, 0.05))
"""Draws of a chain, after half as many to burn in, and ε in units of 1/(nβ): both biases shrink together."""
ANCHORS = (1e-3, 1e-2)
"""Where a component is held while the eigenvalues of the other are counted."""
TARGET = 0.25
"""Half the distance between neighbouring values of λ, which here are multiples of ½."""
NULL = 1e-10
"""A singular value below this part of the largest is zero."""


@dataclass(frozen=True)
class Reading:
    """What the rates said, and what they cost."""

    regular: int
    dimensions: tuple[int, int]
    crossing: Crossing
    batch_gradients: int
    example_gradients: int

    @property
    def coefficient(self) -> float:
        """λ"""
        return self.regular / 2 + self.crossing.rlct


@dataclass(frozen=True)
class Sampling:
    """One budget: λ̂ of each run, the root mean square of their errors, and the cost of one run."""

    draws: int
    estimates: tuple[float, ...]
    error: float
    batch_gradients: int
    example_gradients: int


def singular_module(model: ReducedRank, gauge: Tensor | None = None, seed: int = 0) -> nn.Sequential:
    """Two linear layers at the singular point, in a random frame of inputs, outputs and hidden units."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (model.inputs, model.hidden, model.outputs)
    frames = [torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q for d in sizes]
    hidden = frames[1] if gauge is None else gauge
    W1, W2 = model.factors(0.0)
    first = nn.Linear(model.inputs, model.hidden, bias=False, dtype=torch.float64)
    second = nn.Linear(model.hidden, model.outputs, bias=False, dtype=torch.float64)
    with torch.no_grad():
        first.weight.copy_(hidden @ W1 @ frames[0])
        second.weight.copy_(frames[2] @ W2 @ torch.linalg.inv(hidden))
    return nn.Sequential(first, second)


class Gradients:
    """Derivatives of a two-layer module's outputs in its weights w = (W₁, W₂), flat, each of them counted."""

    def __init__(self, module: nn.Sequential, inputs: Tensor) -> None:
        self.module, self.inputs = module, inputs
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        self.point = torch.cat([p.detach().flatten() for p in module.parameters()])
        self.count = 0

    def outputs(self, w: Tensor, x: Tensor) -> Tensor:
        """The module at the weights w."""
        parts = w.split([shape.numel() for shape in self.shapes.values()])
        named = {
            name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }
        return functional_call(self.module, named, (x,))

    def jacobian(self, w: Tensor) -> Tensor:
        """(samples, outputs, parameters): one backward pass for each output."""
        result = vmap(jacrev(self.outputs), in_dims=(None, 0))(w, self.inputs)
        self.count += result.shape[1]
        return result

    def fisher(self, w: Tensor, v: Tensor) -> Tensor:
        """vᵀF(w)v for unit noise: the mean of |∂_v f|², one forward-mode pass."""
        self.count += 1
        derivative: Tensor = jvp(lambda w: self.outputs(w, self.inputs), (w,), (v,))[1]
        return derivative.square().sum(-1).mean()


def read_coefficient(module: nn.Sequential, inputs: Tensor, seed: int = 0) -> Reading:
    """λ of a two-layer linear module that stands at a singular point with one dead hidden unit."""
    gradients = Gradients(module, inputs)
    at_point = gradients.jacobian(gradients.point)
    regular = len(_eigenvalues(at_point).nonzero())
    normals = _normals(module, at_point, torch.Generator(inputs.device).manual_seed(seed))
    crossing = recover_crossing(
        gradients.fisher, gradients.point, normals, grid=log_grid(1e-4, 1e-2, 5), anchor=0.3
    )
    rising = []
    for normal, order in zip(normals, crossing.orders, strict=True):
        low, high = (_eigenvalues(gradients.jacobian(gradients.point + e * normal)) for e in ANCHORS)
        rising.append(_rising(low, high, regular, order))
    a, b = rising[1], rising[0]  # where v is held at ε, the b directions of u rise
    crossing = Crossing(
        crossing.orders, (a - 1, b - 1), crossing.anchored, crossing.generic, crossing.evaluations
    )
    return Reading(regular, (a, b), crossing, gradients.count, gradients.count * len(inputs))


def _rising(low: Tensor, high: Tensor, regular: int, order: int) -> int:
    """How many eigenvalues beyond the regular ones rise as ε^{2k} between the two ANCHORS."""
    present = int((low > 0).sum())
    slopes = (high[:present] / low[:present]).log() / math.log(ANCHORS[1] / ANCHORS[0])
    stays, rises = slopes[:regular].abs() < 0.1, (slopes[regular:] - 2 * order).abs() < 0.1
    if int((high > 0).sum()) != present or present <= regular or not (stays.all() and rises.all()):
        raise GeometryError(
            f"beside a component of order {order} the eigenvalues have slopes {slopes.tolist()}, "
            f"with {regular} regular at the point: this is not a crossing of two components",
            setting="point",
            given=order,
        )
    return present - regular


def _eigenvalues(jacobian: Tensor) -> Tensor:
    """Those of F = mean JᵀJ, largest first, zeros as 0."""
    singular = torch.linalg.svdvals(jacobian.flatten(0, 1)) / math.sqrt(len(jacobian))
    return torch.where(singular > NULL * singular[0], singular, 0.0).square()


def _normals(module: nn.Sequential, jacobian: Tensor, generator: torch.Generator) -> Tensor:
    """(2, parameters): a random incoming row of the dead unit in W₁, and a random outgoing column in W₂."""
    (hidden, inputs), (outputs, _) = (p.shape for p in module.parameters())
    first, second = jacobian.split((hidden * inputs, outputs * hidden), dim=-1)
    incoming = _dead_unit(first.reshape(-1, hidden, inputs).transpose(1, 2))
    outgoing = _dead_unit(second.reshape(-1, outputs, hidden))
    row = torch.outer(incoming, _unit(inputs, incoming, generator)).flatten()
    column = torch.outer(_unit(outputs, incoming, generator), outgoing).flatten()
    return torch.stack(
        (torch.cat((row, torch.zeros_like(column))), torch.cat((torch.zeros_like(row), column)))
    )


def _unit(n: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """A random direction."""
    x = torch.randn(n, dtype=like.dtype, device=like.device, generator=generator)
    return x / torch.linalg.vector_norm(x)


def _dead_unit(blocks: Tensor) -> Tensor:
    """The one direction (h,) of the hidden layer that blocks (…, h) of the Jacobian do not see.

    For W₁ a block is a gradient at the hidden layer times the input, for W₂ an activation: the bottoms of the
    factors G and A. From singular values, not from Grams.
    """
    _, singular, directions = torch.linalg.svd(blocks.flatten(0, -2), full_matrices=False)
    dead = directions[singular <= NULL * singular[0]]
    if len(dead) != 1:
        raise GeometryError(
            f"{len(dead)} hidden directions are dead here: give a singular point with one of them",
            setting="model",
            given=len(dead),
        )
    return dead[0]


def sample_coefficient(
    model: ReducedRank, module: nn.Module, draws: int, scale: float, runs: int = RUNS
) -> Sampling:
    """λ̂ of `runs` runs of CHAINS chains each, with ε = scale / (nβ)."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, model.inputs, generator=generator, dtype=torch.float64)
    targets = module(inputs).detach()
    step = scale * math.log(SAMPLES) / SAMPLES
    settings = Sgld(step=step, chains=runs * CHAINS, burn_in=draws // 2, draws=draws, batch=BATCH)
    result = sample_learning_coefficient(module, half_square, inputs, targets, settings, seed=draws)
    estimates = torch.tensor(result.by_chain).reshape(runs, CHAINS).mean(1)
    exact, _ = learning_coefficient(model.inputs, model.hidden, model.outputs, model.rank)
    error = (estimates - exact).square().mean().sqrt().item()
    costs = result.batch_gradients // runs, result.example_gradients // runs
    return Sampling(draws, tuple(estimates.tolist()), error, *costs)


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    """-log p up to a constant, for unit noise."""
    return (outputs - targets).square().sum(-1).mean() / 2


def compare(
    model: ReducedRank, budgets: Sequence[tuple[int, float]] = BUDGETS, runs: int = RUNS
) -> tuple[Reading, list[Sampling]]:
    """Both ways at the same parameter."""
    module = singular_module(model)
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(2 * model.inputs, model.inputs, generator=generator, dtype=torch.float64)
    reading = read_coefficient(module, inputs)
    return reading, [sample_coefficient(model, module, *budget, runs=runs) for budget in budgets]


def table(model: ReducedRank, reading: Reading, samplings: Sequence[Sampling]) -> ResultTable:
    """One line for the reading and one for each budget; ratios are to the reading's cost."""
    exact, m = learning_coefficient(model.inputs, model.hidden, model.outputs, model.rank)
    message = f"{reading.coefficient}", f"{abs(reading.coefficient - exact):.3f}"
    rows = [(f"rates, m = {reading.crossing.multiplicity}", *message, *_costs(reading, reading))]
    for one in samplings:
        message = f"{sum(one.estimates) / len(one.estimates):.2f}", f"{one.error:.3f}"
        rows.append((f"SGLD {one.draws}", *message, *_costs(one, reading)))
    header = ("way", "λ", "error", "batch gradients", "ratio", "example gradients", "ratio")
    return ResultTable(f"{model.name}: λ = {exact}, m = {m}", header, tuple(rows))


def _costs(one: Reading | Sampling, reading: Reading) -> tuple[str, str, str, str]:
    batches, examples = one.batch_gradients, one.example_gradients
    ratios = batches / reading.batch_gradients, examples / reading.example_gradients
    return f"{batches}", f"{ratios[0]:.0f}", f"{examples}", f"{ratios[1]:.0f}"


def verdict(reading: Reading, samplings: Sequence[Sampling]) -> str:
    """The ratios at the first budget whose error is at most TARGET, and at the least error.

    The reading's error is zero, which sampling does not reach: both are lower bounds at equal error. The
    second depends on which budgets were tried.
    """
    lines = []
    good = [one for one in samplings if one.error <= TARGET]
    least = min(samplings, key=lambda one: one.error)
    for name, one in ((f"error at most {TARGET}", good[0] if good else None), ("least error", least)):
        if one is None:
            lines.append(f"{name}: not reached")
        else:
            _, batches, _, examples = _costs(one, reading)
            lines.append(
                f"{name} ({one.error:.3f}, {one.draws} draws): {batches} times the batch gradients, "
                f"{examples} times the example gradients"
            )
    return "\n".join(lines)


def run(args: Asked) -> Result:
    """Every case; with the preset tiny, the first with two small budgets."""
    tiny = args.preset == "tiny"
    cases, budgets, runs = (CASES[:1], TINY, 2) if tiny else (CASES, BUDGETS, RUNS)
    rows: list[Row] = []
    tables, findings = [], []
    for i, model in enumerate(cases):
        reading, samplings = compare(model, budgets, runs)
        exact, _ = learning_coefficient(model.inputs, model.hidden, model.outputs, model.rank)
        tables.append(table(model, reading, samplings))
        findings += [f"{model.name}, {line}." for line in verdict(reading, samplings).splitlines()]
        rows += [_row(model, exact, reading), *(_row(model, exact, one) for one in samplings)]
        args.on_more(i + 1, len(cases))
    return Result(
        setting="Reduced-rank regression at its singular point, where the answer is known.",
        rows=rows,
        tables=tuple(tables),
        findings=tuple(findings),
    )


def _row(model: ReducedRank, exact: float, one: Reading | Sampling) -> Row:
    """One way of finding λ, as plain numbers."""
    if isinstance(one, Reading):
        way, result, error = "rates", one.coefficient, abs(one.coefficient - exact)
    else:
        way, result, error = f"SGLD {one.draws}", sum(one.estimates) / len(one.estimates), one.error
    costs = {"batch_gradients": one.batch_gradients, "example_gradients": one.example_gradients}
    return {"model": model.name, "way": way, "exact": exact, "found": result, "error": error, **costs}
