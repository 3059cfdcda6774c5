"""Stages over ranks against one process and against backprop over the same ranks.

    python benchmarks/pipeline_ways.py [--ranks 2] [--microbatches 8] [--mbit 100] [--json]
    topograd bench pipeline ...                    the same, in a clone

The ranks are processes of this machine with one thread each (`pipeline_worker.py`), and every way takes turns
in the same processes. With `mbit`, each rank lives in a network namespace of its own, and the links between
them are shaped by the kernel's token bucket (`tc ... tbf`), each way by itself; with `latency` too, by a
switch in user space (`slow_links.py`). That needs root; nothing outside these namespaces is touched, and they
are removed at the end.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from pipeline_settings import BITS, PipelineSettings
from simulator import Machine, Times, Work, simulate_step
from topograd.cli.console import DASH, Json, note, number, out, print_json
from topograd.errors import ConfigError, ParallelError
from topograd.exec.thin import packed_shape
from topograd.timing import Spread, ratio
from topograd.topology.pipeline import backprop_bubble, staged_bubble

GOALS = {"single": 1.7, "backprop": 1.15, "backprop_at_10_mbit": 3.0}
BACKPROP = ("gpipe", "1f1b", "torch-gpipe", "torch-1f1b")
"""Backprop over a pipeline: two schedules of our own, and torch's."""
STAGED = ("staged", "staged-bf16", "staged-int8", "free", "free-int8")
CROSSING = ("whole", "thin", "late", "thin-late", "thin-late-int8")
"""Stages between which gradient passes, at once or late, as it is or in few bits."""
MAIN = {"staged": "staged", "thin": "thin", "late": "late", "thin_late": "thin-late"}
"""What stands beside `backprop`, with the names of the ways."""
WORKER = Path(__file__).with_name("pipeline_worker.py")
SWITCH = Path(__file__).with_name("slow_links.py")
_LIMIT = 600.0
"""Seconds after which the ranks are ended."""


def bench_pipeline(settings: PipelineSettings) -> dict[str, Any]:
    """Throughput, bubbles and bytes of every way."""
    known = (*STAGED, *CROSSING, *BACKPROP, "data")
    strange = [name for name in settings.ways if name not in known]
    if strange or (settings.ways and not set(BACKPROP).intersection(settings.ways)):
        given = strange[0] if strange else ", ".join(settings.ways)
        raise ConfigError(f"--ways has {given}; choose from {', '.join(known)}, one of them backprop's")
    found = run_ranks(settings, [sys.executable, str(WORKER), json.dumps(asdict(settings))])
    rounds = found.pop("parts")
    seconds = {name: row["seconds"] for name, row in found.items()}
    plain = [name for name in BACKPROP if name in seconds]
    backprop = min(plain, key=lambda name: Spread.of(seconds[name]).median)
    ways = {name: _row(name, seconds, found) for name in found if name != "single"}
    return {
        "settings": asdict(settings),
        "backprop": ways[backprop] | {"schedule": backprop},
        **{key: ways[name] for key, name in MAIN.items() if name in ways},
        "bytes": {name: row["bytes"] for name, row in found.items() if name != "single"},
        "ways": ways,
        "single_seconds": Spread.of(seconds["single"]).as_dict(),
        "parts": {name: Spread.of([row[name] for row in rounds]).median for name in rounds[0]},
        "ratios": {
            f"{name} over {peer}": ratio(seconds, peer, name).as_dict()
            for name in (*STAGED, *CROSSING)
            for peer in (*BACKPROP, "data")
            if name in seconds and peer in seconds
        },
        "closed_forms": {
            "staged": staged_bubble(settings.ranks, 2 * settings.microbatches),
            "backprop": backprop_bubble(settings.ranks, 2 * settings.microbatches),
        },
        "simulated": _simulated(settings, rounds, seconds),
        "goals": GOALS,
    }


def _row(name: str, seconds: dict[str, list[float]], found: dict[str, Any]) -> dict[str, Any]:
    gain = ratio(seconds, "single", name)
    row = found[name]
    return {
        "throughput_ratio_vs_single": gain.median,
        "spread": gain.as_dict(),
        "bubble": row["bubble"]["median"],
        "bubble_by_rank": row["bubble_by_rank"],
        "seconds": Spread.of(seconds[name]).as_dict(),
        "bytes": row["bytes"],
    }


