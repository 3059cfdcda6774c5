"""Parts of the demo: the packaged model decoding, two trainings side by side, and their comparison.

The two trainings run at the same time, each in a process of its own with half of the cores: small models use
two cores better so than one after the other. Progress is read from the runs' metrics. Ctrl-C reaches the
processes too; each saves and ends. Each training is an ordinary run in the demo's folder, so a second demo
continues or reuses what a first one made.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from topograd.cli.bench import decode_table
from topograd.cli.console import grid, note, number, percent
from topograd.cli.generate import DRAFTERS
from topograd.cli.main import INTERRUPTED
from topograd.cli.progress import trainings_progress
from topograd.cli.results import POOLINGS, stored_results
from topograd.decode.agreement import identical, mean_exit
from topograd.decode.benchmark import bench_decode, continued, in_turns
from topograd.decode.depths import engine_of, strategy_of
from topograd.decode.engine import Emitted
from topograd.decode.sampling import Sampling
from topograd.decode.settings import DecodeSettings
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.decode.text import TextStream
from topograd.errors import RunError
from topograd.files import dump_toml, read_json, write_atomic, write_json
from topograd.pretrained import REFERENCE
from topograd.report.data import RunData
from topograd.report.depth_text import stage_colour
from topograd.runs.config import TrainConfig, preset
from topograd.runs.folder import Run
from topograd.runs.session import LoadedTextRun, load_data, open_session
from topograd.runtime.choice import installed
from topograd.timing import ratio
from topograd.training.gap import gap_percent, measure_step
from topograd.training.trainer import OnStep

if TYPE_CHECKING:
    from topograd.cli.demo import Demo

TRAIN = (sys.executable, "-m", "topograd", "train")
CONTENDERS = ("backprop", "staged")
SHORT_STEPS = 400
SAMPLE_PROMPT, SAMPLE_TOKENS = "def read(", 120
SECONDS_BETWEEN_LOOKS = 0.5

# Greedy text of a small model often loops, which flatters drafts: these prompts are ones where it does not.
LOOK_PROMPTS = ("with open(path) as file:\n", "class Counter(dict):\n", "    raise ValueError(", "def test_")
EARLY_EXIT = "wand:flip-rate:0.01"
LOOK = DecodeSettings(tokens=80, rounds=5)
BENCH = DecodeSettings(prompts=2, tokens=64, rounds=2, bytes=30_000)


def first_look() -> dict[str, Any]:
    """The packaged model on a few prompts: at full depth, speculating and leaving early.

    `ways` has their speeds, in turns, as `topograd bench decode` gives them; `picture` the text that leaves
    early, by token and exit; `speculation` the speculated text, by token and drafter.
    """
    session = open_session(REFERENCE)
    engine = engine_of(session)
    strategies = {depth: strategy_of(depth, session, engine) for depth in ("full", "speculate", EARLY_EXIT)}
    prompts = [session.tokenizer.encode(text, "prompt") for text in LOOK_PROMPTS]
    written = {
        name: continued(one, prompts, LOOK.tokens) for name, one in strategies.items()
    }  # also warms up
    seconds = in_turns(strategies, prompts, LOOK)
    ways = []
    for name, result in written.items():
        speedup = ratio(seconds, "full", name)
        median = sorted(seconds[name])[LOOK.rounds // 2]
        ways.append(
            {
                "way": name,
                "tokens_per_second": LOOK.tokens * len(prompts) / median,
                "speedup": speedup.median,
                "spread": speedup.as_dict(),
                "agreement": None,  # teacher-forced; `bench decode` measures it
                "identical": identical(result.texts, written["full"].texts),
                "mean_stage": mean_exit(result.texts),
                "acceptance": result.acceptance,
            }
        )
    texts = {name: _pieces(session, result.texts[0]) for name, result in written.items()}
    picture = {"prompt": LOOK_PROMPTS[0], "depth": EARLY_EXIT, "stages": len(session.plan.predicting())}
    return {
        "run": str(session.run.folder),
        "runtime": engine.runtime.name,
        "threads": torch.get_num_threads(),
        "ways": ways,
        "picture": picture | {"pieces": [(text, token.exit) for text, token in texts[EARLY_EXIT]]},
        "full": "".join(text for text, _ in texts["full"]),
        "speculated": [(text, token.drafter) for text, token in texts["speculate"]],
    }


def _pieces(session: LoadedTextRun, tokens: list[Emitted]) -> list[tuple[str, Emitted]]:
    """The text that each token released."""
    stream = TextStream(session.tokenizer)
    return [(stream.feed(emitted.token), emitted) for emitted in tokens]


def show_look(console: Console, look: Mapping[str, Any]) -> None:
    """Print the text by exit, and speculation beside full depth with the speed of each."""
    speed = {way["way"]: f"{way['tokens_per_second']:,.0f} tokens/s" for way in look["ways"]}
    speculate = next(way for way in look["ways"] if way["way"] == "speculate")
    picture, drafted = look["picture"], look["speculated"]
    stages, prompt = picture["stages"], (picture["prompt"], "bold")
    early = Text.assemble(prompt, *((piece, stage_colour(k, stages)) for piece, k in picture["pieces"]))
    title = f"the packaged model, leaving early: {speed[picture['depth']]}"
    console.print(Panel(early, title=title, title_align="left"))
    counts = [sum(exit_ == k for _, exit_ in picture["pieces"]) for k in range(stages)]
    exits = [Text(f"exit {k + 1} ({n} tokens)", stage_colour(k, stages)) for k, n in enumerate(counts)]
    console.print(Text("Each token has the colour of its exit: ") + Text(", ").join(exits))
    full = Text.assemble(prompt, look["full"])
    speculated = Text.assemble(prompt, *((piece, DRAFTERS[0] if by else "") for piece, by in drafted))
    beside = Table.grid(expand=True)
    beside.add_column(ratio=1)
    beside.add_column(ratio=1)
    beside.add_row(
        Panel(full, title=f"full depth: {speed['full']}", title_align="left"),
        Panel(speculated, title=f"speculation: {speed['speculate']}", title_align="left"),
    )
    console.print(beside)
    same, spread = speculate["identical"], speculate["spread"]
    console.print(
        f"Speculation wrote {'the same text' if same == 1 else f'{same:.0%} of the same texts'}, "
        f"{speculate['speedup']:.2f} times as fast (quartiles {spread['low']:.2f} to {spread['high']:.2f}); "
        f"{sum(bool(by) for _, by in drafted)} of these {len(drafted)} tokens were drafted (coloured).",
        soft_wrap=True,
    )
    if not installed():
        note("ONNX Runtime is missing; pip install onnx onnxruntime: faster decoding, int8 and int4 weights")


def contenders(args: Demo) -> dict[str, TrainConfig]:
    """The two trainings: the same model, data and steps, and another partition."""
    config = preset(args.preset, seed=args.seed)
    if args.preset == "small" and not args.full:
        config = replace(config, steps=SHORT_STEPS, eval_every=SHORT_STEPS // 4, eval_bytes=60_000)
    config = config if args.steps is None else replace(config, steps=args.steps)
    layers = config.model.layers
    partitions = {"backprop": str(layers), "staged": args.partition or ",".join(["2"] * (layers // 2))}
    return {name: config.changed(partition=partitions[name]) for name in CONTENDERS}


def trained(args: Demo) -> dict[str, dict[str, Any]]:
    """The results of both runs. What is not finished is trained, the two side by side."""
    wanted = contenders(args)
    commands: dict[str, list[str]] = {}
    for name, config in wanted.items():
        folder = args.folder / name
        if not (folder / "config.toml").exists():
            settings = args.folder / f"{name}.toml"
            settings.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(settings, dump_toml(config.as_dict()))
            commands[name] = ["--config", str(settings), "--out", str(folder)]
            continue
        existing = Run.open(folder)
        stored = TrainConfig.from_dict(existing.read_config())
        if replace(stored, model=config.model) != config:  # its vocabulary is what the tokenizer came to
            raise RunError(
                f"{folder} holds a run with other settings", remedy="pass another --out, or delete it"
            )
        if (stored_results(existing) or {}).get("finished"):
            note(f"{folder} is trained already")
        else:
            commands[name] = ["--resume", str(folder)]
    if commands:
        load_data(wanted["staged"])  # once, before two processes would do the same
        side_by_side(args.folder, commands)
    results = {name: stored_results(Run.open(args.folder / name)) for name in wanted}
    return {name: result for name, result in results.items() if result is not None}


def side_by_side(folder: Path, commands: Mapping[str, list[str]]) -> None:
    """Run `topograd train` with these flags for each run `folder`/name, and wait until all have ended."""
    threads = max(1, (os.cpu_count() or 1) // len(commands))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    with ExitStack() as opened:
        before = signal.getsignal(signal.SIGTERM)
        if before != signal.SIG_IGN:  # what is ignored stays ignored
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
            opened.callback(signal.signal, signal.SIGTERM, before)
        processes = {}
        for name, flags in commands.items():
            log = opened.enter_context(open(folder / f"{name}.log", "w+", encoding="utf-8"))
            processes[name] = subprocess.Popen(
                [*TRAIN, *flags, "--json"], stdout=subprocess.DEVNULL, stderr=log, env=environment
            )
            opened.callback(_end, processes[name])
        _watch(folder, processes)
    for name, process in processes.items():
        if process.returncode not in (0, INTERRUPTED):
            log_lines = (folder / f"{name}.log").read_text(encoding="utf-8").strip().splitlines()
            raise RunError(
                f"training {folder / name} failed: {log_lines[-1] if log_lines else 'its log is empty'}"
            )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave no training behind when this process ends; one that is terminated saves, as with Ctrl-C."""
    if process.poll() is None:
        process.terminate()
        process.wait()


