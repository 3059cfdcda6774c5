"""A stack of your own: a small convolutional network that learns in two stages which way stripes run."""

import torch
from torch import Tensor, nn

import topograd as tg


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, kernel_size=3, stride=2, padding=1)

    def forward(self, h: Tensor, bus: tg.Bus) -> Tensor:
        return self.convolution(h).relu()  # half the size: shapes may change from layer to layer


class ConvStack(tg.Stack):
    def __init__(self, layers: int = 4, width: int = 8, classes: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(1, width, kernel_size=3, padding=1)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        return self.embedding(inputs)

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        logits = self.head(h.mean((-2, -1)))
        return logits if rows is None else logits[..., rows]


def stripes(count: int) -> tuple[Tensor, Tensor]:
    """Noisy striped images (count, 1, 16, 16), and for each whether its stripes are vertical."""
    waves = torch.sin(1.5 * torch.arange(16) + 6.3 * torch.rand(count, 1)).view(count, 1, 16, 1)
    vertical = torch.rand(count) < 0.5
    images = torch.where(vertical.view(count, 1, 1, 1), waves.mT, waves)
    return images + 0.5 * torch.randn(count, 1, 16, 16), vertical.long()


def main(steps: int = 60) -> list[float]:
    """Train; return the share of new images that each stage gets right."""
    torch.manual_seed(0)
    stack, topology = ConvStack(), tg.Topology.chain("2,2")
    plan = tg.prepare(stack, topology)
    optimizer = torch.optim.Adam(stack.parameters(), lr=0.01)
    for _ in range(steps):
        tg.train_step(stack, topology, *stripes(64))
        optimizer.step()
        optimizer.zero_grad()
    images, labels = stripes(256)
    hidden = tg.stage_outputs(stack, plan, images, stages=[0, 1])
    return [(stack.readout(h, k).argmax(-1) == labels).float().mean().item() for k, h in hidden.items()]


if __name__ == "__main__":
    print("right answers by stage:", main())
