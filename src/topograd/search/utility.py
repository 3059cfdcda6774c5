"""The utility J of a configuration, one number to be minimised.

Statement.

    J = BPB + β C_global + γ C_head - η U_cap + ρ C_bw + κ C_cal                                    (eq. 30)

    BPB      of what the model predicts (`Plan.prediction`)
    C_global = Σ_i λ_i c_i / Σ_i c_i                    the coordination: 1 for backprop, 0 for layers alone
    C_head   = (1 + Σ_i (1 - λ_i)) s,  s = 1 or r (V + d)/(V d)     heads, in vocabulary matrices; 0 if shared
    U_cap    = mean of prefix exit, WAND gain, specialist capacity, composition gain, each from 0 to 1
    C_bw     = Σ_i (1 - λ_i) max(0, r_min - r_eff(h_i))          boundaries where the representation is narrow
    C_cal    = mean over the exits of their calibration error

The same six of a trained run are measured (`property_readings.py`): there C_head counts parameters, private
decoders among them, and U_cap has four readings. Its reference points (ours; the paper gives none):

    reading               0                                       1
    prefix exit           no exit within half of the layers       as accurate as the whole model
    WAND gain             no layer is skipped                     all are
    specialist capacity   new text is learned at the old one's    as much of the new text as training every
                          expense, or not at all                  layer learns, and the old one still known
    composition gain      no pool beats the best stage            it needs no bits at all

Before anything is trained, U_cap is read off the partition (derived here): the number of stages of at least
d_min layers over the most that there could be, and 0 for one stage. It vanishes at both ends of the lattice,
as Remark 7.7 wants it, and is largest for stages of d_min layers.

Names. `closed_forms.coupling_cost` is Σ λ_i, the joints that gradient crosses: 3 for 2,2,2. The coordination
is that over backprop's: 0.6. J has the coordination, so that a weight means the same for every depth.

Symbols. i = 1..L-1 the places for a boundary, λ_i `grad_scales` (0 is a hard boundary), V vocabulary,
d width, r the rank of a head's delta. Cost: O(L).
Source: "Stage-Partitioned Learning: A Configuration Space Between Backpropagation and Local Learning" §10.1
(Def. 10.1, Remark 10.3), §7.5. Remark 10.3 names two deployments and no number: the datacenter, all weights
zero, which leaves backprop, and on-device with β, η and ρ large. The numbers of `DEPLOYMENTS` are ours, in
bits per byte for one unit of each term, with ranks as shares of the width.
Limits. J adds unlike things. A front (`front.py`) needs no weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from topograd.errors import ConfigError
from topograd.topology.composition import Composition, positive_int


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The six terms of J, without their weights."""

    bpb: float
    coupling: float = 0.0
    """C_global, the coordination."""
    head: float = 0.0
    """C_head."""
    capability: float = 0.0
    """U_cap; more is better."""
    bandwidth: float = 0.0
    """C_bw."""
    calibration: float = 0.0
    """C_cal."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What one unit of each term is worth, in bits per byte."""

    coupling: float = 0.0
    """β"""
    head: float = 0.0
    """γ"""
    capability: float = 0.0
    """η"""
    bandwidth: float = 0.0
    """ρ"""
    calibration: float = 0.0
    """κ"""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) >= 0:
                raise ConfigError(setting=field.name, given=getattr(self, field.name), allowed="at least 0")


DEPLOYMENTS: Mapping[str, Weights] = {
    "datacenter": Weights(),
    "on-device": Weights(coupling=0.3, head=0.05, capability=0.3, bandwidth=0.3, calibration=0.1),
    "serving": Weights(head=0.02, capability=0.4, bandwidth=0.1, calibration=0.5),
    "modular": Weights(coupling=0.3, head=0.0, capability=0.5, bandwidth=0.1, calibration=0.1),
}
"""Weights by deployment: pretraining with much compute; training under tight memory; exits decided token by
token, which needs calibrated stages; stages that are updated and extended one by one."""


def deployment(name: str) -> Weights:
    """The weights of the deployment called `name`."""
    if name not in DEPLOYMENTS:
        raise ConfigError(setting="deployment", given=name, allowed=f"one of {', '.join(DEPLOYMENTS)}")
    return DEPLOYMENTS[name]


