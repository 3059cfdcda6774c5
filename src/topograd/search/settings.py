"""Settings of a Pareto study. Nothing here needs torch."""

from dataclasses import dataclass

from topograd.errors import ConfigError
from topograd.limits import REPEATS, SEED, check_numbers


@dataclass(frozen=True, kw_only=True)
class ParetoConfig:
    """How a study goes."""

    trials: int = 20
    """Candidates in all, those of earlier calls included."""
    rungs: tuple[int, ...] = (20, 80)
    """Steps after which candidates are compared; the last is the full budget."""
    reduction: float = 2.0
    """f: about one in f candidates continues at each rung."""
    sampler_seed: int = 0
    """Of the sampler that proposes candidates."""
    name: str = "pareto"
    """The study's name in the storage."""
    storage: str | None = None
    """A database's URL; nothing means SQLite in the study's folder."""

    def __post_init__(self) -> None:
        check_numbers(self, trials=REPEATS, sampler_seed=SEED)
        rising = all(a < b for a, b in zip(self.rungs, self.rungs[1:], strict=False))
        if not self.rungs or not rising or not 1 <= self.rungs[0] <= self.rungs[-1] <= REPEATS[1]:
            raise ConfigError(
                setting="rungs", given=list(self.rungs), allowed="rising numbers of steps, such as 20 80"
            )
        if not 1 < self.reduction < 1e9:
            raise ConfigError(setting="reduction", given=self.reduction, allowed="finite and above 1")
