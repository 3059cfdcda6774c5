"""Settings of fine-tuning a specialist. Needs no torch."""

from dataclasses import dataclass, replace

from topograd.limits import REPEATS, SEED, SIZE, check_numbers
from topograd.runs.config import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class FineTune:
    """What a specialist is trained on, and how."""

    data: str = ""
    """Chat records (.jsonl), or any text: a file or a folder."""
    steps: int = 200
    """Steps of the optimizer."""
    batch: int = 8
    """Rows of a step."""
    context: int | None = None
    """Tokens in a row; by default 256, or as many as the base sees."""
    rate: float = 0.2
    """Learning rates of the layers, as a share of the base's."""
    head_rate: float = 0.25
    """Learning rate of the specialist's head, as a share of the base's."""
    weight_decay: float = 0.1
    """Decay of the layers' matrices."""
    warmup: float = 0.05
    """Share of the steps in which the rates rise."""
    warmdown: float = 0.5
    """Share of the steps, at the end, in which they fall."""
    average: float = 0.0
    """Decay of the average of the weights; 0 keeps none."""
    seed: int = 0
    """Of the order of the rows."""
    save_every: int = 100
    """Steps between checkpoints, each with a reading of the base."""
    keep_states: bool | None = None
    """Compute the base's hidden states once; by default where every row is seen more than once."""
    tasks: str | None = None
    """A folder with task files such as copa.jsonl: those without examples are asked at every checkpoint."""
    task_items: int = 50
    """Items of each task that are asked."""

    def __post_init__(self) -> None:
        check_numbers(self, steps=REPEATS, batch=SIZE, context=SIZE, seed=SEED, save_every=REPEATS)
        check_numbers(self, task_items=REPEATS)
        check_numbers(self, rate=(0, 1000), head_rate=(0, 1000), weight_decay=(0, 1000))
        check_numbers(self, average=(0, 0.999999), warmup=(0, 1), warmdown=(0, 1))

    def optimizer(self, base: OptimizerConfig) -> OptimizerConfig:
        """The base's optimizer at its share of the base's rates."""
        matrices = MATRICES.get(base.name) if base.lr_matrix is None else base.lr_matrix
        return replace(
            base,
            lr_matrix=None if matrices is None else self.rate * matrices,
            lr_embedding=self.rate * base.lr_embedding,
            lr_scalar=self.rate * base.lr_scalar,
            lr_head=self.head_rate * base.lr_head,
            weight_decay=self.weight_decay,
            warmup=self.warmup,
            warmdown=self.warmdown,
            clip=1.0 if base.clip is None else base.clip,
            stages=(),
        )


MATRICES = {"muon+adamw": 0.02, "adamw": 0.002, "ddc-adam": 0.002, "ddc-muon": 0.02, "sgd": 0.1}
"""Rates of the layers' matrices where a base's settings give none (`training/optimizers.py`)."""
