"""Who drafts best: every drafter of a run over full depth, by kind of text, without loops.

    python benchmarks/drafters.py RUN [--draft SIDECAR] [--tokens 64] [--prompts 2] [--threads 1] [--peers]

Each prompt is continued greedily at full depth once; its text is cut where it ends, or where its last 16
tokens have stood in it before: what follows is a loop, which flatters every drafter. All ways then write that
many tokens behind each prompt, taking turns prompt by prompt, the reading of the prompt included. A speed is
tokens over seconds, summed; the ratio to full depth is given by kind and for all, with the quartiles over
prompts.

When to draft follows from acceptances as `decode/calibration/policy.py` has them and from the seconds of
positions, which are measured first; "calibrated" is what `topograd calibrate` chose, where the run has that.

Prompts: code and prose are beginnings of held-out documents, chats and lists are questions that no template
of `convert/prompts.py` has; a model without a chat template goes on from the plain question. Nothing here was
trained or tuned on.

With --peers, the same weights in transformers: `generate` at full depth, with `prompt_lookup_num_tokens`, and
with `assistant_early_exit` after the second of three thirds of the layers, each over its own full depth.

Texts that differ from full depth's are counted, those at a tie of the two best logits apart
(`decode/agreement.py`): in float32 a batch of rows is rounded otherwise than one.
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

from topograd.convert.own_text import LOOP
from topograd.convert.prompts import Chat
from topograd.data.corpus import read_corpus
from topograd.decode.agreement import differences
from topograd.decode.calibration.measure import PositionCosts, measure_draft, measure_positions
from topograd.decode.calibration.policy import ExpectedGainPolicy
from topograd.decode.depths import engine_of, strategy_of
from topograd.decode.engine import Emitted, Engine
from topograd.decode.retrofitted import has_retrofit
from topograd.decode.sequence import Tally
from topograd.decode.speculation import Speculate
from topograd.decode.strategies import DecodeStrategy, FixedDepth, continue_tokens, generate_batch
from topograd.errors import TopogradError
from topograd.pretrained import REFERENCE
from topograd.runs.session import LoadedTextRun, open_session
from topograd.timing import Spread

CHATS = (
    "My cat refuses to eat. What could be the reason?",
    "Can you help me plan a quiet weekend in the mountains?",
    "Why does the sky look red in the evening?",
    "I want to sell my old piano. How should I describe it?",
)
LISTS = (
    "List eight kinds of cheese with one sentence on each.",
    "Name ten inventions of the nineteenth century as a numbered list.",
    "Give me a packing list for a week at the sea.",
    "List the planets of the solar system with their sizes.",
)
PROMPT_TOKENS = 48
SPEEDUP = 1.15
"""What time is taken to be worth (`decode/calibration/policy.py`)."""
FULL = "full depth"


@dataclass(frozen=True)
class Settings:
    """What to measure, and for how long."""

    run: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[RUN]")] = None
    """The run's folder; the model that comes with the package if not given."""
    draft: Path | None = None
    """The folder that topograd retrofit made; by default RUN/draft."""
    depths: tuple[str, ...] = ()
    """More depths to measure, such as speculate:runs/small."""
    tokens: int = 64
    prompts: int = 2
    """Prompts of each kind."""
    threads: int = 1
    clock: Literal["wall", "cpu"] = "wall"
    """cpu: the process's own time, for one thread on a machine that others use too."""
    runtime: str | None = None
    """torch or onnx; by default the faster."""
    peers: bool = False
    json: bool = False


@dataclass
class Prompt:
    """A beginning and how many tokens are written behind it."""

    kind: str
    tokens: list[int]
    count: int = 0


