"""Modules of objectives: ridge in closed form, and slow copies that only follow."""

import torch
import torch.nn.functional as F

from topograd.nn.aux_heads import MOMENTUM, EMACopy, RidgeHead
from topograd.nn.images.config import ImageConfig
from topograd.nn.images.stack import make_image_stack
from topograd.nn.preparation import prepare
from topograd.runs.topology_config import TopologyConfig

CONFIG = ImageConfig(widths=(6, 5), shape=(1, 3, 3), classes=4)


def test_a_ridge_head_is_the_regression_on_all_that_was_seen() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(30, 5, dtype=torch.float64), torch.randint(0, 4, (30,))
    head = RidgeHead(5, 4, forget=1.0, alpha=0.01).double()
    for part in range(3):
        head.add(x[10 * part : 10 * part + 10], y[10 * part : 10 * part + 10])
    ones = F.pad(x, (0, 1), value=1.0)
    rows = torch.cat((ones, (0.01 * 30) ** 0.5 * torch.eye(6, dtype=torch.float64)))
    wanted = torch.cat((F.one_hot(y, 4).double(), torch.zeros(6, 4, dtype=torch.float64)))
    solved = torch.linalg.lstsq(rows, wanted).solution
    torch.testing.assert_close(head.weight, solved)
    torch.testing.assert_close(head(x), ones @ solved)


def test_a_slow_copy_follows_and_does_not_learn() -> None:
    torch.manual_seed(0)
    topology = TopologyConfig(partition="1,1,1", objective="byol").build(3)
    stack = make_image_stack(CONFIG, topology)
    prepare(stack, topology)
    copies = stack.learned_relays()
    assert copies.keys() == {"byol-0", "byol-1"}
    slow = copies["byol-0"]
    assert isinstance(slow, EMACopy)
    assert not any(p.requires_grad for p in slow.target.parameters())
    before = [p.clone() for p in slow.target.parameters()]
    with torch.no_grad():
        for parameter in stack.layers[1].parameters():
            parameter.add_(1)
    stack.after_step()
    for old, new in zip(before, slow.target.parameters(), strict=True):
        torch.testing.assert_close(new, old + (1 - MOMENTUM))