def utility(terms: Terms, weights: Weights) -> float:
    """J (eq. 30); less is better.

    >>> utility(Terms(bpb=2.0, coupling=1.0, capability=0.5), Weights(coupling=0.5, capability=0.25))
    2.375
    """
    return (
        terms.bpb
        + weights.coupling * terms.coupling
        + weights.head * terms.head
        - weights.capability * terms.capability
        + weights.bandwidth * terms.bandwidth
        + weights.calibration * terms.calibration
    )


def coordination(grad_scales: Sequence[float], costs: Sequence[float] | None = None) -> float:
    """C_global = Σ λ_i c_i / Σ c_i, c_i = 1 unless given; 0 where there is no place for a boundary.

    >>> coordination([1, 0, 1, 0, 1])  # 2,2,2
    0.6
    """
    _check_grad_scales(grad_scales)
    costs = [1.0] * len(grad_scales) if costs is None else costs
    _check_length(costs, grad_scales, "costs")
    if not all(c >= 0 for c in costs):
        raise ConfigError(setting="costs", given=min(costs), allowed="at least 0")
    total = sum(costs)
    return sum(lam * c for lam, c in zip(grad_scales, costs, strict=True)) / total if total else 0.0


def head_cost(
    grad_scales: Sequence[float], heads: str, vocab: int, width: int, rank: int | None = None
) -> float:
    """C_head: the parameters of the stages' own heads, in matrices (vocab, width); 0 with a shared head."""
    _check_grad_scales(grad_scales)
    if heads not in ("shared", "per-stage"):
        raise ConfigError(setting="heads", given=heads, allowed="'shared' or 'per-stage'")
    if heads == "shared":
        return 0.0
    size = 1.0 if rank is None else rank * (vocab + width) / (vocab * width)
    return size * (1 + sum(1 - lam for lam in grad_scales))


def capability(*, prefix_exit: float, wand: float, specialist: float, composition: float) -> float:
    """U_cap of a trained configuration: the mean of four readings from 0 to 1 (see the module's head)."""
    readings = {
        "prefix_exit": prefix_exit,
        "wand": wand,
        "specialist": specialist,
        "composition": composition,
    }
    for name, value in readings.items():
        if not 0 <= value <= 1:
            raise ConfigError(setting=name, given=value, remedy="a reading of the capability lies in [0, 1]")
    return sum(readings.values()) / len(readings)


def structural_capability(composition: Composition, min_depth: int) -> float:
    """U_cap of a partition before it is trained, from 0 to 1.

    >>> [structural_capability(Composition.parse(p), 2) for p in ("6", "1,1,1,1,1,1", "4,2", "2,2,2")]
    [0.0, 0.0, 0.6666666666666666, 1.0]
    """
    min_depth = positive_int(min_depth, "min_depth")
    most = composition.layers // min_depth
    if composition.stages < 2 or most < 1:
        return 0.0
    return sum(part >= min_depth for part in composition.parts) / most


def bandwidth_cost(grad_scales: Sequence[float], ranks: Sequence[float], floor: float) -> float:
    """C_bw; `ranks` are the effective ranks at the same places and `floor` is r_min, in the same unit."""
    _check_grad_scales(grad_scales)
    _check_length(ranks, grad_scales, "ranks")
    return sum((1 - lam) * max(0.0, floor - r) for lam, r in zip(grad_scales, ranks, strict=True))


def calibration_cost(errors: Sequence[float]) -> float:
    """C_cal: the mean of the exits' calibration errors."""
    if not errors:
        raise ConfigError(setting="errors", given=[], allowed="one for each stage")
    return sum(errors) / len(errors)


def hard(composition: Composition) -> list[float]:
    """The grad_scales λ = 1 - b(π) of a partition (eq. 28)."""
    return [1.0 - b for b in composition.boundary_vector]


def _check_grad_scales(grad_scales: Sequence[float]) -> None:
    for i, lam in enumerate(grad_scales, start=1):
        if not 0 <= lam <= 1:
            raise ConfigError(setting="grad_scales", given=lam, allowed=f"in [0, 1] after layer {i}")


def _check_length(values: Sequence[float], grad_scales: Sequence[float], name: str) -> None:
    if len(values) != len(grad_scales):
        raise ConfigError(setting=name, given=values, allowed=f"{len(grad_scales)}, one for each boundary")
