"""Regions on ranks give autograd's gradients in one process, and send what the formulas say."""

import math
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from topograd.interfaces.engines import Scan
from topograd.parallel.ranks import Ranks
from topograd.parallel.region_scan import AHEAD, RegionScan
from topograd.parallel.settings import ParallelConfig
from topograd.runs.checkpoint import load
from topograd.runs.config import OptimizerConfig
from topograd.topology.plan import EdgeOutput
from topograd.training.optimizers import make_optimizers
from topograd.training.step_runner import StepRunner

REGIONS = {"partition": "1,1,1,1,1", "interface": "S=4,r=4"}


@pytest.mark.parametrize(
    ("stages", "replicas", "options"),
    [
        (2, 1, {}),
        (3, 1, {"recompute": True}),
        (4, 1, {}),
        (2, 2, {"jacobian": "pullback"}),
        (2, 1, {"carried": 1}),
        (3, 1, {"carried": 2, "accumulate": 4, "jacobian": "pullback"}),
        (4, 1, {"carried": 3, "accumulate": 1}),
        (3, 1, {"backward": "autograd", "accumulate": 4}),
        (3, 1, {"backward": "autograd", "accumulate": 4, "canvas": 1}),
        (2, 1, {"canvas": 1}),
        (3, 1, {"canvas": 1, "recompute": True, "accumulate": 4}),
        (4, 1, {"canvas": 1, "carried": 2, "jacobian": "pullback"}),
        (2, 2, {"canvas": 1}),
        (2, 2, {"backward": "autograd"}),
        (2, 2, {"accumulate": 1}),
    ],
)
def test_losses_and_weights_are_those_of_autograd(
    stages: int, replicas: int, options: dict[str, Any], launch: Any, server: ModuleType
) -> None:
    world = stages * replicas
    options = {"accumulate": 2} | options
    canvas = options.pop("canvas", 0)
    regions = REGIONS | {"canvas": canvas}
    job = launch(
        "steps",
        world,
        parallel=f"stages={stages},replicas={replicas}",
        topology=regions,
        shape={"layers": 5},
        clip=0.3,
        **options,
    )
    stack, plan = server.model(regions, layers=5)
    made = make_optimizers(stack, OptimizerConfig(name="adamw"), plan)
    loop = StepRunner(stack, made, clip=0.3)
    expected = [loop.step(plan, server.batches(step, options["accumulate"]), step + 1) for step in range(3)]
    results = job.results()
    for result in results:
        for ours, theirs in zip(result["steps"], expected, strict=True):
            assert ours["loss"][-1] == pytest.approx(float(theirs.losses[-1]), abs=1e-12, rel=0)
            assert ours["norm"] == pytest.approx(theirs.norm, rel=1e-10)
    mine, _ = server.model(regions, layers=5)
    load(job.folder / "set" / "step-00000003", mine)
    for (name, a), b in zip(mine.state_dict().items(), stack.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11, msg=name)
    if canvas or "carried" in options or "backward" in options or options["accumulate"] < replicas:
        return  # the formulas are of whole batches and of doubling alone
    n, batch = 3 * 4, 2
    messages = (stages - 1) * batch * n * 8  # bytes of a batch in float64, of all ranks
    rows, matrices = {2: (1, 0), 3: (2, 1), 4: (3, 3)}[stages]  # of all ranks, by hand
    products = batch * n * (rows + matrices * n) * 8
    steps = 3 * 2
    assert sum(result["scanned"] for result in results) == steps * products
    assert sum(result["sent"] for result in results) == steps * messages + replicas * (stages - 1) * 80


def test_with_bf16_they_are_those_of_a_scan_in_one_process(launch: Any, server: ModuleType) -> None:
    """Products and the gather are float32's, so what is left is the order of sums: not bfloat16's 4e-3."""
    shape = {"layers": 5, "double": False}
    options = {"topology": REGIONS, "shape": shape, "accumulate": 1, "count": 1, "bf16": True}
    job = launch("steps", 3, parallel="stages=3", **options)
    stack, plan = server.model(REGIONS, layers=5, double=False)
    made = make_optimizers(stack, OptimizerConfig(name="adamw"), plan)
    done = StepRunner(stack, made, bf16=True, gradient=Scan()).step(plan, server.batches(0, 1))
    for result in job.results():
        assert result["steps"][0]["loss"][-1] == pytest.approx(float(done.losses[-1]), rel=1e-6)
        assert result["steps"][0]["norm"] == pytest.approx(done.norm, rel=1e-6)


class Mailed(RegionScan):
    """A rank whose messages lie in a box: they only go to earlier ranks, so ranks can run last to first."""

    def __init__(self, place: int, ranks: int, box: dict[tuple[int, int, int], Tensor]) -> None:
        super().__init__(ranks=Ranks(place, ParallelConfig(stages=ranks), None, torch.device("cpu")))  # type: ignore[arg-type]
        self.box, self.hops = box, 0

    def _swap(self, sent: Tensor | None, to: int, room: Tensor | None, source: int) -> Tensor | None:
        self.hops += 1
        if sent is not None:
            self.box[self.hops, self.ranks.place, to] = sent
        if room is None:
            return None
        found = self.box.pop((self.hops, source, self.ranks.place))
        assert found.shape == room.shape
        return found


@pytest.mark.parametrize("ranks", range(1, 18))
def test_doubling_gives_every_rank_its_row_in_a_logarithm_of_hops(ranks: int) -> None:
    """Under autocast: products are never rounded to bfloat16."""
    torch.manual_seed(0)
    products, last = torch.randn(ranks, 1, 2, 6, 6) / 6**0.5, torch.randn(2, 6)
    box: dict[tuple[int, int, int], Tensor] = {}
    expected = last.double()
    for place in reversed(range(ranks)):
        scan = Mailed(place, ranks, box)
        late = last if place == ranks - 1 else None
        early: Any = [SimpleNamespace(sent={EdgeOutput(0, 1, "m"): SimpleNamespace(value=torch.zeros(2, 6))})]
        with torch.autocast("cpu", torch.bfloat16):
            found = scan.adjoint_behind(late, products[place].unbind(0), early)
        assert found is not None
        assert found.dtype == torch.float32
        assert (found - expected).norm() < 1e-5 * expected.norm()
        expected = (expected[:, None] @ products[place, 0].double())[:, 0]
        assert scan.hops == (0 if ranks == 1 else 1 + math.ceil(math.log2(ranks - 1)))
    assert not box, "all that is sent is read"


def test_a_rank_waits_for_what_it_receives_and_not_for_what_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer asks for a product when its own scan is there, which may be a micro-batch later."""
    waited: list[str] = []
    ranks = SimpleNamespace(at=lambda place: place)
    ranks.begin = lambda transfer, tensor, peer, what, tag: transfer(tensor, peer, tag=tag)
    ranks.wait = lambda work, what, peer: waited.append(work)
    monkeypatch.setattr("torch.distributed.isend", lambda tensor, peer, tag: f"send to {peer}")
    monkeypatch.setattr("torch.distributed.irecv", lambda tensor, peer, tag: f"receive from {peer}")
    scan = RegionScan(ranks=ranks)  # type: ignore[arg-type]
    product = torch.zeros(1, 2, 2)
    for _ in range(AHEAD):
        scan._swap(product, 0, torch.empty(1, 2, 2), 2)
    assert set(waited) == {"receive from 2"}
    scan._swap(product, 0, None, 2)
    assert waited[-1] == "send to 0", "what is under way is bounded"
    assert scan.scan_bytes == (AHEAD + 1) * 16
