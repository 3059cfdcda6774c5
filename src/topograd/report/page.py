"""Report page of a run: one HTML file that explains a staged run, alone or against a backprop run.

The file stands alone: no script, nothing loaded, and a content policy that forbids both. Every text that
comes from a run (names, settings, samples) is escaped. Each figure is inline SVG with a description and the
same numbers as a table; the page has a second layout of it for narrow screens. It is also saved as
figures/<name>.svg and figures/<name>.png beside the page. The page is written last, so that it never names
figures that are not there.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from topograd.errors import RunError
from topograd.files import write_atomic
from topograd.report.data import RunData, bpb_prediction, entry, number, stage_count
from topograd.report.depth_text import depth_fragment
from topograd.report.drawing import Drawing, render, style
from topograd.report.figures import Panel, gap_panel, loss_panel, prefix_panel
from topograd.report.markup import document, escape, section, table_html, tiles_html
from topograd.report.stage_figures import (
    core_panel,
    memory_panel,
    precision_panel,
    rank_panel,
    reliability_panel,
)
from topograd.report.tables import (
    DASH,
    Table,
    all_numbers,
    comparison_numbers,
    fixed,
    gap_percent,
    percent,
    settings,
    whole,
)
from topograd.report.tuning import forgetting_panel, layers_panel

Part = tuple[str, str, str]
"""Anchor, title and HTML of a part of a page; one without HTML is left out."""
_DECODING_COLUMNS = (
    ("tokens_per_second", "tokens/s", 0),
    ("speedup", "speedup", 2),
    ("agreement", "agreement", 4),
    ("identical", "identical texts", 2),
    ("mean_stage", "mean stage", 2),
    ("acceptance", "acceptance", 2),
)
_DECODING_NOTE = (
    "Full depth runs every stage for every token. A prefix stops after some of them. Wand lets a token exit "
    "early where its margin is large; agreement is the share of held-out tokens that full depth has too. "
    "Speculation drafts tokens and verifies them at full depth: its text is that of full depth."
)


def write_report(
    path: Path,
    staged: RunData,
    backprop: RunData | None,
    comparison: Mapping[str, Any] | None,
    decoding: Mapping[str, Any] | None = None,
    shares: Mapping[str, Any] | None = None,
) -> Path:
    """Write the report to `path` and its figures beside it, and return `path`.

    `shares` are what each layer of a fine-tuned run learned and forgot (`training/layer_shares.py`).
    """
    compared = comparison_numbers(comparison)
    numbers = table_html(all_numbers(staged, backprop)) + (table_html(compared) if compared else "")
    after = [
        ("numbers", "All the numbers", numbers),
        ("samples", "Samples", _samples(comparison)),
        ("decoding", "As much depth as a token needs", decoding_html(decoding)),
        ("configuration", "Configuration", table_html(settings(staged, backprop), "settings")),
    ]
    title = f"{staged.name} against {backprop.name}" if backprop else staged.name
    tiles = _unequal_steps(staged, backprop) + _tiles(staged, backprop, comparison)
    return write_figures(
        path,
        (title, _lead(staged, backprop), tiles),
        lambda: _panels(staged, backprop, comparison, shares),
        after=after,
    )


def write_figures(
    path: Path,
    document_head: tuple[str, str, str],
    draw: Callable[[], Iterable[Panel | None]],
    *,
    before: Sequence[Part] = (),
    after: Sequence[Part] = (),
    saved: bool = True,
    images: bool = False,
) -> Path:
    """Write a page of title, lead and tiles, and of figures between other parts; returns its path.

    `draw` makes the panels; None is none. With `saved` their figures are files beside the page too, and those
    of an earlier page that are left out now are removed. The same data gives the same bytes.
    """
    with style():
        panels = [panel for panel in draw() if panel is not None]
        drawn = {panel.name: render(panel.figure) for panel in panels if panel.figure is not None}
    shown = [panel for panel in panels if panel.name in drawn or panel.table is not None]
    first, last = ([part for part in parts if part[2]] for parts in (before, after))
    links = [*(part[:2] for part in first), *((p.name, p.title) for p in shown), *(part[:2] for part in last)]
    figures = [figure_html(panel, drawn.get(panel.name)) for panel in shown]
    sections = [*(section(*part) for part in first), *figures, *(section(*part) for part in last)]
    title, lead, tiles = document_head
    page = document(title, lead, links, [*sections, *_omitted(panels, shown)], tiles, images)
    return write_page(path, page, panels if saved else (), drawn)


def write_page(
    path: Path, page: str, panels: Iterable[Panel] = (), drawn: Mapping[str, Drawing] | None = None
) -> Path:
    """Write a page whole or not at all, and return its path; its figures go beside it, before it.

    Figures that were left out are removed.
    """
    figures = path.parent / "figures"
    try:
        for panel in panels:
            figures.mkdir(parents=True, exist_ok=True)
            if drawn is not None and panel.name in drawn:
                write_atomic(figures / f"{panel.name}.svg", drawn[panel.name].svg)
                write_atomic(figures / f"{panel.name}.png", drawn[panel.name].png)
            else:
                for suffix in ("svg", "png"):
                    (figures / f"{panel.name}.{suffix}").unlink(missing_ok=True)
        write_atomic(path, page)
    except OSError as problem:
        raise RunError(
            f"cannot write {path} ({problem.strerror})",
            setting="out",
            given=str(path),
            remedy="name a file in a folder that exists, has room and can be written",
        ) from None
    return path


def _panels(
    staged: RunData,
    backprop: RunData | None,
    comparison: Mapping[str, Any] | None,
    shares: Mapping[str, Any] | None,
) -> tuple[Panel | None, ...]:
    return (
        loss_panel(staged, backprop),
        forgetting_panel(staged),
        layers_panel(shares),
        prefix_panel(staged, backprop),
        core_panel(staged, backprop),
        gap_panel(staged, backprop),
        reliability_panel(staged, backprop),
        memory_panel(comparison, stage_count(staged)),
        rank_panel(staged, backprop),
        precision_panel(staged),
    )


def _unequal_steps(staged: RunData, backprop: RunData | None) -> str:
    """A warning where the two runs were not trained equally long; empty if they were."""
    if backprop is None:
        return ""
    ours, theirs = (number(run.evaluation.get("steps")) for run in (staged, backprop))
    if ours == theirs or not (math.isfinite(ours) and math.isfinite(theirs)):
        return ""
    return (
        f'<p class="warning">The staged run was trained for {whole(ours)} steps and the backprop run for '
        f"{whole(theirs)}: the gap between them is also one of training, and not of the method alone.</p>"
    )


def _lead(staged: RunData, backprop: RunData | None) -> str:
    """What was trained and how, in a few sentences."""
    stages = stage_count(staged)
    cut = _cut(staged.config)
    steps = number(staged.evaluation.get("steps"))
    trained = f" It was trained for {whole(steps)} steps." if math.isfinite(steps) else ""
    if stages > 1:
        what = (
            f"This language model is cut into {stages} stages{cut}. Each has a loss of its own, and no "
            "gradient crosses from one to the one before unless the configuration lets it. So each stage "
            "ends in a prediction, and the first stages are a smaller model on their own."
        )
    else:
        what = f"This language model is one stage{cut}: plain backprop through all its layers."
    how = staged.evaluation.get("predicts_by")
    predicts = f" It predicts by {how}." if stages > 1 and isinstance(how, str) else ""
    other = " It is compared with the run that trains all layers by backprop." if backprop else ""
    return f"{what}{predicts}{trained}{other}"


def _cut(config: Mapping[str, Any]) -> str:
    """How the layers are cut, as the settings say it."""
    table = config.get("topology", config)
    graph, partition = entry(table, "graph"), entry(table, "partition")
    if isinstance(graph, str) and graph != "chain":
        return f" (a {graph})" if graph in ("forest", "cover") else f" ({graph})"
    return f" (partition {partition})" if isinstance(partition, str | int) else ""


def _tiles(staged: RunData, backprop: RunData | None, comparison: Mapping[str, Any] | None) -> str:
    """The few numbers to remember."""
    time, memory = (
        number(entry(comparison, *keys)) for keys in (("step_time_ratio", "median"), ("memory", "ratio"))
    )
    tiles = [("bits per byte, staged", fixed(bpb_prediction(staged.evaluation.get("bpb"))))]
    if backprop:
        tiles.append(("bits per byte, backprop", fixed(bpb_prediction(backprop.evaluation.get("bpb")))))
    gap = gap_percent(staged, backprop, comparison)
    tiles += [("gap to backprop", percent(gap))] if math.isfinite(gap) else []
    tiles += [("step time over backprop's", fixed(time, 2))] if math.isfinite(time) else []
    tiles += [("memory over backprop's", fixed(memory, 2))] if math.isfinite(memory) else []
    return tiles_html(tiles)


def _omitted(panels: Sequence[Panel], shown: Sequence[Panel]) -> list[str]:
    """A list of the panels that are left out, with the reasons."""
    reasons = "".join(
        f"<li>{escape(panel.title)}: {escape(panel.caption.removeprefix('Left out: '))}</li>"
        for panel in panels
        if panel not in shown
    )
    summary = "<summary>Figures that are left out, and why</summary>"
    return [f'<details class="omitted">{summary}<ul>{reasons}</ul></details>'] if reasons else []


def figure_html(panel: Panel, drawing: Drawing | None) -> str:
    """A section with the figure, its caption and its numbers; without a figure, the caption and numbers."""
    numbers = table_html(panel.table) if panel.table else ""
    if drawing is None:
        return section(panel.name, panel.title, f'<p class="missing">{escape(panel.caption)}</p>{numbers}')
    broad = _inline(drawing.svg, panel.name, panel.alt, "broad")
    narrow = _inline(drawing.narrow, f"{panel.name}-narrow", panel.alt, "narrow")
    body = (
        f'<figure>\n<div class="plot">{broad}\n{narrow}</div>\n'
        f"<figcaption>{escape(panel.caption)}</figcaption>\n</figure>\n"
        f"<details><summary>The numbers of this figure</summary>{numbers}</details>"
    )
    return section(panel.name, panel.title, body)


def _inline(svg: str, name: str, alt: str, layout: str) -> str:
    """An SVG file as an element of the page: described, and with ids that no other figure has."""
    element = re.sub(r"<!--.*?-->\n?", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    element = re.sub(r'\bid="', f'id="{name}-', element)
    element = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", element)
    return element.replace("<svg", f'<svg class="{layout}" role="img" aria-label="{escape(alt)}"', 1).strip()


def _samples(comparison: Mapping[str, Any] | None) -> str:
    """Text that each prefix wrote, the prompt marked; empty if there is none."""
    recorded = entry(comparison, "samples")
    blocks = []
    for sample in recorded if isinstance(recorded, list | tuple) else ():
        prompt, text = (str(entry(sample, key) or "") for key in ("prompt", "text"))
        written = text.removeprefix(prompt)
        blocks.append(
            f'<figure class="sample"><figcaption>{escape(entry(sample, "title") or "sample")}</figcaption>'
            f"<pre><b>{escape(prompt)}</b>{escape(written)}</pre></figure>"
        )
    note = '<p class="note">Each block begins with its prompt, in colour; the model wrote the rest.</p>'
    return note + "\n".join(blocks) if blocks else ""


def decoding_html(decoding: Mapping[str, Any] | None) -> str:
    """Speeds of the packaged model and a coloured text; empty if nothing was measured."""
    ways = entry(decoding, "bench", "ways")
    if not isinstance(ways, list) or not ways:
        return ""
    table = Table(
        "Decode strategies of the packaged model, one text at a time",
        ("way", *(name for _, name, _ in _DECODING_COLUMNS)),
        tuple(
            (
                str(entry(way, "way") or DASH),
                *(_cell(way, key, digits) for key, _, digits in _DECODING_COLUMNS),
            )
            for way in ways
        ),
    )
    note = f'<p class="note">{escape(_DECODING_NOTE)}</p>'
    return f"{note}{table_html(table)}{_coloured_text(entry(decoding, 'picture'))}"


def _cell(way: object, key: str, digits: int) -> str:
    value = number(entry(way, key))
    return fixed(value, digits) if digits else whole(value)


def _coloured_text(picture: object) -> str:
    """The text coloured by exit; empty if it is missing or incomplete."""
    pieces, stages = entry(picture, "pieces"), entry(picture, "stages")
    if not isinstance(pieces, list) or not isinstance(stages, int):
        return ""
    try:
        whole_pieces = [(str(text), int(left)) for text, left in pieces]
        return depth_fragment(str(entry(picture, "prompt") or ""), whole_pieces, stages)
    except (TypeError, ValueError):
        return ""
