"""Who drafts best: every drafter of a run over full depth, by category of text, without loops.

    python benchmarks/drafters.py RUN [--draft FOLDER ...] [--weights int8] [--tokens 64] [--prompts 2]

Each prompt (`categories.py`) is continued greedily at full depth once; its text is cut where it ends, or
where its last 16 tokens have stood in it before: what follows is a loop, which flatters every drafter. With
--loops nothing is cut. All ways then write that many tokens behind each prompt, taking turns prompt by
prompt, the reading of the prompt included. A speed is tokens over seconds, summed; the ratio to full depth is
given by category and for all, with the quartiles over prompts, and the goal of the run beside it.

    draft stage ...    each folder of --draft (by default RUN/draft): its stage, alone and with lookups, by
                       usual acceptances (`decode/calibration/policy.py`) and the seconds measured here
    tuned              what `decode/calibration/tune.py` chooses of all of the first folder's drafters, on
                       held-out text

With --peers, the same weights in transformers: `generate` at full depth, with `prompt_lookup_num_tokens`, and
with `assistant_early_exit` after the second of three thirds of the layers, each over its own full depth.

Texts that differ from full depth's are counted, those at a tie of the two best logits apart
(`decode/agreement.py`): in float32 a batch of rows may be rounded otherwise than one.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from categories import Prompt, prompts_of
from topograd.convert.own_text import LOOP
from topograd.decode.agreement import differences
from topograd.decode.calibration.measure import PositionCosts, measure_draft, measure_positions
from topograd.decode.calibration.policy import ExpectedGainPolicy
from topograd.decode.calibration.tune import drafter_of, tune
from topograd.decode.depths import engine_of, strategy_of
from topograd.decode.engine import Emitted, Engine
from topograd.decode.retrofitted import has_retrofit, open_retrofit, retrofit_folder
from topograd.decode.sequence import Tally
from topograd.decode.speculation import Speculate
from topograd.decode.strategies import DecodeStrategy, FixedDepth, continue_tokens, generate_batch
from topograd.errors import TopogradError
from topograd.pretrained import REFERENCE
from topograd.runs.session import LoadedTextRun, heldout_text, open_session
from topograd.timing import Spread

SPEEDUP = 1.15
"""What time is taken to be worth (`decode/calibration/policy.py`)."""
FULL = "full depth"
GOALS = {"reference": 1.87, "int8": 1.5}
"""Over full depth, text that does not loop: of the packaged model, and of SmolLM2 in int8 (hoped: 1.8)."""
TUNED_BYTES = 30_000


@dataclass(frozen=True)
class Settings:
    """What to measure, and for how long."""

    run: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[RUN]")] = None
    """The run's folder; the model that comes with the package if not given."""
    draft: tuple[Path, ...] = ()
    """Folders that topograd retrofit made; by default RUN/draft."""
    depths: tuple[str, ...] = ()
    """More depths to measure, such as speculate:runs/small."""
    tokens: int = 64
    prompts: int = 2
    """Prompts of each kind."""
    threads: int = 1
    clock: Literal["wall", "cpu"] = "wall"
    """cpu: the process's own time, for one thread on a machine that others use too."""
    runtime: str | None = None
    """torch, onnx or native; by default the fastest."""
    weights: str = "float32"
    loops: bool = False
    """Leave loops in."""
    peers: bool = False
    json: bool = False


def without_loop(tokens: Sequence[int], ends: frozenset[int], loops: bool = False) -> int:
    """How many tokens there are before the text ends or, unless `loops` may stay, repeats LOOP of them."""
    seen = set()
    for i in range(len(tokens)):
        if tokens[i] in ends:
            return i + 1
        last = tuple(tokens[max(0, i + 1 - LOOP) : i + 1])
        if not loops and len(last) == LOOP and last in seen:
            return i + 1 - LOOP
        seen.add(last)
    return len(tokens)


def ways_of(session: LoadedTextRun, engine: Engine, settings: Settings) -> dict[str, DecodeStrategy]:
    """Full depth and every drafter that the run has."""
    depths: dict[str, tuple[str, Path | None]] = {FULL: ("full", None), "lookup": ("speculate:lookup", None)}
    if len(session.plan.predicting()) > 1 and session.plan.prediction.path is None:
        depths["first stage"] = "speculate:3:1.0", None
    folders = settings.draft or ((retrofit_folder(session),) if has_retrofit(session) else ())
    for folder in folders:
        depths["lookup + table"] = "speculate:lookup+table", folders[0]
        depths[f"{folder.name}: stage"] = "speculate:draft", folder
        depths[f"{folder.name}: stage + lookup"] = "speculate:draft+lookup", folder
        depths[f"{folder.name}: stage + lookup + table"] = "speculate:draft+lookup+table", folder
    depths |= {depth: (depth, None) for depth in settings.depths}
    ways = {name: strategy_of(depth, session, engine, draft=at) for name, (depth, at) in depths.items()}
    return {**ways, "tuned": tuned(session, engine, folders[0] if folders else None)}


