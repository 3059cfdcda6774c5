"""Salience of boundaries: which to merge, split or move, from one validation pass.

Statement. Let z_i be the logits of h_i, the hidden state after layer i, by the head of the stage that ends
nearest. The prediction of a partition π' under relaxed boundaries is the Log-OP of the layers, weighed by
τ_i = 1 - λ_i:  softmax(Σ_i τ_i z_i / Σ_i τ_i), with τ = 1 at the ends of its stages. So with one pass,

    BPB(π')   bits per byte of that prediction, for π and for every neighbour π'
    M_i = BPB(merge_i π) - BPB(π) + β (C_global(merge_i π) - C_global(π))        negative: merge      (33)
    S_i = η ΔU_cap - (BPB(split_i π) - BPB(π)) - γ ΔC_head                       positive: split      (34)
    U_k = CE(A_{k-1}, y) - CE(A_{k-1} + z_k, y),  A_{k-1} = Σ_{j<k} z_j          small: redundant      (35)

and for every π' all six terms of J: effective ranks and calibration errors are read at every layer.

The paper writes (33) with -β. Merging adds gradient coupling, ΔC_global = c_i > 0, which J (eq. 30) counts
as a cost; with -β a costlier coupling would ask for more merging. The sign here is the one of J.

Symbols and shapes. L layers, N partitions, C tokens of a chunk, V the vocabulary: logits (L, C, V), pooled
(N, C, V). Cost: one forward, L readouts and N softmaxes for each token; memory is bounded by the chunk.
Source: "Stage-Partitioned Learning: A Configuration Space Between Backpropagation and Local Learning"
§10.2.2.
Limits. Forward values do not depend on λ, so this sees what the expert at a boundary adds to the product, not
what other gradients would have made of the layers. A head reads layers that it was not trained on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from topograd.data.windows import Text
from topograd.exec.forward import evaluating, stage_outputs
from topograd.exec.linear_cross_entropy import chunk_tokens
from topograd.nn.stack import Stack
from topograd.search.change_topology import nearest_head
from topograd.search.utility import (
    Terms,
    Weights,
    bandwidth_cost,
    calibration_cost,
    coordination,
    hard,
    head_cost,
    structural_capability,
)
from topograd.topology.composition import Composition
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.evaluation import (
    BINS,
    RANK_TOKENS,
    activation_rank,
    calibration_error,
    confidence_bins,
)


@dataclass(frozen=True)
class Measured:
    """The readings of a partition and of its neighbours, from one pass."""

    composition: Composition
    bpb: Mapping[Composition, float]
    """Of the pooled prediction, for the partition and for each neighbour that was asked about."""
    layer_ece: Sequence[float]
    layer_rank: Sequence[float]
    """The effective rank after each layer, as a share of the width."""
    usefulness: Sequence[float | None]
    """U_k in nats per token; the first stage has none."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the terms of J need beside the pass."""

    weights: Weights
    heads: str
    vocab: int
    width: int
    rank: int | None = None
    """Of the heads' deltas."""
    min_depth: int = 2
    """d_min of the capability."""
    floor: float = 0.25
    """r_min: a boundary where the effective rank is a smaller share of the width costs."""


@torch.no_grad()
def measure(
    stack: Stack, composition: Composition, neighbours: Sequence[Composition], text: Text, batch: int = 16
) -> Measured:
    """One pass over `text`."""
    layers = composition.layers
    plan = Plan.of(Topology.soft([0.5] * (layers - 1)), layers)
    asked = [composition, *neighbours]
    device = next(stack.parameters()).device
    tally = _Tally(stack, composition, asked, device)
    with evaluating(stack):
        for start in range(0, len(text.inputs), batch):
            targets = text.targets[start : start + batch].to(device).flatten()
            counted = targets != -100
            outputs = stage_outputs(stack, plan, text.inputs[start : start + batch].to(device), range(layers))
            tally.add([outputs[i].flatten(0, 1)[counted] for i in range(layers)], targets[counted])
    return tally.finish(text.nbytes)


