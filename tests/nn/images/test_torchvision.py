"""torchvision's networks as stacks: logits bit for bit, and stages of their own blocks."""

import importlib

import pytest
import torch
from torch import Tensor, nn

from raising import refused
from topograd.errors import StackError
from topograd.exec.forward import Predictor
from topograd.exec.train_step import train_step
from topograd.nn.images.torchvision import adapt_torchvision
from topograd.nn.preparation import prepare
from topograd.topology.dag import Topology


class Block(nn.Module):
    """As torchvision's BasicBlock."""

    def __init__(self, taken: int, given: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(taken, given, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(given)
        self.conv2 = nn.Conv2d(given, given, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(given)
        self.relu = nn.ReLU(inplace=True)
        short = nn.Sequential(nn.Conv2d(taken, given, 1, stride, bias=False), nn.BatchNorm2d(given))
        self.downsample = short if stride > 1 or taken != given else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        done: Tensor = self.relu(out)
        return done


class SmallResNet(nn.Module):
    """The modules and the forward of torchvision's ResNet, narrow: for machines without torchvision."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Block(4, 4, 1), Block(4, 4, 1))
        self.layer2 = nn.Sequential(Block(4, 6, 2))
        self.layer3 = nn.Sequential(Block(6, 8, 2))
        self.layer4 = nn.Sequential(Block(8, 8, 1))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(8, 5)
        self.late = late

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return 2 * out if self.late else out


def test_logits_bit_for_bit_and_stages() -> None:
    torch.manual_seed(0)
    model = SmallResNet()
    images = torch.randn(4, 3, 32, 32)
    stack = adapt_torchvision(model, images)
    assert len(stack.layers) == 5
    topology = Topology.chain("2,2,1")
    plan = prepare(stack, topology)
    model.eval()
    with torch.no_grad():
        assert torch.equal(Predictor(stack, plan)(images), model(images))
    model.train()
    losses = train_step(stack, plan, images, torch.tensor([0, 1, 2, 3]))
    assert losses.isfinite().all()
    assert model.fc.weight.grad is not None
    assert model.conv1.weight.grad is not None
    names = dict(stack.named_parameters())
    assert len(names) == len({id(p) for p in names.values()})
    assert "heads.4.weight" in names


def test_own_heads() -> None:
    torch.manual_seed(0)
    stack = adapt_torchvision(SmallResNet())
    topology = Topology.chain("2,3")
    prepare(stack, topology)
    stack.add_heads([0, 1])
    assert stack.has_head(1)
    assert stack.last_stage == 1
    assert len(stack.head_parameters(0)) == 1


def test_what_is_not_torchvisions_is_refused() -> None:
    with refused(StackError, setting="model", given="Linear"):
        adapt_torchvision(nn.Linear(2, 2))
    with refused(StackError, setting="model", given="SmallResNet"):
        adapt_torchvision(SmallResNet(late=True), torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize("name", ["resnet18", "vit_b_16"])
def test_torchvisions_own(name: str) -> None:
    try:
        models = importlib.import_module("torchvision.models")
    except Exception as problem:  # its compiled part may not fit the torch that is here
        pytest.skip(f"torchvision cannot be imported here ({str(problem)[:80]})")
    torch.manual_seed(0)
    side = 64 if name == "resnet18" else 224
    model = getattr(models, name)(weights=None, num_classes=10)
    if name == "vit_b_16":  # its head starts at zero: zeros would agree with anything
        torch.nn.init.normal_(model.heads.head.weight)
    images = torch.randn(1, 3, side, side)
    stack = adapt_torchvision(model, images)
    plan = prepare(stack, Topology.chain("2,3,3" if name == "resnet18" else "4,4,4"))
    model.eval()
    with torch.no_grad():
        assert torch.equal(Predictor(stack, plan)(images), model(images))