def prompts_of(session: LoadedTextRun, each: int) -> list[Prompt]:
    """Some prompts of each kind."""
    tokenizer, chat = session.tokenizer, Chat.of(session.tokenizer)
    documents = read_corpus(None).heldout
    code = [d for d in documents if d.name.endswith(".py") and len(d.text) > 3000]
    prose = [d for d in documents if not d.name.endswith(".py") and len(d.text) > 600]
    found = []
    for kind, some in (("code", code), ("prose", prose)):
        for document in some[:: max(1, len(some) // each)][:each]:
            middle = document.text.find("\n", len(document.text) // 3) + 1
            found.append(Prompt(kind, tokenizer.encode(document.text[middle:])[:PROMPT_TOKENS]))
    for kind, questions in (("chat", CHATS), ("lists", LISTS)):
        for question in questions[:each]:
            words = tokenizer.encode(question)
            found.append(Prompt(kind, [*chat.first, *words, *chat.behind] if chat else words))
    return found


def without_loop(tokens: Sequence[int], ends: frozenset[int]) -> int:
    """How many tokens there are before the text ends or repeats LOOP of them."""
    seen = set()
    for i in range(len(tokens)):
        if tokens[i] in ends:
            return i + 1
        last = tuple(tokens[max(0, i + 1 - LOOP) : i + 1])
        if len(last) == LOOP and last in seen:
            return i + 1 - LOOP
        seen.add(last)
    return len(tokens)


def ways_of(session: LoadedTextRun, engine: Engine, settings: Settings) -> dict[str, DecodeStrategy]:
    """Full depth and every drafter that the run has."""
    depths = {FULL: "full", "lookup": "speculate:lookup"}
    if len(session.plan.predicting()) > 1 and session.plan.prediction.path is None:
        depths["first stage"] = "speculate:3:1.0"
    if settings.draft is not None or has_retrofit(session):
        depths |= {
            "table": "speculate:table",
            "draft stage": "speculate:draft",
            "lookup + table": "speculate:lookup+table",
            "draft stage + lookup": "speculate:draft+lookup",
            "draft stage + lookup + table": "speculate:draft+lookup+table",
        }
    if session.run.calibration_file.is_file():
        depths["calibrated"] = "speculate"
    depths |= {depth: depth for depth in settings.depths}
    draft = settings.draft
    return {
        name: strategy_of(depth, session, engine, draft=None if depth == "speculate" else draft)
        for name, depth in depths.items()
    }


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
    engine = engine_of(session, settings.runtime)
    ends = session.tokenizer.stop_tokens or frozenset({session.tokenizer.separator})
    prompts = prompts_of(session, settings.prompts)
    full = generate_batch(FixedDepth(engine), [p.tokens for p in prompts], settings.tokens)
    for prompt, text in zip(prompts, full, strict=True):
        prompt.count = without_loop([e.token for e in text], ends)
    looped = 1 - sum(p.count for p in prompts) / sum(map(len, full))
    prompts = [p for p in prompts if p.count >= 8]
    ways = ways_of(session, engine, settings)
    costs = _measured(ways, engine)
    peers = peers_of(session) if settings.peers else {}
    seconds: dict[str, list[float]] = {name: [] for name in (*ways, *peers)}
    tallies = {name: Tally() for name in ways}
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
                tallies[name].add(batch[0].tally)
        print(f"{number + 1} of {len(prompts)} prompts", file=sys.stderr, flush=True)
    about = {
        "clock": settings.clock,
        "runtime": type(engine.runtime).__name__,
        "threads": settings.threads,
        "costs": costs.as_dict(),
    }
    return about | _summary(engine, prompts, seconds, tallies, texts, looped)


def _measured(ways: dict[str, DecodeStrategy], engine: Engine) -> PositionCosts:
    """Seconds of rows on this machine, and the policies with them in the place of the usual ones."""
    drafters = {name: way.drafter for name, way in ways.items() if isinstance(way, Speculate)}
    steps = next((each.computing for each in drafters.values() if each.computing is not None), None)
    costs = measure_positions(engine)
    if steps is not None:
        draft, keep = measure_draft(engine, steps)
        costs = replace(costs, draft=draft, keep=keep)
    for name, drafter in drafters.items():
        if name != "calibrated" and isinstance(drafter.policy, ExpectedGainPolicy):
            drafter.policy = ExpectedGainPolicy(costs=costs, speedup=SPEEDUP)
    return costs


def _summary(
    engine: Engine,
    prompts: Sequence[Prompt],
    seconds: dict[str, list[float]],
    tallies: dict[str, Tally],
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
        if name in tallies and tallies[name].by:
            row["acceptance"] = {who: c.acceptance for who, c in tallies[name].by.items()}
            row["drafts"] = {who: c.drafted for who, c in tallies[name].by.items()}
        if name in texts and name != FULL:
            row |= differences(engine, [p.tokens for p in prompts], texts[name], texts[FULL])
        rows.append(row)
    return {"tokens": sum(p.count for p in prompts), "looped": looped, "kinds": kinds, "ways": rows}


def show(found: dict[str, Any]) -> None:
    """The table for people."""
    rows = found["costs"]["deep"]
    ratios = " ".join(f"{n}:{seconds / rows['1']:.2f}" for n, seconds in rows.items())
    step = found["costs"]["draft"] / rows["1"]
    print(f"{found['runtime']}, {found['threads']} threads, {found['clock']} time")
    print(f"rows over one {ratios}; a step of the draft stage {step:.3f}")
    print(f"{found['tokens']} tokens outside of loops; {found['looped']:.2f} of the text was cut")
    print(f"{'way':34} {'tok/s':>6} {'ratio':>6}  {'by prompt':>20}  " + "  ".join(found["kinds"]))
    for row in found["ways"]:
        spread = row["by_prompt"]
        quartiles = f"{spread['median']:.2f} ({spread['low']:.2f} to {spread['high']:.2f})"
        kinds = "  ".join(f"{row['by_kind'][kind]:.2f}" for kind in found["kinds"])
        kept = "  ".join(f"{who} {rate:.2f}" for who, rate in row.get("acceptance", {}).items())
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
