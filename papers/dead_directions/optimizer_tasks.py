"""Three small tasks with a softmax, each with the symmetries of its network written down.

    gpt       bytes of the standard library: a two-layer GPT of ours, on a text that it sees nine times
    digits    scikit-learn's digits: a ReLU network with two hidden layers, on 300 examples
    modular   (a + b) mod p from a part of all pairs: embeddings and one hidden ReLU layer. Full batch, with
              weight decay, under which such networks first memorise and later generalise
    decay     the same with twice the weight decay
    memorise  the same without weight decay, where nothing generalises: rates are chosen by what is learnt

A task is data: a network, its gauges, examples to learn and examples to test, and a budget. Output matrices
of our GPT start at zero, where a rescaling has no direction, so its MLPs start elsewhere here, for everyone.

Gauges. Each tensor has one: where the last matrix belongs to a rescaling, its row shift is not covered, and
only the shift of the bias is. They are what `find_gauges` finds, written out.

Source of the third task: "Grokking: Generalization Beyond Overfitting on Small Algorithmic Datasets" (A.
Power et al.) and "Progress Measures for Grokking via Mechanistic Interpretability" (N. Nanda et al.); ours
is smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.data.corpus import embedded_documents
from topograd.errors import ConfigError
from topograd.nn.gpt import GPT
from topograd.optim.gauges import CEShiftBias, CEShiftRowShift, ChainedReLURescale, Gauge, ReLURescale

DIGITS_TRAINED = 300
MODULUS, PAIRS_TRAINED = 31, 0.8
LAYERS, WIDTH, CONTEXT = 2, 64, 64
TEXT, DOCUMENT = 16_384, 1024
"""Bytes to learn, and of each document; as many documents again are to test on, half of each."""
DOWN_STD = 0.03


@dataclass(frozen=True)
class Task:
    """A network, its symmetries, its data and its budget."""

    name: str
    build: Callable[[], nn.Module]
    gauges: tuple[Gauge, ...]
    learnt: tuple[Tensor, Tensor]
    """Inputs and classes of the examples to learn."""
    unseen: tuple[Tensor, Tensor]
    batch: int
    """Examples of a step; all of them if it is as many."""
    steps: int
    shrink: float
    """Weight decay, as the part of the weights that one step at the full learning rate takes away."""
    pair: tuple[str, str]
    """The linear maps before and after the activation at which rates are read."""
    tuned_on: Literal["unseen", "learnt"] = "unseen"
    """The examples whose loss at the end chooses the learning rate."""


def losses(logits: Tensor, classes: Tensor) -> Tensor:
    """Mean cross-entropy in nats, for logits (..., C) and classes (...)."""
    return F.cross_entropy(logits.flatten(0, -2), classes.flatten())


class Sums(nn.Module):
    """Logits of (a + b) mod p: W_2 ReLU(W_1 [E_a; E_b] + b_1) + b_2."""

    def __init__(self, p: int, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(p, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.up, self.down = nn.Linear(2 * width, hidden), nn.Linear(hidden, p)

    def forward(self, pairs: Tensor) -> Tensor:
        """pairs (n, 2) → (n, p)."""
        logits: Tensor = self.down(F.relu(self.up(self.embedding(pairs).flatten(1))))
        return logits


def modular(
    name: str = "modular",
    steps: int = 1500,
    shrink: float = 2e-3,
    p: int = MODULUS,
    hidden: int = 128,
    share: float = PAIRS_TRAINED,
    seed: int = 0,
) -> Task:
    """All pairs of numbers below p, `share` of them to learn, which ones by `seed`."""
    pairs = torch.cartesian_prod(torch.arange(p), torch.arange(p))
    pairs = pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))]
    sums, many = pairs.sum(1) % p, int(share * len(pairs))
    return Task(
        name,
        lambda: Sums(p, hidden // 4, hidden),
        (ReLURescale("up.weight", "down.weight", bias="up.bias"), CEShiftBias("down.bias")),
        (pairs[:many], sums[:many]),
        (pairs[many:], sums[many:]),
        batch=many,
        steps=steps,
        shrink=shrink,
        pair=("up", "down"),
        tuned_on="unseen" if shrink else "learnt",
    )


def digits(steps: int = 600, hidden: int = 64) -> Task:
    """Images of 8 × 8 numbers from 0 to 1, ten classes."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError(
            "the task digits needs scikit-learn",
            setting="task",
            given="digits",
            remedy="install topograd[studies]",
        ) from None

    result = load_digits()
    order = torch.randperm(len(result.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(result.data / 16, dtype=torch.float32)[order]
    classes = torch.tensor(result.target)[order]
    weights = ["0.weight", "2.weight", "4.weight"]
    return Task(
        "digits",
        lambda: nn.Sequential(
            nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
        ),
        (ChainedReLURescale(weights, ["0.bias", "2.bias"]), CEShiftBias("4.bias")),
        (images[:DIGITS_TRAINED], classes[:DIGITS_TRAINED]),
        (images[DIGITS_TRAINED:], classes[DIGITS_TRAINED:]),
        batch=64,
        steps=steps,
        shrink=0.0,
        pair=("0", "2"),
    )


def gpt(steps: int = 300, width: int = WIDTH, text: int = TEXT) -> Task:
    """Windows of bytes; the documents to learn and to test are different ones."""
    parts = [document.text.encode()[:DOCUMENT] for document in embedded_documents()]
    parts = [part for part in parts if len(part) == DOCUMENT]
    many = text // DOCUMENT
    learnt, unseen = (
        b"".join(parts[::7][:many]),
        b"".join(part[: DOCUMENT // 2] for part in parts[3::7][:many]),
    )
    mlps = [f"layers.{layer}.mlp" for layer in range(LAYERS)]

    def build() -> nn.Module:
        model = GPT(layers=LAYERS, width=width, heads=2, vocab=256, context=CONTEXT)
        for mlp in mlps:
            nn.init.normal_(model.get_parameter(f"{mlp}.down.weight"), std=DOWN_STD)
        return model

    rescalings = (ReLURescale(f"{mlp}.up.weight", f"{mlp}.down.weight", degree=2) for mlp in mlps)
    return Task(
        "gpt",
        build,
        (*rescalings, CEShiftRowShift("head.weight")),
        _windows(learnt),
        _windows(unseen),
        batch=8,
        steps=steps,
        shrink=0.0,
        pair=(f"{mlps[-1]}.up", f"{mlps[-1]}.down"),
    )


def _windows(text: bytes) -> tuple[Tensor, Tensor]:
    """Neighbouring windows (n, CONTEXT), and the byte after each of their bytes."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    many = (len(data) - 1) // CONTEXT
    rows = data[: many * CONTEXT], data[1 : many * CONTEXT + 1]
    return rows[0].view(many, CONTEXT), rows[1].view(many, CONTEXT)


TASKS: dict[str, Callable[[], Task]] = {
    "gpt": gpt,
    "digits": digits,
    "modular": modular,
    "decay": lambda: modular("decay", shrink=4e-3),
    "memorise": lambda: modular("memorise", steps=1000, shrink=0.0),
}
