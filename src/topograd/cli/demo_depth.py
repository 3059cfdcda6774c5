"""The demo's second half: the model that comes with the package, run as deep as each token needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from topograd.cli.bench import decode_table
from topograd.cli.console import note
from topograd.decode.benchmark import bench_decode
from topograd.decode.depths import engine_of, strategy_of
from topograd.decode.model import continue_text
from topograd.decode.settings import DecodeSettings
from topograd.decode.text import TextStream
from topograd.errors import RunError
from topograd.files import read_json, write_json
from topograd.pretrained import REFERENCE
from topograd.report.depth_text import stage_colour
from topograd.runs.session import LoadedTextRun, open_session

SHORT = DecodeSettings(prompts=2, tokens=64, rounds=2, bytes=30_000)
PROMPT = "def read(self, size=-1):\n"
DEPTH = "wand:flip-rate:0.01"
TOKENS = 160


def decoding(folder: Path) -> dict[str, Any]:
    """What `topograd bench decode` measures, shorter, and a text; measured once and kept in decoding.json."""
    kept = folder / "decoding.json"
    try:
        found = read_json(kept) if kept.exists() else None
    except RunError:
        found = None
    if isinstance(found, dict) and found.get("bench") and found.get("picture"):
        return found
    note("measuring ways of decoding")
    session = open_session(REFERENCE)
    results = {"bench": bench_decode(session, SHORT), "picture": picture(session)}
    write_json(kept, results)
    return results


def picture(session: LoadedTextRun) -> dict[str, Any]:
    """A text that leaves early, token by token, and the stage at which each left."""
    strategy = strategy_of(DEPTH, session, engine_of(session))
    prompt = [session.tokenizer.separator, *session.tokenizer.encode(PROMPT)]
    (sequence,) = strategy.engine.start([prompt])
    text = continue_text(strategy, sequence, TOKENS, TextStream(session.tokenizer))
    pieces = [(piece.text, piece.exit) for piece in text]
    return {"prompt": PROMPT, "depth": DEPTH, "stages": len(session.plan.predicting()), "pieces": pieces}


def show(console: Console, results: dict[str, Any]) -> None:
    """The table of ways, and the text in colours."""
    console.print(decode_table(results["bench"]))
    shown = results["picture"]
    text = Text.assemble((shown["prompt"], "bold"))
    for piece, left in shown["pieces"]:
        text.append(piece, stage_colour(left, shown["stages"]))
    names = [Text(f"stage {k + 1}", stage_colour(k, shown["stages"])) for k in range(shown["stages"])]
    console.print(Panel(text, title=shown["depth"], title_align="left"))
    console.print(Text("each token has the colour of the stage where it left: ") + Text(", ").join(names))
