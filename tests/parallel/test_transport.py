"""What goes over the wire: activations forward, nothing back, rounded if one asks for it."""

from types import ModuleType
from typing import Any

import pytest


def test_a_rank_keeps_its_own_stages_and_sends_activations_only(launch: Any, server: ModuleType) -> None:
    job = launch("steps", 2, parallel="stages=2", topology={"partition": "2,2"})
    first, last = job.results()
    whole = len(list(server.model({"partition": "2,2"})[0].parameters()))
    assert first["kept"] < whole
    assert last["kept"] < whole
    message = 2 * server.SHAPE["context"] * server.SHAPE["width"] * 8
    header = 10 * 8
    assert first["sent"] == 9 * message + header  # 3 steps of 3 batches
    assert last["sent"] == 0


def test_a_narrow_wire_rounds_what_later_stages_hear(launch: Any, server: ModuleType) -> None:
    topology = {"partition": "2,2", "bus": "detached", "heads": "own"}
    exact = launch("steps", 2, parallel="stages=2", topology=topology, shape={"x0_blend": False}).results()[
        0
    ]["steps"]
    for kind, size, bound in (("bf16", 2, 2e-2), ("int8", 1 + 4 / 16, 2e-2)):
        job = launch(
            "steps", 2, parallel=f"stages=2,wire={kind}", topology=topology, shape={"x0_blend": False}
        )
        results = job.results()
        for ours, theirs in zip(results[0]["steps"], exact, strict=True):
            assert ours["loss"][0] == theirs["loss"][0]  # the first stage does not notice
            assert ours["loss"][1] == pytest.approx(theirs["loss"][1], abs=bound)
            assert ours["loss"][1] != theirs["loss"][1]
        numbers = 9 * 2 * server.SHAPE["context"] * server.SHAPE["width"]
        assert results[0]["sent"] == numbers * size + 80


@pytest.mark.parametrize("parallel", ["stages=2,timeout=20", "stages=4,replicas=2,timeout=20"])
def test_gradients_come_back_where_two_ranks_have_one_queue(parallel: str, launch: Any) -> None:
    """As NCCL has it, without tags: what comes back has groups of its own; the losses are the same bits."""
    given = {"parallel": parallel, "topology": {"graph": "stages", "stages": "mixed"}, "accumulate": 4}
    world = 8 if "replicas" in parallel else 2
    tagged, queued = (
        launch("steps", world, untagged=untagged, **given).results() for untagged in (False, True)
    )
    assert [rank["steps"] for rank in queued] == [rank["steps"] for rank in tagged]
