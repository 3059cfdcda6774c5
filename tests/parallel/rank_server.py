"""A process that has loaded torch once, and for each line on stdin forks the ranks of a small job.

A line is JSON: {"job", "ranks": [...], "world", "port", "folder", "arguments"}. Every rank runs the job with
the environment that torchrun would give it, and leaves its result in `folder`/RANK.json; what it prints is in
RANK.out and RANK.err. The answer to the line is the list of process ids.
"""

import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers and FSDP2 load it: here once, and not in every rank
import torch.distributed as dist
import torch.distributed.run as run_module
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.launcher.api import elastic_launch

import topograd.cli.train_on_ranks  # noqa: F401
import topograd.parallel.ranks as ranks_module
from pipeline_settings import PipelineSettings
from pipeline_worker import measure
from plain_schedules import BackpropPipeline
from topograd.cli.main import main
from topograd.exec.objectives import objectives_of, uses_prior
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.parallel import checkpoint_set
from topograd.parallel.checkpoint_set import SetStore
from topograd.parallel.launch import is_restart
from topograd.parallel.layout import Layout, keep_own
from topograd.parallel.rank_task import RankTask
from topograd.parallel.ranks import Ranks, join, leave
from topograd.parallel.region_scan import RegionScan
from topograd.parallel.settings import ParallelConfig
from topograd.parallel.sharding import part_shards, shard_layers
from topograd.parallel.stage_loop import StageLoop
from topograd.parallel.transport import MeshTransport
from topograd.runs.config import OptimizerConfig
from topograd.runs.topology_config import TopologyConfig
from topograd.topology.dag import EMBEDDING, Edge, Stage
from topograd.training.optimizers import make_optimizers
from topograd.training.trainer import Trainer
from torch_schedules import TorchPipeline

SHAPE = {"width": 16, "heads": 2, "vocab": 23, "context": 8}
MIXED = (
    Stage(0, 1, (Edge(EMBEDDING, grad_scale=1.0),)),
    Stage(1, 2, (Edge(0, grad_scale=1.0),)),
    Stage(2, 3, (Edge(1, grad_scale=1.0, delay=1, grad_bits=8), Edge(0, grad_scale=0.5)), weight=0.0),
    Stage(3, 4, (Edge(2, grad_scale=0.7), Edge(0, grad_scale=0.3, delay=2))),
)
"""Late stages that hear one another without delay, a stage without a loss, and edges over several ranks."""
Job = Callable[..., Any]
JOBS: dict[str, Job] = {}


def job(function: Job) -> Job:
    JOBS[function.__name__] = function
    return function


