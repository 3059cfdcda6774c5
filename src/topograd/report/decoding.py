"""The part of a report on decoding: how fast each way of running a model is, and where tokens left.

It reads what `topograd.decode.benchmark` measured, and a text with the stage of each token, as JSON
holds them.
"""

from collections.abc import Mapping
from typing import Any

from topograd.report.data import entry, number
from topograd.report.depth_text import depth_fragment
from topograd.report.markup import escape, section, table_html
from topograd.report.tables import DASH, Table, fixed, whole

_COLUMNS = (
    ("tokens_per_second", "tokens/s", 0),
    ("speedup", "speedup", 2),
    ("agreement", "agreement", 4),
    ("identical", "identical texts", 2),
    ("mean_stage", "mean stage", 2),
    ("acceptance", "acceptance", 2),
)
_NOTE = (
    "Full depth runs every stage for every token. A prefix stops after some of them. Wand lets a token leave "
    "where its lead is large; agreement is the share of held-out tokens that it writes as full depth would. "
    "Speculation drafts with the first stages and lets the others verify: it writes what full depth writes."
)


def decoding_section(decoding: Mapping[str, Any] | None) -> str:
    """The part as HTML; empty if nothing was measured."""
    ways = entry(decoding, "bench", "ways")
    if not isinstance(ways, list) or not ways:
        return ""
    table = Table(
        "Ways of running the reference model, one text at a time",
        ("way", *(name for _, name, _ in _COLUMNS)),
        tuple(
            (str(entry(way, "way") or DASH), *(_cell(way, key, digits) for key, _, digits in _COLUMNS))
            for way in ways
        ),
    )
    return section(
        "decoding",
        "As much depth as a token needs",
        f'<p class="note">{escape(_NOTE)}</p>{table_html(table)}{_picture(entry(decoding, "picture"))}',
    )


def _cell(way: object, key: str, digits: int) -> str:
    value = number(entry(way, key))
    return fixed(value, digits) if digits else whole(value)


def _picture(picture: object) -> str:
    """The text in its colours; nothing if it is not there or not whole."""
    pieces, stages = entry(picture, "pieces"), entry(picture, "stages")
    if not isinstance(pieces, list) or not isinstance(stages, int):
        return ""
    try:
        whole_pieces = [(str(text), int(left)) for text, left in pieces]
        return depth_fragment(str(entry(picture, "prompt") or ""), whole_pieces, stages)
    except (TypeError, ValueError):
        return ""