def _simulated(
    settings: PipelineSettings, rounds: list[dict[str, float]], seconds: dict[str, list[float]]
) -> dict[str, Any]:
    """What the simulator says of the same ranks, from each round's parts, beside what that round measured."""
    rows = {}
    for name in (name for name in SIMULATED if name in seconds):
        works = [work_of(settings, parts, name) for parts in rounds]
        method = name.removesuffix("-int8")
        said = [simulate_step(method, settings.ranks, work).seconds for work in works]
        off = ratio({"said": said, "measured": seconds[name]}, "said", "measured")
        rows[name] = {
            "seconds": Spread.of(said).median,
            "measured": Spread.of(seconds[name]).median,
            "off": off.median - 1,
        }
    return rows


SIMULATED = ("staged", "gpipe", "1f1b", "data", *CROSSING)
"""The ways that the simulator knows."""


def work_of(settings: PipelineSettings, parts: dict[str, float], way: str = "staged") -> Work:
    """What was measured, as the simulator takes it; GPipe holds all M graphs, and late stages do."""
    held = way == "gpipe" or "late" in way
    head = settings.vocab * settings.width * 4.0
    shared = 2 * head if settings.x0_blend or way == "data" else 0.0
    stage = settings.layers // settings.ranks * 12 * settings.width**2 * 4.0
    positions = settings.batch * settings.context
    message = 4.0 * positions * settings.width
    forward = positions * (4.0 + settings.width) if way.endswith("int8") else message
    thin = float(math.prod(packed_shape((positions, settings.width), BITS)))
    on_wire = max(parts["message"] - parts["latency"], 1e-9)
    mbit = min(max(8e-6 * message / on_wire, 1e-6), 1e12)
    return Work(
        microbatches=settings.microbatches,
        message=forward,
        thin=thin,
        shared=shared,
        head=head,
        stage=stage,
        times=Times(
            forward=parts["held_forward" if held else "forward"],
            backward=parts["held_backward" if held else "backward"],
            head=parts["head"],
            embed=parts["embed"],
            optimizer=parts["optimizer"],
            rounding=parts["rounding"],
            copies=parts["copies"],
        ),
        machine=Machine(mbit=settings.mbit or mbit, latency=parts["latency"], cores=os.cpu_count() or 1),
    )


# The ranks


def run_ranks(settings: PipelineSettings, command: list[str], seconds: float = _LIMIT) -> dict[str, Any]:
    """Run a command on every rank, over the links of the settings; returns the JSON that rank 0 prints."""
    host = "127.0.0.1" if settings.mbit is None else _address(0)
    port, ranks = _free_port(), []
    with _places(settings) as prefixes:
        for rank, prefix in enumerate(prefixes):
            more: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": settings.ranks}
            more |= {"OMP_NUM_THREADS": 1, "MASTER_ADDR": host, "MASTER_PORT": port}
            more["GLOO_SOCKET_IFNAME"] = "lo" if settings.mbit is None else f"rank{rank}"
            environment = os.environ | {name: str(value) for name, value in more.items()}
            pipe = subprocess.PIPE
            started = subprocess.Popen(
                [*prefix, *command], env=environment, stdout=pipe, stderr=pipe, text=True
            )
            ranks.append(started)
        try:
            outputs = [process.communicate(timeout=seconds) for process in ranks]
        except subprocess.TimeoutExpired:
            remedy = "ask for fewer rounds or steps"
            raise ParallelError(f"the ranks did not end within {seconds:g} s; {remedy}") from None
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
    for rank, process in enumerate(ranks):
        if process.returncode:
            last = (outputs[rank][1].strip().splitlines() or ["no message"])[-1]
            raise ParallelError(f"rank {rank} ended with code {process.returncode}: {last}")
    found: dict[str, Any] = json.loads(outputs[0][0].strip().splitlines()[-1])
    return found


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _address(rank: int) -> str:
    return f"10.77.{rank // 250}.{rank % 250 + 1}"


@contextmanager
def _places(settings: PipelineSettings) -> Iterator[list[list[str]]]:
    """What to put before a rank's command: nothing, or the namespace that it runs in."""
    if settings.mbit is None:
        yield [[] for _ in range(settings.ranks)]
        return
    tag = secrets.token_hex(2)
    spaces = [f"topograd-{tag}-{rank}" for rank in range(settings.ranks)]
    hub = f"topograd-{tag}-hub"
    links = _bridged(settings, spaces, hub) if settings.latency is None else _switched(settings, spaces)
    try:
        with links:
            yield [["ip", "netns", "exec", space] for space in spaces]
    finally:
        for space in (*spaces, hub):
            with suppress(OSError):
                subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