def batches(step: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """The same everywhere."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(0, SHAPE["vocab"], (count, 2, SHAPE["context"] + 1), generator=generator)
    return [(row[:, :-1], row[:, 1:]) for row in rows]


def model(topology: dict[str, Any], double: bool = True, **shape: Any) -> tuple[GPT, Any]:
    """A model that is the same everywhere, in float64, with random weights where zeros would hide things."""
    torch.manual_seed(0)
    words: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in topology.items()}
    if words.get("stages") == "mixed":
        words["stages"] = MIXED
    config = TopologyConfig(**words)
    layers, tied = shape.pop("layers", 4), shape.pop("tied", False)
    stack = GPT(**(SHAPE | {"layers": config.build(layers).layers} | shape))
    if tied:
        stack.head.weight = stack.embedding.weight
    plan = prepare(stack, config.build(layers))
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return stack.double() if double else stack, plan


@contextlib.contextmanager
def joined(parallel: str, **facts: Any) -> Iterator[Ranks]:
    ranks = join(ParallelConfig.parse(parallel), facts)
    try:
        yield ranks
    finally:
        leave()


def stage_loop(ranks: Ranks, stack: GPT, plan: Any, optimizer: str = "adamw", **options: Any) -> StageLoop:
    prior = any(map(uses_prior, objectives_of(plan)))
    crossing = plan.topology.interface is not None and options.pop("backward", "scan") == "scan"
    layout = Layout.of(plan, ranks.config.stages, with_prior=prior, stack=stack, crossing=crossing)
    keep_own(stack, layout, ranks.place)
    if ranks.config.shard:
        shard_layers(stack, layout, ranks)
    made = make_optimizers(stack, OptimizerConfig(name=optimizer), plan)
    part_shards(made)
    if crossing:
        carried = options.pop("carried", 0)
        options["gradient"] = RegionScan(
            options.pop("jacobian", "loop"), carried=carried, ranks=ranks, owners=layout.owners
        )
    transport = MeshTransport(ranks, layout)
    return StageLoop(stack, made, ranks=ranks, layout=layout, transport=transport, **options)


class QueuedWork:
    """A transfer in a queue."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def wait(self, limit: timedelta) -> None:
        try:
            self.future.result(limit.total_seconds())
        except FutureTimeout:
            raise RuntimeError("timed out") from None


def one_queue_per_pair() -> None:
    """Transfers as in NCCL: without tags, those of two ranks in a group one after the other, both ways."""
    queues: dict[tuple[int, int], ThreadPoolExecutor] = {}
    for name in ("irecv", "isend"):
        real = getattr(dist, name)

        def queued(row: Tensor, peer: int, group: Any, tag: int, real: Any = real) -> Any:
            queue = queues.setdefault((peer, id(group)), ThreadPoolExecutor(1))
            return QueuedWork(queue.submit(lambda: real(row, peer, group=group).wait()))

        vars(dist)[name] = queued
    Ranks.tagged = property(lambda self: False)  # type: ignore[assignment,method-assign]


@job
def meeting(parallel: str, count: int, folder: str = "") -> dict[str, Any]:
    """One sum over all ranks, and every message that it takes."""
    with joined(parallel) as ranks:
        calls: list[tuple[str, int, int]] = []
        for name in ("irecv", "isend"):
            real = getattr(dist, name)

            def noted(
                row: Tensor, peer: int, tag: int, group: Any, name: str = name, real: Any = real
            ) -> Any:
                calls.append((name, row.numel() * row.element_size(), tag))
                return real(row, peer, group=group, tag=tag)

            vars(dist)[name] = noted
        made = ranks_module.Meeting(ranks, range(ranks.config.world), count, torch.float32)
        posted = len(calls)
        numbers = torch.randn(count, generator=torch.Generator().manual_seed(ranks.rank))
        total = made.sum(numbers)
        sent = [(size, tag) for name, size, tag in calls if name == "isend"]
        assert sum(name == "irecv" for name, *_ in calls) == posted
        return {
            "numbers": numbers.tolist(),
            "sum": total.tolist(),
            "posted": posted,
            "sent": [size for size, _ in sent],
            "sent_bytes": made.sent_bytes,
            "turns": len({tag for _, tag in sent}),
        }


@job
def steps(
    parallel: str, topology: dict[str, Any], folder: str, accumulate: int = 3, count: int = 3, **options: Any
) -> dict[str, Any]:
    """Some steps of training; saves a set, and returns the losses of all stages."""
    shape = options.pop("shape", {})
    broken, slow = options.pop("broken", None), options.pop("slow", {})
    if options.pop("untagged", False):
        one_queue_per_pair()
    with joined(parallel) as ranks:
        stack, plan = model(topology, **shape)
        if broken is not None:
            with torch.no_grad():
                next(stack.layers[broken].parameters()).fill_(float("inf"))
        loop = stage_loop(ranks, stack, plan, **options)
        found = []
        for step in range(count):
            time.sleep(slow.get(str(ranks.rank), 0.0))
            done = loop.step(plan, batches(step, accumulate), step + 1)
            found.append({"loss": done.losses.tolist(), "norm": done.norm, "halted": list(done.halted)})
        store = SetStore(Path(folder) / "set", ranks)
        store.save(step=count, model=stack, optimizers=loop.optimizers.optimizers, extra={}, keep=1)
        kept = sum(not p.is_meta for p in stack.parameters())
        scanned = getattr(loop.gradient, "scan_bytes", 0)
        sizes = {"sent": loop.transport.sent_bytes, "added": loop.exchanged_bytes, "kept": kept}
        sizes |= {"scanned": scanned}
        return {"steps": found, "waited": ranks.waited, **sizes}


@job
def saving(parallel: str, folder: str) -> int:
    """A set is saved over an older one, twice; keeps what a kill before each operation would leave."""
    with joined(parallel) as ranks:
        stack, plan = model({"partition": "2,2"})
        loop = stage_loop(ranks, stack, plan)
        store = SetStore(Path(folder) / "set", ranks)

        def save(step: int) -> None:
            store.save(step=step, model=stack, optimizers=loop.optimizers.optimizers, extra={}, keep=1)

        loop.step(plan, batches(0, 2), 1)
        save(1)
        loop.step(plan, batches(1, 2), 2)
        place = Path(folder) / f"kills-{ranks.rank}"
        with copied_before_every_operation(store.folder, place) as copies:
            save(2)
            save(2)
        return len(copies)


@contextlib.contextmanager
def copied_before_every_operation(folder: Path, place: Path) -> Iterator[list[Path]]:
    """Copies of a folder before each operation of this process on a file."""
    names = ("mkdir", "rename", "remove", "rmdir", "truncate", "scandir", "listdir")
    audited = {"open", *(f"os.{name}" for name in names)}
    copies: list[Path] = []
    busy = threading.Lock()  # the copy's own operations do not count

    def hook(event: str, _: tuple[Any, ...]) -> None:
        if event in audited and busy.acquire(blocking=False):
            copies.append(Path(shutil.copytree(folder, place / str(len(copies)))))
            busy.release()

    sys.addaudithook(hook)
    yield copies
    busy.acquire()  # for good: a hook cannot be removed


@job
def slow_disk(parallel: str, folder: str) -> str:
    """Rank 1 writes and rank 0 finishes a set in more time than any rank may keep another waiting."""
    with joined(parallel) as ranks:
        stack, plan = model({"partition": "2,2"})
        loop = stage_loop(ranks, stack, plan)
        ranks_module.BEAT, ranks_module.BEATS_PER_LINE = 0.1, 10
        if ranks.first:
            finish = checkpoint_set.put_in_place

            def slow(*words: Any) -> Any:
                time.sleep(3.0)
                return finish(*words)

            vars(checkpoint_set)["put_in_place"] = slow
        else:
            write = checkpoint_set.dcp.HuggingFaceStorageWriter.write_data

            def slow_write(*words: Any) -> Any:
                time.sleep(3.0)
                return write(*words)

            setattr(checkpoint_set.dcp.HuggingFaceStorageWriter, "write_data", slow_write)  # noqa: B010
        ranks.agree()  # everybody is here
        ranks.config = replace(ranks.config, timeout=2.0)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2.0))
        store = SetStore(Path(folder) / "set", ranks)
        return store.save(step=1, model=stack, optimizers=loop.optimizers.optimizers, extra={}, keep=1)


