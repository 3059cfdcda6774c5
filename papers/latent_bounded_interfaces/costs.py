"""What bounded-interface backprop costs: FLOPs, memory traffic, arithmetic intensity, work and span.

Statement. A region has forward FLOPs F and forward memory traffic Q. Its Jacobian carries r directions
through the region, c of them at a time, and reads the activations again for each chunk:

    W_J = r F                                   (8)
    I(J) = r F / (⌈r/c⌉ Q)                      (9), (10) at c = r, (11) where c divides r: c F / Q
    W = Σ_k W_J,k + K r³ + Σ_k W_local,k        (6)
    T = max_k W_J,k + r³ ⌈log₂ K⌉ + max_k W_local,k     (7)

with, from Table 3 of the source,

    SSM            F = B L D N                      Q = B L (D + N)
    Transformer    F = B L (D² + L D + D X)         Q = B L (D + H L + X)

Symbols. B batch, L tokens, D width, N state of the SSM, H heads, X width of the MLP, K regions, r width of
the interface, c `chunk`. FLOPs and bytes are totals for one region and the whole batch. Cost: O(K + log r).
`python -m papers check costs` shows all of it, by default for the configuration of Appendix B.
Source: "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces" §3.2 and Appendix B.

Conventions. The source writes Θ(·); its numbers follow from constants of 1, one FLOP for a multiply-add, and
2 bytes (bfloat16) for an element. So its Table 4 is, with ours in brackets where the digits differ,

    SSM            7.8   7.8   125   500 (502)        compute-bound from c = 38
    Transformer    80    80    1275 (1273)   5100 (5092)     from c = 4

Where the published claims need a second look:

- 295 operations for a byte is an H100 at 989 TFLOPS and 3.35 TB/s, which count a multiply-add as two FLOPs.
  Counted alike, the threshold is 147.5 multiply-adds for a byte: c = 19 and c = 2, not 38 and 4.
- Eq. 11 takes r/c for ⌈r/c⌉. At r = 64 a chunk of 38 still needs two passes, as a chunk of 32 does: 251
  operations for a byte, below 295. The smallest chunk that is compute-bound is then 64; `least_chunk`.
- The scan is said to cost less than 1e-4 (SSM) and 1e-7 (Transformer) of the Jacobians: r²/F is 2.0e-5 and
  5.5e-8. But Jacobians are per sample, so a scan over products costs B K r³: 1.6e-4 and 4.4e-7, above both
  bounds, and still negligible.
- Table 1 charges backprop d² for a step, d = B L D, as if each Jacobian were dense: 1.6e14. A VJP costs about
  F: 7.4e10 for the Transformer, 2100 times less, and 2.0e8 for the SSM.

Limits. Constants of 1 are not the real ones (attention has four projections, an MLP two or three), the
encoder and decoder of the interface are not counted, nor are the tangents that every direction writes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from topograd.errors import ConfigError
from topograd.topology.composition import positive_int

BYTES_PER_ELEMENT = 2
H100_OPS_PER_BYTE = 295.0


def _check_sizes(region: Region) -> None:
    for field in fields(region):
        positive_int(getattr(region, field.name), f"{type(region).__name__}.{field.name}")


@dataclass(frozen=True)
class SSMRegion:
    """A region of a state-space model: B samples of L tokens, D wide, a state of N for each channel."""

    B: int
    L: int
    D: int
    N: int

    def __post_init__(self) -> None:
        _check_sizes(self)

    @property
    def forward_flops(self) -> int:
        """F_k, a multiply-add counted once."""
        return self.B * self.L * self.D * self.N

    @property
    def forward_bytes(self) -> int:
        """Q_k, in bytes."""
        return BYTES_PER_ELEMENT * self.B * self.L * (self.D + self.N)


@dataclass(frozen=True)
class TransformerRegion:
    """A region of a Transformer: B samples of L tokens, D wide, H heads, an MLP of width X."""

    B: int
    L: int
    D: int
    H: int
    X: int

    def __post_init__(self) -> None:
        _check_sizes(self)

    @property
    def forward_flops(self) -> int:
        """F_k, a multiply-add counted once."""
        return self.B * self.L * self.D * (self.D + self.L + self.X)

    @property
    def forward_bytes(self) -> int:
        """Q_k, in bytes; the attention matrices are the H L term."""
        return BYTES_PER_ELEMENT * self.B * self.L * (self.D + self.H * self.L + self.X)


Region = SSMRegion | TransformerRegion

ILLUSTRATIVE_SSM = SSMRegion(B=8, L=2048, D=768, N=16)
ILLUSTRATIVE_TRANSFORMER = TransformerRegion(B=8, L=2048, D=768, H=12, X=3072)
ILLUSTRATIVE_RANK = 64
ILLUSTRATIVE_REGIONS = 16
ILLUSTRATIVE_CHUNK = 16
"""The configuration of Appendix B, and the chunk between one direction and all of them in Table 4."""


def forward_intensity(region: Region) -> float:
    """I_fwd = F / Q, in operations for a byte."""
    return region.forward_flops / region.forward_bytes


def jacobian_flops(region: Region, rank: int) -> int:
    """W_J = r F (eq. 8)."""
    return positive_int(rank, "the interface's width") * region.forward_flops


def jacobian_intensity(region: Region, rank: int, chunk: int) -> float:
    """I(J) = r F / (⌈r/c⌉ Q): eq. 10 at chunk = rank, eq. 11 where the chunk divides the rank."""
    passes = math.ceil(rank / positive_int(chunk, "chunk", most=rank))
    return jacobian_flops(region, rank) / (passes * region.forward_bytes)


def published_least_chunk(region: Region, ops_per_byte: float = H100_OPS_PER_BYTE) -> int:
    """The smallest c with c I_fwd >= the threshold: eq. 11 as written, whatever the rank."""
    return math.ceil(ops_per_byte / forward_intensity(region))


def least_chunk(region: Region, rank: int, ops_per_byte: float = H100_OPS_PER_BYTE) -> int | None:
    """The smallest chunk whose Jacobian is compute-bound with whole passes; None if even c = r is not."""
    chunks = range(1, positive_int(rank, "the interface's width") + 1)
    bound = bisect_left(chunks, True, key=lambda c: jacobian_intensity(region, rank, c) >= ops_per_byte)
    return chunks[bound] if bound < rank else None


def scan_ratio(region: Region, rank: int, *, per_sample: bool) -> float:
    """The scan's FLOPs over the Jacobians': r²/F as published, B r²/F with a Jacobian for each sample."""
    return (region.B if per_sample else 1) * rank**3 / jacobian_flops(region, rank)


@dataclass(frozen=True)
class WorkSpan:
    """FLOPs in all, and on the longest path when every region has a worker. The forward is in neither."""

    work: float
    span: float


def work_span(jacobian: Sequence[float], local: Sequence[float], rank: int) -> WorkSpan:
    """Eqs. 6 and 7 from the FLOPs of each region's Jacobian and of its local backward."""
    if len(jacobian) != len(local) or not jacobian:
        raise ConfigError(
            f"work_span was given {len(jacobian)} Jacobian and {len(local)} local costs",
            setting="jacobian",
            given=len(jacobian),
            remedy="give one of each for every region, and at least one region",
        )
    combine, regions = positive_int(rank, "the interface's width") ** 3, len(jacobian)
    return WorkSpan(
        work=sum(jacobian) + regions * combine + sum(local),
        span=max(jacobian) + combine * _levels(regions) + max(local),
    )


