"""The untrained model of equal regions that is measured.

Nothing here needs torch, so that flags are read, explained and refused before torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from topograd.errors import ConfigError
from topograd.limits import DEPTH, SIZE, check_numbers
from topograd.nn.config import Architecture, GPTConfig, SegmentInterface
from topograd.topology.dag import Topology

MAX_NUMBERS = 2**32
"""Numbers that a measured model and its batch may have together: 16 GiB in float32."""
SPREAD = 0.02
"""Standard deviation of matrices that would start at zero, so that no product is trivial."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """An untrained GPT of equal regions, and a batch for it."""

    regions: int = 6
    """Regions, joined by interfaces."""
    region_layers: int = 2
    """Layers of each region."""
    width: int = 256
    """Numbers in the hidden state of a token."""
    heads: int = 4
    """Heads of attention."""
    vocab: int = 1024
    """Tokens that there are."""
    context: int = 256
    """Positions of a sequence."""
    batch: int = 1
    """Sequences that are measured together."""

    def __post_init__(self) -> None:
        check_numbers(self, regions=(3, DEPTH[1]), region_layers=DEPTH, batch=SIZE)
        self.config("transformer")
        self.check_size()

    def config(self, architecture: Architecture) -> GPTConfig:
        return GPTConfig(
            layers=self.regions * self.region_layers,
            width=self.width,
            heads=self.heads,
            vocab=self.vocab,
            context=self.context,
            architecture=architecture,
            head_std=SPREAD,
        )

    @property
    def topology(self) -> Topology:
        return Topology.regions(",".join([str(self.region_layers)] * self.regions))

    def check_size(self, interface: SegmentInterface | None = None) -> None:
        """Refuse, before anything is built, what would not fit: weights, one region's graph, one Jacobian."""
        tokens, layers = self.batch * self.context, self.regions * self.region_layers
        numbers = 2 * self.vocab * self.width + 12 * layers * self.width**2
        numbers += tokens * (20 * self.region_layers * self.width + self.vocab)
        if interface is not None:
            check_numbers(interface, rank=SIZE)
            interface.segment(self.context)
            states = max(interface.segments - 1, 1)
            numbers += 2 * self.regions * self.width * (self.width + interface.rank)
            numbers += self.batch * (states * interface.rank) ** 2
        if numbers > MAX_NUMBERS:
            raise ConfigError(
                f"a model of this size and its batch have about {numbers:.1e} numbers",
                setting="width",
                remedy=(
                    f"at most {MAX_NUMBERS:.1e} are measured, so choose a smaller width, "
                    "rank, vocab, context or batch"
                ),
            )
