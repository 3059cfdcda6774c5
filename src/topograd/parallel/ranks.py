"""The ranks of a job: joining, agreement on settings, and waits with a timeout.

torchrun tells every process its rank and where the store of the job is. Before anything else the ranks lay
their versions and settings side by side in that store; the first rank that differs is named, once, by rank 0,
and all of them end. After that every wait has a timeout. A rank that gives up writes so to the store, so
that the silent rank is named, and not another one that waits for it in turn.

Ranks are counted replica by replica: rank = replica · P + place, with P the ranks that the stages are dealt
to. On CPUs the backend is gloo, on GPUs NCCL with a GPU for each local rank. NCCL has no tags, and all that
two ranks of a group send each other is one queue, in both directions: there a collective takes the place of a
`Meeting`, and gradients that come back have groups of their own (`transport.py`).
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from topograd.errors import ParallelError
from topograd.files import dump_json
from topograd.parallel.settings import FEW_NUMBERS, ParallelConfig, wait_for_first_rank
from topograd.runs.device import usable_device

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GRACE = 10.0
"""Seconds at most in which ranks that give up as well are waited for, before the silent one is named."""
BEAT = 1.0
"""Seconds between the signs of life of a rank that works long."""
BEATS_PER_LINE = 20
"""Signs of life for each line to a person."""
MEETING = 1 << 20
"""The tag of a `Meeting`'s messages, and the next one; edges have theirs from 1 on (`transport.py`)."""
ADDING = "adding up what ranks share"
READING = 2.0
"""Seconds at most in which rank 0 waits for the others to read why the job ends."""


