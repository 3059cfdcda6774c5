"""Generated text coloured by exit: an HTML fragment, and a page of its own.

Each token carries the stage that it left after as a tint, as the style of its underline, and in words when it
is pointed at; a table below counts them. Neighbours that left after the same stage are one element. A token
may add nothing to the text, where a character needs several of them, and is counted all the same.

Colours go from dark to light along `_COLOURS`: violet, blue, brown, orange, which people with
colour-blindness tell apart. All have a contrast of at least 3 against black and against white, so that the
same colour serves as text on any terminal, and as an underline on a light or a dark page. A page's text keeps
the page's own ink; only its background is tinted. There are five underlines, so a sixth stage has the first
one's.
"""

from collections.abc import Sequence
from itertools import groupby

from topograd.errors import ConfigError
from topograd.report.markup import document, escape

_COLOURS = ((123, 22, 231), (58, 127, 196), (176, 125, 92), (242, 106, 10))
_LINES = ("solid", "dotted", "dashed", "double", "wavy")
_TINT = "30"  # of 255, in hexadecimal: how much of the colour is in the background


def stage_colour(stage: int, stages: int) -> str:
    """The colour of stage number `stage`, from 0, among `stages`, as #rrggbb."""
    place = stage / max(stages - 1, 1) * (len(_COLOURS) - 1)
    before = min(int(place), len(_COLOURS) - 2)
    share = place - before
    pairs = zip(_COLOURS[before], _COLOURS[before + 1], strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def depth_fragment(prompt: str, pieces: Sequence[tuple[str, int]], stages: int) -> str:
    """The prompt, what each token added to it, coloured by the stage (from 0) that it left after, and counts.

    `pieces` has one entry for each token. The fragment brings its own look and fits any page.
    """
    for _, stage in pieces:
        if not 0 <= stage < stages:
            raise ConfigError(setting="stage", given=stage + 1, allowed=f"from 1 to {stages}")
    shown = [piece for piece in pieces if piece[0]]
    runs = (
        _span("".join(text for text, _ in run), stage, stages)
        for stage, run in groupby(shown, key=lambda piece: piece[1])
    )
    start = f"<b>{escape(prompt)}</b>" if prompt else ""
    return (
        '<figure class="sample" style="text-underline-offset:.25em;text-decoration-skip-ink:none">\n'
        "<figcaption>What the model wrote is underlined, in the style of the stage after which each token "
        f'left.</figcaption>\n<pre style="line-height:1.75">{start}{"".join(runs)}</pre>\n'
        f"{_legend(pieces, stages)}\n</figure>"
    )


def depth_page(title: str, fragment: str) -> str:
    """A page that stands alone: no script, nothing loaded, light and dark."""
    return document(title, "", (), [fragment])


def _span(text: str, stage: int, stages: int) -> str:
    """Text with the look of a stage."""
    colour, line = stage_colour(stage, stages), _LINES[stage % len(_LINES)]
    look = f"background:{colour}{_TINT};text-decoration:underline {line} {colour} 2px"
    return f'<span style="{look}" title="left after stage {stage + 1} of {stages}">{escape(text)}</span>'


def _legend(pieces: Sequence[tuple[str, int]], stages: int) -> str:
    """How many tokens left after each stage, as a table whose rows have the looks of the stages."""
    left = [stage for _, stage in pieces]
    rows = []
    for stage in range(stages):
        count = left.count(stage)
        share = f"{100 * count / len(left):.1f}&nbsp;%" if left else "–"
        name = _span(f"stage {stage + 1}", stage, stages)
        rows.append(f'<tr><th scope="row">{name}</th><td>{count}</td><td>{share}</td></tr>')
    head = "".join(f'<th scope="col">{name}</th>' for name in ("left after", "tokens", "share"))
    return (
        '<div class="wide"><table><caption>How deep the tokens went</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n" + "\n".join(rows) + "\n</tbody></table></div>"
    )
