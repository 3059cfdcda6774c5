"""LoRA that forgets little: adapters held in directions that the old text does not use.

    python examples/safe_adapters.py

A small model learns one text, then a second one through LoRA of rank 4: once with A random and free to move,
once with A held in the *safe* directions of its inputs. The loss on the first text is what it forgot. What
this gains on a real model is in docs/results/2026-11-18-safe-adapters.md; for a run, a Hugging Face folder or
a GGUF file the command `topograd train --lora-directions safe` does all of it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

import topograd as tg

LENGTH, RANK, STEPS = 48, 4, 60
Batch = tuple[Tensor, Tensor]


class LowRank(nn.Module):
    """W + B A, with B zero at first."""

    def __init__(self, weight: Tensor, a: Tensor | None) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.b = nn.Parameter(torch.zeros(rows, RANK))
        start = torch.randn(RANK, columns) / (3 * columns) ** 0.5 if a is None else a.to(weight.dtype)
        self.a = nn.Parameter(start, requires_grad=a is None)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


def windows(text: str) -> Batch:
    """Rows of bytes, and what follows each."""
    ids = torch.tensor(list(text.encode()))
    rows = ids[: len(ids) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    return rows[:, :-1], rows[:, 1:]


def loss(model: nn.Module, text: Batch) -> Tensor:
    return F.cross_entropy(model(text[0]).mT, text[1])


def train(model: nn.Module, text: Batch, rate: float) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate, weight_decay=0.0)
    for _ in range(STEPS):
        loss(model, text).backward()
        optimizer.step()
        optimizer.zero_grad()


def adapt(model: nn.Module, old: Batch, new: Batch, safe: bool) -> None:
    """Learn the new text through LoRA on every map that reads the stream."""
    maps = [name for name, _ in model.named_modules() if name.endswith(("query", "key", "value", "up"))]
    before, behind = (tg.geometry.input_moments(model, maps, [text[0]]) for text in (old, new))
    model.requires_grad_(False)
    for name in maps:
        module = model.get_submodule(name)
        a = tg.geometry.adapter_directions("safe", before[name], behind[name], RANK) if safe else None
        register_parametrization(module, "weight", LowRank(module.get_parameter("weight"), a))
    train(model, new, rate=0.1 if safe else 0.01)


def main() -> dict[str, tuple[float, float]]:
    """By way: how far the loss on the new text fell, and how far that on the old one rose."""
    old = windows("every stage predicts, and no gradient crosses between them. " * 40)
    new = windows("the capital of Ruritania is Strelsau, and its king is Rudolf. " * 8)
    found = {}
    for way in ("plain LoRA", "safe directions"):
        torch.manual_seed(0)
        stack = tg.GPT(layers=3, width=48, heads=3, vocab=256, context=LENGTH)
        model = tg.Predictor(stack, tg.prepare(stack, "3"))
        train(model, old, rate=3e-3)
        was = loss(model, new).item(), loss(model, old).item()
        adapt(model, old, new, safe=way == "safe directions")
        found[way] = was[0] - loss(model, new).item(), loss(model, old).item() - was[1]
    return found


if __name__ == "__main__":
    for way, (learned, forgotten) in main().items():
        print(f"{way}: learned {learned:.2f} nats of the new text, forgot {forgotten:.3f} of the old one")