@dataclass
class Ranks:
    """This process among the others."""

    rank: int
    config: ParallelConfig
    store: dist.Store
    device: torch.device
    replica_group: dist.ProcessGroup | None = None
    """The ranks that have the same stages as this one, where there are several."""
    replica_mesh: dist.DeviceMesh | None = None
    """The same ranks as a mesh of one dimension."""
    waited: float = 0.0
    """Seconds in which this rank waited for others."""
    saves: int = 0
    """Checkpoints that were begun, the same number on every rank."""
    save_group: dist.ProcessGroup | None = None
    """All ranks, with the patience of a slow disk: who has written waits for those that still write."""

    @property
    def tagged(self) -> bool:
        """Whether messages have tags, so that those of one tag need not wait for those of another."""
        return self.device.type == "cpu"

    @property
    def place(self) -> int:
        """Which of the P runs of stages this rank has."""
        return self.rank % self.config.stages

    @property
    def replica(self) -> int:
        return self.rank // self.config.stages

    @property
    def first(self) -> bool:
        """Whether this rank writes the run's log and its results."""
        return self.rank == 0

    def at(self, place: int) -> int:
        """The rank at `place` in this replica."""
        return self.replica * self.config.stages + place

    # Waiting

    def wait(self, work: dist.Work, what: str, peer: int | None = None) -> None:
        """Wait for one transfer; ParallelError names the rank that is gone or silent."""
        began = time.perf_counter()
        try:
            work.wait(timedelta(seconds=self.config.timeout))
        except RuntimeError as error:
            raise ParallelError(self._blame(what, peer, str(error))) from None
        self.waited += time.perf_counter() - began

    def reduce(self, tensor: torch.Tensor, what: str, group: dist.ProcessGroup | None = None) -> None:
        """Add up a tensor over all ranks, or over a group."""
        self.collective(lambda: dist.all_reduce(tensor, group=group, async_op=True), what)

    def new_group(self, members: Sequence[int], what: str) -> dist.ProcessGroup:
        """A group of some ranks; all ranks take part in making it."""
        limit = timedelta(seconds=self.config.timeout)
        group: dist.ProcessGroup = self.collective(partial(dist.new_group, members, limit), what)
        return group

    def begin(
        self,
        transfer: Any,
        tensor: torch.Tensor,
        peer: int,
        what: str,
        tag: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> dist.Work:
        """Begin a transfer (`dist.isend` or `dist.irecv`) with `peer`, to be waited for."""
        try:
            work: dist.Work = transfer(tensor, peer, group=group, tag=tag)
        except RuntimeError as error:
            raise ParallelError(self._blame(what, peer, str(error))) from None
        return work

    def collective(self, call: Any, what: str) -> Any:
        """Run a collective; `call` may return work to wait for."""
        try:
            done = call()
            if isinstance(done, dist.Work):
                began = time.perf_counter()
                done.wait(timedelta(seconds=self.config.timeout))
                self.waited += time.perf_counter() - began
                return None
            return done
        except RuntimeError as error:
            if isinstance(error, ParallelError):
                raise
            raise ParallelError(self._blame(what, None, str(error))) from None

    @contextmanager
    def within(self, what: str) -> Iterator[None]:
        """Within it torch itself talks to other ranks; ParallelError names what is gone or silent."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                raise ParallelError(self._blame(what, None, str(error))) from None
            raise

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """While this rank works long by itself, tell the others (see `follow`) and a person that it lives."""
        done = threading.Event()

        def beat() -> None:
            count = 0
            while not done.wait(BEAT):
                count += 1
                self.store.set(f"alive/{self.rank}", str(count))
                if count % BEATS_PER_LINE == 0:
                    line = f"topograd: rank {self.rank} is still {what} ({count * BEAT:.0f} s)"
                    print(line, file=sys.stderr, flush=True)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def tell(self, name: str, text: str) -> None:
        """Leave a text for those who `follow`."""
        self.store.set(f"told/{name}", text)

    def follow(self, name: str, peer: int, what: str) -> str:
        """The text that `peer` tells; waits as long as that rank lives."""
        seen, since = b"", time.monotonic()
        try:
            while not self.store.check([f"told/{name}"]):
                if self.store.check([f"alive/{peer}"]):
                    beat = self.store.get(f"alive/{peer}")
                    if beat != seen:
                        seen, since = beat, time.monotonic()
                if time.monotonic() - since > self.config.timeout:
                    raise ParallelError(
                        f"rank {peer} did not answer for {self.config.timeout:g} s: rank {self.rank} gave up "
                        f"while {what}"
                    )
                time.sleep(0.02)
            return self.store.get(f"told/{name}").decode()
        except ParallelError:
            raise
        except RuntimeError:
            raise ParallelError(f"the job's store is gone: rank {self.rank} lost it while {what}") from None

    def agree(self, problem: str = "", what: str = "agreeing") -> str:
        """The problem of the first rank that has one; '' if none has. Everybody must call it."""
        flags = torch.zeros(self.config.world, dtype=torch.int32, device=self.device)
        if problem:
            self.store.set(f"problem/{self.rank}", problem)
            flags[self.rank] = 1
        self.reduce(flags, what)
        troubled = flags.nonzero().flatten().tolist()
        if not troubled:
            return ""
        return f"rank {troubled[0]}: {self.store.get(f'problem/{troubled[0]}').decode()}"

    def _blame(self, what: str, peer: int | None, error: str) -> str:
        with suppress(RuntimeError):  # the store is gone with the rank that held it
            self.store.set(f"waited/{self.rank}", "1")
        late = any(word in error.lower() for word in ("timed out", "timeout"))
        if not late:
            who = "a rank" if peer is None else f"rank {peer}"
            return f"{who} is gone: rank {self.rank} lost it while {what}; see its own message"
        silent = self._silent()
        named = silent or ([] if peer is None else [peer])
        who = "rank " + ", ".join(map(str, named)) if named else "no rank"
        return (
            f"{who} did not answer for {self.config.timeout:g} s: rank {self.rank} gave up while {what}; "
            "look there, or allow more with --parallel ...,timeout=SECONDS"
        )

    def _silent(self) -> list[int]:
        """The ranks that wait for no other, and so are waited for."""
        end = time.monotonic() + GRACE
        with suppress(RuntimeError):
            while True:
                silent = [r for r in range(self.config.world) if not self.store.check([f"waited/{r}"])]
                if len(silent) <= 1 or time.monotonic() > end:
                    return silent
                time.sleep(0.05)
        return []


class Meeting:
    """The sum of a vector over some ranks, without a ring: on CPUs, where messages have tags.

    Receives are posted when it is made, at the beginning of a step, so that nothing is asked for at its end.
    Where there are two ranks, or few numbers, each sends all of its own to each other: one latency. Longer
    vectors of W ranks are added up in W parts, a part by each rank, which sends the sum to the others: two
    latencies, and a ring's bytes, 2 (W - 1)/W of the vector. A ring takes 2 (W - 1) hops, and each asks
    before it sends. All add up in the order of ranks: they get the same bits.
    """

    def __init__(self, ranks: Ranks, members: Sequence[int], count: int, dtype: torch.dtype) -> None:
        self.ranks, self.peers = ranks, {i: peer for i, peer in enumerate(members) if peer != ranks.rank}
        self.own, self.count = members.index(ranks.rank), count
        self.parted = len(members) > 2 and count > FEW_NUMBERS
        width = -(-count // len(members)) if self.parted else count
        self.rows = torch.zeros(len(members), width, dtype=dtype, device=ranks.device)
        self.sums = torch.zeros_like(self.rows) if self.parted else self.rows[:0]
        self._coming = self._talk(dist.irecv, self.rows, MEETING)
        self._added = self._talk(dist.irecv, self.sums, MEETING + 1) if self.parted else []
        self.sent_bytes = 0

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """Waits for everybody's."""
        if not self.parted:
            self.rows[self.own] = numbers
            self._meet(self._coming, self.rows[self.own].expand_as(self.rows), MEETING)
            return self.rows.sum(0).to(numbers)
        parts = torch.zeros_like(self.rows)
        parts.view(-1)[: self.count] = numbers
        self.rows[self.own] = parts[self.own]
        self._meet(self._coming, parts, MEETING)
        self.sums[self.own] = self.rows.sum(0)
        self._meet(self._added, self.sums[self.own].expand_as(self.sums), MEETING + 1)
        return self.sums.view(-1)[: self.count].to(numbers)

    def _meet(self, coming: list[tuple[dist.Work, int]], rows: torch.Tensor, tag: int) -> None:
        """Send a row to each of the others, and wait for theirs."""
        for work, peer in [*coming, *self._talk(dist.isend, rows, tag)]:
            self.ranks.wait(work, ADDING, peer)
        self.sent_bytes += len(self.peers) * rows[0].numel() * rows.element_size()

    def _talk(self, call: Any, rows: torch.Tensor, tag: int) -> list[tuple[dist.Work, int]]:
        return [(self.ranks.begin(call, rows[i], peer, ADDING, tag), peer) for i, peer in self.peers.items()]


def join(config: ParallelConfig, facts: Mapping[str, Any], device: str = "cpu") -> Ranks:
    """Enter the job that torchrun made. `facts` must be the same on every rank."""
    missing = [name for name in ENVIRONMENT if name not in os.environ]
    if missing:
        raise ParallelError(
            f"--parallel needs {', '.join(missing)} in the environment",
            remedy=f"start it with: torchrun --nproc-per-node {config.world} -m topograd train ...",
        )
    rank, world = _place()
    if world != config.world:
        replicas = f" and replicas={config.replicas}" if config.replicas > 1 else ""
        _refuse(
            rank,
            f"{world} processes were started, and --parallel stages={config.stages}{replicas} needs "
            f"{config.world}; give torchrun --nproc-per-node {config.world} (times its nodes)",
        )
    where = usable_device(device)
    if where.type == "cuda":
        where = usable_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
        torch.cuda.set_device(where)
    limit = timedelta(seconds=config.timeout)
    store = _store(rank, limit)
    _compare(rank, world, dist.PrefixStore("facts", store), dict(facts), config.timeout)
    dist.init_process_group(
        "nccl" if where.type == "cuda" else "gloo",
        store=dist.PrefixStore("job", store),
        rank=rank,
        world_size=world,
        timeout=limit,
    )
    ranks = Ranks(rank, config, dist.PrefixStore("waits", store), where)
    if config.replicas > 1:
        mesh = dist.init_device_mesh(
            where.type, (config.replicas, config.stages), mesh_dim_names=("replica", "stage")
        )
        ranks.replica_group, ranks.replica_mesh = mesh.get_group("replica"), mesh["replica"]
    return ranks


def _place() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    given = os.environ["RANK"], os.environ["WORLD_SIZE"]
    try:
        rank, world = map(int, given)
    except ValueError:
        rank, world = -1, 0
    if not 0 <= rank < world:
        raise ParallelError(
            f"RANK is {given[0]!r} and WORLD_SIZE {given[1]!r} in the environment",
            remedy="they must be whole numbers, 0 <= RANK < WORLD_SIZE, as torchrun sets them",
        )
    return rank, world


def _store(rank: int, limit: timedelta) -> dist.Store:
    """The store of the job: torchrun's own, or else one that rank 0 holds."""
    held = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = dist.TCPStore(
            address, int(port), is_master=rank == 0 and not held, wait_for_workers=False, timeout=limit
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ParallelError(
            f"rank {rank} cannot reach the job's store at {address}:{port} ({reason})"
        ) from None
    return dist.PrefixStore(f"topograd/{attempt}", store)


def wait_until_read(store: dist.Store, world: int) -> None:
    """Rank 0 may hold the store: those who are there shall read the verdict before it ends."""
    end = time.monotonic() + READING
    while time.monotonic() < end and not all(store.check([f"read/{r}"]) for r in range(1, world)):
        time.sleep(0.01)


def leave() -> None:
    """End the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _compare(rank: int, world: int, store: dist.Store, facts: dict[str, Any], timeout: float) -> None:
    """Compare the facts of all ranks; rank 0 reports a difference, and all end."""
    store.set(str(rank), dump_json(facts))
    if rank == 0:
        verdict = ""
        for other in range(world):
            try:
                theirs = store.get(str(other)).decode()
            except RuntimeError:
                verdict = f"rank {other} did not come within {timeout:g} s; start all of them at one time"
                break
            verdict = _difference(other, dump_json(facts), theirs)
            if verdict:
                break
        store.set("verdict", verdict or "same")
        if verdict:
            wait_until_read(store, world)
            _refuse(rank, verdict)
        return
    try:
        verdict = store.get("verdict").decode()
        store.set(f"read/{rank}", "1")
    except RuntimeError:
        raise ParallelError(
            f"rank 0 did not answer rank {rank} for {timeout:g} s", remedy="see its message"
        ) from None
    if verdict != "same":
        _refuse(rank, verdict)


def _difference(other: int, ours: str, theirs: str) -> str:
    mine, its = json.loads(ours), json.loads(theirs)
    for name in sorted({*mine, *its}):
        if mine.get(name) != its.get(name):
            return (
                f"rank {other} has {name} = {its.get(name)!r} and rank 0 has {mine.get(name)!r}; start every "
                "rank with the same version and the same command"
            )
    return ""


def _refuse(rank: int, message: str) -> NoReturn:
    """One line from one rank; the others end without a word."""
    if rank == 0:
        raise ParallelError(message)
    wait_for_first_rank()
    raise SystemExit(2)