@job
def cli(argv: list[str], gate: tuple[int, str] | None = None, folder: str = "") -> int:
    """A command of the program, as `torchrun -m topograd` would run it.

    With a gate, a step and a file, it trains no further than to that step before the file is there: whoever
    wants to kill it is never too late.
    """
    if gate is not None:
        wait_at(gate[0], Path(gate[1]))
    return main(argv)


def wait_at(last: int, gate: Path) -> None:
    """From here on, training waits after a step for a file."""
    before = Trainer._one_step

    def one_step(trainer: Trainer) -> list[float]:
        while trainer.step >= last and not gate.exists():
            time.sleep(0.005)
        return before(trainer)

    Trainer._one_step = one_step  # type: ignore[method-assign,assignment]


@job
def cli_with_a_late_rank(argv: list[str], rank: int, gone: str, folder: str = "") -> int:
    """The same, but one rank begins to train only when what matches a pattern in a folder is gone."""
    spread = RankTask.spread

    def late(task: RankTask) -> None:
        while task.ranks.rank == rank and list(task.run.checkpoints.glob(gone)):
            time.sleep(0.005)
        spread(task)

    RankTask.spread = late  # type: ignore[method-assign,assignment]
    return main(argv)


@job
def cli_with_small_files(argv: list[str], rank: int, folder: str = "") -> int:
    """The same, but one rank cannot write more than a few kilobytes: as on a full disk."""
    if os.environ["RANK"] == str(rank):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    return main(argv)


