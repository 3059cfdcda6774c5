"""torch's pipeline gives the loss and the gradients of our own, rank by rank."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file


@pytest.mark.parametrize(("schedule", "world"), [("gpipe", 2), ("1f1b", 4)])
def test_the_peer_equals_our_own_schedule(schedule: str, world: int, launch: Any) -> None:
    ours, theirs = (
        launch("backprop", world, parallel=f"stages={world}", schedule=schedule, peer=peer)
        for peer in (False, True)
    )
    mine, its = ours.results(), theirs.results()
    assert its[-1]["loss"] == pytest.approx(mine[-1]["loss"], rel=1e-12)
    assert mine[-1]["loss"] > 1.0
    for rank in range(world):
        assert its[rank]["sent"] == mine[rank]["sent"]
        own, peer = (load_file(job.folder / f"{rank}.safetensors") for job in (ours, theirs))
        assert own.keys() == peer.keys()
        for name, gradient in own.items():
            torch.testing.assert_close(peer[name], gradient, rtol=1e-10, atol=1e-12, msg=name)