class _Tally:
    """Sums over tokens, in float64."""

    def __init__(
        self, stack: Stack, composition: Composition, asked: Sequence[Composition], device: torch.device
    ) -> None:
        self.stack, self.composition, self.asked = stack, composition, asked
        layers = composition.layers
        self.heads = [nearest_head(composition, i + 1) for i in range(layers)]
        self.pools = torch.zeros(len(asked), layers, device=device)
        for row, pi in zip(self.pools, asked, strict=True):
            row[[end - 1 for end in pi.terminals]] = 1 / pi.stages
        self.pooled = self.pools.new_zeros(len(asked), dtype=torch.float64)
        self.running = self.pooled.new_zeros(composition.stages)
        self.bins = self.pooled.new_zeros(layers, BINS, 3)
        self.hidden: list[list[Tensor]] = [[] for _ in range(layers)]
        self.tokens = 0

    def add(self, hidden: Sequence[Tensor], targets: Tensor) -> None:
        """The hidden states (tokens, ...) of every layer, and the targets (tokens,)."""
        if not len(targets):
            return
        if self.tokens < RANK_TOKENS:
            for kept, h in zip(self.hidden, hidden, strict=True):
                kept.append(h)
        self.tokens += len(targets)
        vocab = self.stack.readout(hidden[0][:1], 0).shape[-1]
        size = max(chunk_tokens(vocab) // (len(hidden) + len(self.asked)), 1)
        for start in range(0, len(targets), size):
            rows = slice(start, start + size)
            z = torch.stack([self.stack.readout(h[rows], k) for h, k in zip(hidden, self.heads, strict=True)])
            self._add_chunk(z.float(), targets[rows])

    def _add_chunk(self, z: Tensor, y: Tensor) -> None:
        mixed = torch.einsum("nl,lcv->ncv", self.pools, z)
        self.pooled += _nats(mixed, y)
        ends = [end - 1 for end in self.composition.terminals]
        self.running += _nats(z[ends].cumsum(0), y)
        self.bins += torch.stack([confidence_bins(layer, y) for layer in z])

    def finish(self, nbytes: int) -> Measured:
        to_bpb = 1 / (math.log(2) * max(nbytes, 1))
        gains = (self.running[:-1] - self.running[1:]) / max(self.tokens, 1)
        widths = [kept[0].shape[-1] for kept in self.hidden]
        ranks = [activation_rank(torch.cat(kept)[:RANK_TOKENS]) for kept in self.hidden]
        return Measured(
            self.composition,
            dict(zip(self.asked, (self.pooled * to_bpb).tolist(), strict=True)),
            [calibration_error(bins) for bins in self.bins.cpu()],
            [rank / width for rank, width in zip(ranks, widths, strict=True)],
            [None, *gains.tolist()],
        )


def _nats(logits: Tensor, targets: Tensor) -> Tensor:
    """(N,): the summed cross-entropy of logits (N, C, V)."""
    each = F.cross_entropy(logits.transpose(1, 2), targets.expand(len(logits), -1), reduction="none")
    return each.double().sum(1)


def terms(measured: Measured, composition: Composition, costs: Costs) -> Terms:
    """The six terms of J of the partition that was measured, or of a neighbour of it."""
    lam = hard(composition)
    return Terms(
        bpb=measured.bpb[composition],
        coupling=coordination(lam),
        head=head_cost(lam, costs.heads, costs.vocab, costs.width, costs.rank),
        capability=structural_capability(composition, costs.min_depth),
        bandwidth=bandwidth_cost(lam, measured.layer_rank[:-1], costs.floor),
        calibration=calibration_cost([measured.layer_ece[end - 1] for end in composition.terminals]),
    )


def merge_pressures(measured: Measured, costs: Costs) -> dict[int, float]:
    """M_i of every boundary i whose merge was asked about (eq. 33); negative means: merge."""
    here, now = measured.composition, terms(measured, measured.composition, costs)
    pressures = {}
    for pi in measured.bpb:
        if pi.boundaries < here.boundaries:
            then = terms(measured, pi, costs)
            (i,) = here.boundaries - pi.boundaries
            pressures[i] = then.bpb - now.bpb + costs.weights.coupling * (then.coupling - now.coupling)
    return pressures


def split_pressures(measured: Measured, costs: Costs) -> dict[int, float]:
    """S_i of every layer i whose split was asked about (eq. 34); positive means: split."""
    here, now, weights = measured.composition, terms(measured, measured.composition, costs), costs.weights
    pressures = {}
    for pi in measured.bpb:
        if pi.boundaries > here.boundaries:
            then = terms(measured, pi, costs)
            (i,) = pi.boundaries - here.boundaries
            gain = weights.capability * (then.capability - now.capability)
            pressures[i] = gain - (then.bpb - now.bpb) - weights.head * (then.head - now.head)
    return pressures