@job
def torchrun(flags: list[str], argv: list[str], last: int, folder: str) -> str:
    """torchrun itself, but for its ranks: they are forked, so that none of them costs an import.

    They train no further than to step `last` before they have been started again.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    vars(run_module)["elastic_launch"] = lambda config, entrypoint: elastic_launch(config, forked_rank)
    os.environ |= {"RANK_FOLDER": folder, "LAST": str(last)}
    run_module.main([*flags, "--start-method", "fork", "-m", "topograd", *argv])
    return "ended"


def forked_rank(*words: str) -> None:
    """What `python -m topograd` does under torchrun; leaves its process id."""
    Path(os.environ["RANK_FOLDER"], f"{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    if not is_restart():
        wait_at(int(os.environ["LAST"]), Path("/nowhere"))
    code = main(list(words[words.index("topograd") + 1 :]))
    if code:
        raise SystemExit(code)


@job
def backprop(parallel: str, schedule: str, peer: bool = False, folder: str = "") -> dict[str, Any]:
    """Gradients of backprop over a pipeline, our own or torch's; each rank leaves its own."""
    with joined(parallel) as ranks:
        stack, _ = model({"partition": "4"})
        each = 4 // ranks.config.stages
        layers = range(ranks.place * each, (ranks.place + 1) * each)
        loss: Any = lambda h, y: F.cross_entropy(stack.readout(h, 0).flatten(0, 1), y.flatten())  # noqa: E731
        kind = TorchPipeline if peer else BackpropPipeline
        pipeline = kind(stack, layers, ranks.place, ranks.config.stages, loss)
        total = pipeline.step(batches(0, 4), schedule)
        found = {n: p.grad for n, p in stack.named_parameters() if p.grad is not None}
        save_file({n: g.contiguous() for n, g in found.items()}, Path(folder) / f"{ranks.rank}.safetensors")
        return {"loss": float(total), "sent": pipeline.sent_bytes}


@job
def bench(settings: dict[str, Any], folder: str = "") -> Any:
    """One rank of `bench pipeline`."""
    with joined("stages=2") as ranks:
        return measure(PipelineSettings(**settings), ranks)


@job
def stalled(parallel: str, rank: int, seconds: float, folder: str = "") -> None:
    """One rank says nothing any more; the others must name it after so many seconds."""
    ranks_module.GRACE = 300.0  # however late another one gives up
    with joined(parallel) as ranks:
        stack, plan = model({"partition": "1,1,2"})
        loop = stage_loop(ranks, stack, plan)
        loop.step(plan, batches(0, 1))
        if ranks.rank == rank:
            signal.pause()
        begin = loop.transport.begin

        def later(*words: Any) -> None:
            """The one behind it gives up first: else it would find this one gone."""
            behind = range(ranks.rank + 1, ranks.config.world)
            ranks.store.set(f"posted/{ranks.rank}", "1")
            while not all(ranks.store.check([f"posted/{rank}"]) for rank in range(1, ranks.config.world)):
                time.sleep(0.005)
            while behind and not ranks.store.check([f"waited/{behind[0]}"]):
                time.sleep(0.005)
            begin(*words)

        loop.transport.begin = later  # type: ignore[method-assign,assignment]
        ranks.config = replace(ranks.config, timeout=seconds)
        loop.step(plan, batches(1, 1))


def run_rank(order: dict[str, Any], rank: int) -> None:
    """What a forked process does; never returns."""
    folder = Path(order["folder"])
    code = 1
    try:
        for name, number in (("stdout", 1), ("stderr", 2)):
            file = open(folder / f"{rank}.{name[3:]}", "w")  # noqa: SIM115
            os.dup2(file.fileno(), number)
            setattr(sys, name, file)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(order["world"]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(order["port"]),
        }
        torch.set_num_threads(1)
        result = JOBS[order["job"]](**order["arguments"], folder=str(folder))
        code = result if order["job"].startswith("cli") else 0
        (folder / f"{rank}.json").write_text(json.dumps(result))
    except BaseException as error:
        traceback.print_exc()
        (folder / f"{rank}.error").write_text(f"{type(error).__name__}: {error}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        pids = []
        for rank in order["ranks"]:
            pid = os.fork()
            if not pid:
                run_rank(order, rank)
            pids.append(pid)
        print(json.dumps(pids), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    serve()