@dataclass(frozen=True)
class Transport:
    """A row of Table 1: FLOPs of one step or combine, span over K regions, FLOPs for each element read."""

    flops: int
    span: int
    intensity: int
    materializes: bool


def sequential_transport(width: int, regions: int) -> Transport:
    """Backprop: a width × width matrix-vector product for each region, one after the other."""
    step = positive_int(width, "width") ** 2
    return Transport(step, positive_int(regions, "the number of regions") * step, 1, materializes=False)


def scan_transport(width: int, regions: int) -> Transport:
    """A scan over width × width matrices: the full-rank scan at width B L D, LBI's at width r."""
    combine = positive_int(width, "width") ** 3
    levels = _levels(positive_int(regions, "the number of regions"))
    return Transport(combine, combine * levels, width, materializes=True)


def table_1(region: Region, rank: int, regions: int) -> dict[str, Transport]:
    """Table 1 as numbers, for K regions like `region`."""
    width = region.B * region.L * region.D
    return {
        "Sequential BP": sequential_transport(width, regions),
        "Full-rank scan": scan_transport(width, regions),
        "LBI scan": scan_transport(rank, regions),
    }


def cost_model(
    region: Region, rank: int, regions: int, ops_per_byte: float = H100_OPS_PER_BYTE
) -> dict[str, Any]:
    """Everything of this module for K regions like `region`, as plain numbers: Tables 1, 3 and 4."""
    jacobian = jacobian_flops(region, rank)
    totals = work_span([jacobian] * regions, [region.forward_flops] * regions, rank)
    return {
        "forward_flops": region.forward_flops,
        "forward_bytes": region.forward_bytes,
        "forward_intensity": forward_intensity(region),
        "jacobian_flops": jacobian,
        "jacobian_intensity": {
            c: jacobian_intensity(region, rank, c) for c in sorted({1, min(ILLUSTRATIVE_CHUNK, rank), rank})
        },
        "least_chunk": least_chunk(region, rank, ops_per_byte),
        "published_least_chunk": published_least_chunk(region, ops_per_byte),
        "scan_over_jacobians": scan_ratio(region, rank, per_sample=True),
        "published_scan_over_jacobians": scan_ratio(region, rank, per_sample=False),
        "work": totals.work,
        "span": totals.span,
        "transport": {name: asdict(row) for name, row in table_1(region, rank, regions).items()},
    }


def _levels(regions: int) -> int:
    return (regions - 1).bit_length()  # ⌈log₂ K⌉