@contextmanager
def _switched(settings: PipelineSettings, spaces: list[str]) -> Iterator[None]:
    """Links with a latency: devices of a process that hands frames over in time."""
    for space in spaces:
        _ip("netns", "add", space)
    words = [sys.executable, str(SWITCH), str(settings.mbit), str(settings.latency), *spaces]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as switch:
        assert switch.stdout is not None
        assert switch.stderr is not None
        try:
            if switch.stdout.readline().strip() != "ready":
                last = (switch.stderr.read().strip().splitlines() or ["no reason given"])[-1]
                remedy = "run it as root, or leave it out"
                raise ConfigError(f"--latency cannot make a link here ({last}); {remedy}")
            for rank, space in enumerate(spaces):
                _up(space, rank)
            yield
        finally:
            switch.kill()


def _up(space: str, rank: int) -> None:
    """Give a rank's device its address."""
    _ip("-n", space, "addr", "add", f"{_address(rank)}/16", "dev", f"rank{rank}")
    _ip("-n", space, "link", "set", f"rank{rank}", "up")
    _ip("-n", space, "link", "set", "lo", "up")


@contextmanager
def _bridged(settings: PipelineSettings, spaces: list[str], hub: str) -> Iterator[None]:
    """Links of a bandwidth: pairs of the kernel's devices on one bridge."""
    _ip("netns", "add", hub)
    _ip("-n", hub, "link", "add", "hub", "type", "bridge")
    _ip("-n", hub, "link", "set", "hub", "up")
    for rank, space in enumerate(spaces):
        _ip("netns", "add", space)
        pair = ("link", "add", f"rank{rank}", "netns", space, "type", "veth")
        _ip(*pair, "peer", f"port{rank}", "netns", hub)
        _ip("-n", hub, "link", "set", f"port{rank}", "master", "hub", "up")
        _up(space, rank)
        shape = ("tbf", "rate", f"{settings.mbit}mbit", "burst", "32kb", "latency", "500ms")
        _command("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", f"rank{rank}", "root", *shape)
    yield


def _ip(*words: str) -> None:
    _command("ip", *words)


def _command(*words: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(f"--mbit needs the command {words[0]} ({error.strerror}); leave it out") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[0]
        raise ConfigError(f"--mbit cannot shape a link here ({reason}); run it as root, or leave it out")


def pipeline_table(results: Mapping[str, Any]) -> Table:
    """Every way over the ranks: throughput over one process, bubble, bytes, and what the simulator says."""
    settings = results["settings"]
    wire = "loopback" if settings["mbit"] is None else f"{settings['mbit']:g} Mbit/s"
    wire += "" if settings["latency"] is None else f", {settings['latency']:g} ms"
    title = f"{settings['ranks']} ranks of one thread, {settings['microbatches']} micro-batches, {wire}"
    table = Table(title=title, title_justify="left")
    for column in ("way", "over one", "quartiles", "bubble", "MB a step", "s", "simulated"):
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    for name, row in results["ways"].items():
        spread, said = row["spread"], results["simulated"].get(name)
        table.add_row(
            name,
            number(row["throughput_ratio_vs_single"], 2),
            f"{number(spread['low'], 2)}–{number(spread['high'], 2)}",
            number(row["bubble"], 2),
            number(row["bytes"] / 1e6, 2),
            number(row["seconds"]["median"], 2),
            DASH if said is None else number(said["seconds"], 2),
        )
    ratios = results["ratios"]
    shown = ("staged", "free-int8", "thin", "late", "thin-late", "thin-late-int8")
    pairs = ((name, ratios.get(f"{name} over 1f1b")) for name in shown)
    gains = (f"{name} {number(found['median'], 2)}" for name, found in pairs if found is not None)
    table.caption = f"throughput over 1F1B: {', '.join(gains)}; over one: goal {results['goals']['single']}"
    return table


def main(settings: Annotated[PipelineSettings, tyro.conf.arg(name="")], json: Json = False) -> None:
    """Measure stages over processes against one process and against backprop over the same processes."""
    note(f"measuring {settings.ranks} processes: a minute or two, on a quiet machine if you can")
    results = bench_pipeline(settings)
    if json:
        print_json(results)
    else:
        out().print(pipeline_table(results))


if __name__ == "__main__":
    tyro.cli(main)