def _watch(folder: Path, processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Show progress until every process has ended. On Ctrl-C the processes stop by themselves: only wait."""
    with trainings_progress(list(processes)) as bars:
        shown = dict.fromkeys(processes, 0)
        running = True
        while running:
            running = any(process.poll() is None for process in processes.values())
            try:
                time.sleep(SECONDS_BETWEEN_LOOKS if running else 0)
                for name in processes:
                    shown[name] = _show(folder / name, bars[name], shown[name])
            except KeyboardInterrupt:
                continue


def _show(folder: Path, on_step: OnStep, shown: int) -> int:
    """Pass the newest step of a run to its bar, if it is new; returns that step."""
    if not (folder / "config.toml").exists():
        return shown
    run = Run.open(folder)
    records = [record for record in run.metrics() if record.get("kind") == "train"]
    if not records or records[-1]["step"] == shown:
        return shown
    newest = records[-1]
    on_step(newest["step"], TrainConfig.from_dict(run.read_config()).steps, newest["loss"], None)
    return int(newest["step"])


def compared(folder: Path, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Gap, step time, memory and samples; measured once and stored in comparison.json."""
    file = folder / "comparison.json"
    gap = gap_percent(*(results[name]["bpb"]["prediction"] for name in ("staged", "backprop")))
    if (stored := _stored(file)).get("gap") == gap:
        return stored
    note("measuring step time and memory")
    staged, backprop = (open_session(folder / name) for name in ("staged", "backprop"))
    stages, layers = staged.plan.stages, backprop.config.model.layers
    samples = [
        _sample(staged, p.index, f"first {p.index + 1} of {len(stages)} stages, {p.stage.stop} layers")
        for p in stages
    ]
    samples.append(_sample(backprop, 0, f"backprop, {layers} layers"))
    comparison = {"gap": gap, **measure_step(staged), "samples": samples}
    write_json(file, comparison)
    return comparison


def _stored(file: Path) -> dict[str, Any]:
    """What was measured before; nothing where the file is damaged, and it is measured again."""
    with suppress(RunError):
        found = read_json(file)
        return found if isinstance(found, dict) else {}
    return {}


def _sample(session: LoadedTextRun, exit_: int, title: str) -> dict[str, str]:
    prompt = [session.tokenizer.separator, *session.tokenizer.encode(SAMPLE_PROMPT)]
    sampling = Sampling(temperature=0.7, top_k=50)
    strategy = FixedDepth(engine_of(session), exit_)
    [tokens] = generate_batch(strategy, [prompt], SAMPLE_TOKENS, sampling)
    text = session.tokenizer.decode([emitted.token for emitted in tokens])
    return {"title": title, "prompt": SAMPLE_PROMPT, "text": text}


def bench(folder: Path) -> dict[str, Any]:
    """`topograd bench decode` of the packaged model, shorter; measured once and stored in decoding.json."""
    file = folder / "decoding.json"
    if (stored := _stored(file)).get("ways"):
        return stored
    note("measuring every decode strategy")
    results = bench_decode(open_session(REFERENCE), BENCH)
    write_json(file, results)
    return results


def report(
    folder: Path, results: dict[str, dict[str, Any]], comparison: dict[str, Any], decoding: dict[str, Any]
) -> Path:
    """Write report.html of both runs, their comparison and the packaged model's decoding."""
    from topograd.report.page import write_report  # matplotlib

    def data(name: str) -> RunData:
        run = Run.open(folder / name)
        return RunData(name, run.read_config(), run.metrics(), results[name])

    return write_report(folder / "report.html", data("staged"), data("backprop"), comparison, decoding)


def show_results(
    console: Console,
    results: dict[str, dict[str, Any]],
    comparison: dict[str, Any],
    bench: dict[str, Any] | None,
) -> None:
    """Print the comparison, a sample of each prefix, and the decode strategies if they were measured."""
    console.print(summary_table(results, comparison))
    for sample in comparison["samples"]:
        text = Text.assemble((sample["prompt"], "bold"), sample["text"])
        console.print(Panel(text, title=sample["title"], title_align="left"))
    if bench is not None:
        console.print(decode_table(bench))


def summary_table(results: dict[str, dict[str, Any]], comparison: dict[str, Any]) -> Table:
    """Everything that was measured of the two runs, in one table."""
    reference = results["backprop"]["bpb"]["prediction"]
    table = grid("Bits per byte of held-out text: lower is better", "prediction", "BPB", "against backprop")
    table.add_row("backprop", number(reference), "")
    staged = results["staged"]["bpb"]
    for k, bpb in enumerate(staged["prefix"]):
        table.add_row(f"stages 1 to {k + 1}", number(bpb), percent(gap_percent(bpb, reference)))
    for how in POOLINGS:
        bpb = staged[how]
        table.add_row(f"{how} of all stages", number(bpb), percent(gap_percent(bpb, reference)))
    table.add_section()
    step, memory = comparison["step_time_ratio"], comparison["memory"]
    spread = f"{number(step['low'], 2)} to {number(step['high'], 2)}"
    table.add_row("time of a step, staged / backprop", number(step["median"], 2), spread)
    sizes = f"{memory['staged'] / 2**20:.0f} / {memory['backprop'] / 2**20:.0f} MiB"
    table.add_row("peak activation memory, staged / backprop", number(memory["ratio"], 2), sizes)
    return table
