"""Arms start from the same weights, and a rate is chosen where there are several."""

from dataclasses import replace
from pathlib import Path

import torch

from papers.product_of_experts.image_arms import Arm, Group, best_rate, build, shown, step_memory
from topograd.data.images import read_images
from topograd.nn.images.config import ImageConfig

ARMS = (Arm("backprop", {"partition": "3"}), Arm("flat", {"partition": "1,1,1"}))
GROUP = Group(
    name="mlp", network=ImageConfig(widths=(12, 9)), steps=25, batch=16, rates=(0.0, 0.03), arms=ARMS
)


def test_arms_start_alike_and_the_better_rate_is_taken(idx_folder: Path) -> None:
    data = read_images(idx_folder)
    one, two = (build(GROUP, arm, data, 0)[0] for arm in ARMS)
    for a, b in zip(one.layers.parameters(), two.layers.parameters(), strict=True):
        assert torch.equal(a, b)
    assert best_rate(GROUP, ARMS[0], data) == 0.03
    assert best_rate(replace(GROUP, rates=(0.5,)), ARMS[0], data) == 0.5


def test_memory_of_a_step_is_that_of_the_largest_stage(idx_folder: Path) -> None:
    data = read_images(idx_folder)
    group = replace(GROUP, network=ImageConfig(network="resnet14", widths=(4, 4, 4)))
    whole, cut = (
        step_memory(*build(group, Arm("", {"partition": p}), data, 0), data, 16) for p in ("6", "1,1,1,1,1,1")
    )
    assert cut < 0.7 * whole


def test_numbers_as_text() -> None:
    assert shown([0.5]) == "50.00"
    assert shown([0.5, 0.5]) == "50.00 ± 0.00"