def tuned(session: LoadedTextRun, engine: Engine, folder: Path | None) -> DecodeStrategy:
    """What the tuner chooses on held-out text."""
    retrofitted = None if folder is None else open_retrofit(session, folder)
    selection = tune(engine, heldout_text(session, None, TUNED_BYTES), retrofitted).greedy
    print(f"tuned: {selection and (selection.drafters, selection.predicted)}", file=sys.stderr, flush=True)
    if selection is None:
        return FixedDepth(engine)
    tokens = None if selection.vocabulary is None else torch.tensor(selection.vocabulary)
    given: Any = lambda: retrofitted  # noqa: E731
    drafters = [drafter_of(name, engine, given, tokens) for name in selection.drafters]
    return Speculate(engine, drafters, policy=selection.policy)


def peers_of(session: LoadedTextRun) -> dict[str, Callable[[list[int], int], list[int]]]:
    """The same weights in transformers."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from topograd.convert.export import export_model

    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        export_model(session.run.folder, Path(folder) / "hf", "hf")
        model = AutoModelForCausalLM.from_pretrained(Path(folder) / "hf", dtype=torch.float32).eval()

    def way(**settings: Any) -> Callable[[list[int], int], list[int]]:
        def write(prompt: list[int], count: int) -> list[int]:
            inputs = torch.tensor([prompt])
            with torch.inference_mode():
                out = model.generate(
                    inputs,
                    attention_mask=torch.ones_like(inputs),
                    max_new_tokens=count,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                    **settings,
                )
            found: list[int] = out[0, len(prompt) :].tolist()
            return found

        return write

    third = 2 * session.config.model.layers // 3
    return {
        "transformers": way(),
        "transformers, prompt lookup": way(prompt_lookup_num_tokens=6),
        f"transformers, early exit {third}": way(assistant_early_exit=third),
    }


def measure(session: LoadedTextRun, settings: Settings) -> dict[str, Any]:
    """Seconds and tallies of every way on every prompt."""
    engine = engine_of(session, settings.runtime, settings.weights)
    ends = session.tokenizer.stop_tokens or frozenset({session.tokenizer.separator})
    prompts = prompts_of(session, settings.prompts)
    full = generate_batch(FixedDepth(engine), [p.tokens for p in prompts], settings.tokens)
    for prompt, text in zip(prompts, full, strict=True):
        prompt.count = without_loop([e.token for e in text], ends, settings.loops)
    looped = 1 - sum(p.count for p in prompts) / sum(map(len, full))
    prompts = [p for p in prompts if p.count >= 8]
    ways = ways_of(session, engine, settings)
    costs = _measured(ways, engine)
    peers = peers_of(session) if settings.peers else {}
    seconds: dict[str, list[float]] = {name: [] for name in (*ways, *peers)}
    tallies: dict[str, dict[str, Tally]] = {name: {} for name in ways}
    texts: dict[str, list[list[Emitted]]] = {name: [] for name in ways}
    names = list(seconds)
    clock = time.perf_counter if settings.clock == "wall" else time.process_time
    for number, prompt in enumerate(prompts):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            began = clock()
            if name in peers:
                peers[name](prompt.tokens, prompt.count)
            else:
                batch = ways[name].engine.start([prompt.tokens])
                texts[name].append([e for _, e in continue_tokens(ways[name], batch, prompt.count)])
            seconds[name].append(clock() - began)
            if name in ways:
                tallies[name].setdefault(prompt.kind, Tally()).add(batch[0].tally)
        print(f"{number + 1} of {len(prompts)} prompts", file=sys.stderr, flush=True)
    about = {
        "clock": settings.clock,
        "run": session.run.folder.name,
        "runtime": engine.runtime.name,
        "weights": engine.runtime.precision,
        "goal": GOALS.get(session.run.folder.name, GOALS.get(engine.runtime.precision)),
        "threads": settings.threads,
        "costs": costs.as_dict(),
    }
    return about | _summary(engine, ways, prompts, seconds, tallies, texts, looped)


def _measured(ways: dict[str, DecodeStrategy], engine: Engine) -> PositionCosts:
    """Seconds of positions on this machine, and the policies with them in the place of the usual ones."""
    costs = measure_positions(engine)
    for name, way in ways.items():
        if name == "tuned" or not isinstance(way, Speculate):
            continue
        computing, policy = way.drafter.computing, way.drafter.policy
        if isinstance(policy, ExpectedGainPolicy):
            own = costs if computing is None else costs.computed(**measure_draft(engine, computing))
            way.drafter.policy = replace(policy, costs=own, speedup=SPEEDUP, _cache={})
    return costs


def _summary(
    engine: Engine,
    ways: dict[str, DecodeStrategy],
    prompts: Sequence[Prompt],
    seconds: dict[str, list[float]],
    tallies: dict[str, dict[str, Tally]],
    texts: dict[str, list[list[Emitted]]],
    looped: float,
) -> dict[str, Any]:
    kinds = list(dict.fromkeys(p.kind for p in prompts))
    rows = []
    for name, took in seconds.items():
        base = seconds["transformers" if name.startswith("transformers") else FULL]
        each = [b / a for a, b in zip(took, base, strict=True)]
        row: dict[str, Any] = {
            "way": name,
            "tokens_per_second": sum(p.count for p in prompts) / sum(took),
            "over_full_depth": sum(base) / sum(took),
            "by_prompt": Spread.of(each).as_dict(),
            "by_kind": {
                kind: sum(b for b, p in zip(base, prompts, strict=True) if p.kind == kind)
                / sum(a for a, p in zip(took, prompts, strict=True) if p.kind == kind)
                for kind in kinds
            },
        }
        total = Tally()
        for tally in tallies.get(name, {}).values():
            total.add(tally)
        if total.by:
            row["tokens_per_round"] = 1 + total.accepted / total.rounds
            row["acceptance"] = {who: c.acceptance for who, c in total.by.items()}
            row["drafts"] = {who: c.drafted for who, c in total.by.items()}
            row["acceptance_by_kind"] = {kind: t.acceptance for kind, t in tallies[name].items()}
            row["tokens_per_round_by_kind"] = {
                kind: 1 + t.accepted / t.rounds for kind, t in tallies[name].items()
            }
        if isinstance(way := ways.get(name), Speculate):
            policy = way.drafter.policy
            if isinstance(policy, ExpectedGainPolicy) and way.drafter.computing is not None:
                row["seconds"] = policy.costs.as_dict()
        if name in texts and name != FULL:
            row |= differences(engine, [p.tokens for p in prompts], texts[name], texts[FULL])
        rows.append(row)
    return {"tokens": sum(p.count for p in prompts), "looped": looped, "kinds": kinds, "ways": rows}


def show(found: dict[str, Any]) -> None:
    """The table for people."""
    rows = found["costs"]["verify"]
    ratios = " ".join(f"{n}:{seconds / rows['1']:.2f}" for n, seconds in rows.items())
    print(f"{found['run']}, {found['runtime']}, {found['weights']}, {found['threads']} threads")
    print(f"one token {1000 * rows['1']:.2f} ms; positions over one {ratios}; goal {found['goal']}")
    print(f"{found['tokens']} tokens outside of loops; {found['looped']:.2f} of the text was cut")
    print(f"{'way':34} {'tok/s':>6} {'ratio':>6}  {'by prompt':>20}  " + "  ".join(found["kinds"]))
    for row in found["ways"]:
        spread = row["by_prompt"]
        quartiles = f"{spread['median']:.2f} ({spread['low']:.2f} to {spread['high']:.2f})"
        kinds = "  ".join(f"{row['by_kind'][kind]:.2f}" for kind in found["kinds"])
        kept = "  ".join(f"{who} {rate:.2f}" for who, rate in row.get("acceptance", {}).items())
        if "seconds" in row:
            each = (row["seconds"][part] / rows["1"] for part in ("start", "draft", "keep"))
            kept += "; start, draft, keep " + " ".join(f"{part:.3f}" for part in each)
        other = f"  {row['ties']} ties, {row['mismatches']} mismatches" if "ties" in row else ""
        speed = f"{row['tokens_per_second']:6.1f} {row['over_full_depth']:6.2f}"
        print(f"{row['way']:34} {speed}  {quartiles:>20}  {kinds}  {kept}{other}")


def main() -> int:
    settings = tyro.cli(Settings, description=__doc__.split("\n\n")[0])
    torch.set_num_threads(settings.threads)
    try:
        found = measure(open_session(settings.run or REFERENCE), settings)
    except TopogradError as error:
        print(f"drafters: {error}", file=sys.stderr)
        return 2
    if settings.json:
        print(json.dumps(found))
    else:
        show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
