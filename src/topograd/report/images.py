"""Report of a run on images: accuracy by exit, early exit, calibration, and examples.

Images are PNG files written into the page as data, which its content policy allows and nothing else; each is
shown with its label, the stage's prediction, and its confidence. The rest is as in `page.py`.
"""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.image import imsave

from topograd.report.data import RunData, entry, number, numbers, stage_count
from topograd.report.drawing import BACKPROP, legend_below, look, new_figure, panels
from topograd.report.figures import Panel, loss_panel
from topograd.report.markup import escape, table_html, tiles_html
from topograd.report.page import write_figures
from topograd.report.stage_figures import reliability_panel
from topograd.report.tables import Table, all_numbers, fixed, settings, whole


def write_image_report(path: Path, run: RunData, against: RunData | None, shown: Mapping[str, Any]) -> Path:
    """Write the report of `run` to `path`, maybe beside another run, with the examples in `shown`."""
    names = [run.name, *([against.name] if against else [])]
    after = [
        ("examples", "What each stage gets right and wrong", _examples(shown)),
        ("exits", "Early exits", _leaving(shown)),
        ("numbers", "All the numbers", table_html(all_numbers(run, against, names))),
        ("configuration", "Configuration", table_html(settings(run, against), "settings")),
    ]
    head = (" against ".join(names), _lead(run), _tiles(run, against, shown))
    return write_figures(path, head, lambda: _panels(run, against), after=after, images=True)


def _lead(run: RunData) -> str:
    stages, steps = stage_count(run), number(run.evaluation.get("steps"))
    model, partition = entry(run.config, "model", "kind"), entry(run.config, "topology", "partition")
    cut = (
        f"is cut into {stages} stages (partition {partition}), each with a loss of its own"
        if stages > 1
        else "is one stage: plain backprop"
    )
    trained = f" It was trained for {whole(steps)} steps." if math.isfinite(steps) else ""
    judged = "Accuracy is that on images it was not trained on."
    return f"This network on images ({model}) {cut}.{trained} {judged}"


def _share(value: object) -> str:
    share = number(value)
    return f"{fixed(100 * share, 2)}\u00a0%" if math.isfinite(share) else fixed(share)


def _tiles(run: RunData, against: RunData | None, shown: Mapping[str, Any]) -> str:
    accuracy = run.evaluation.get("accuracy")
    tiles = [("accuracy", _share(entry(accuracy, "prediction")))]
    prefix = entry(accuracy, "prefix")
    if isinstance(prefix, list) and len(prefix) > 1:
        tiles.append(("accuracy of the first stage", _share(prefix[0])))
    curve = _curve(run)
    near = [point for point in curve if number(point.get("threshold")) == number(shown.get("threshold"))]
    if near:
        tiles.append((f"mean depth, leaving at {near[0]['threshold']:g}", _share(near[0].get("depth"))))
    if against:
        tiles.append(
            (f"accuracy, {against.name}", _share(entry(against.evaluation, "accuracy", "prediction")))
        )
    return tiles_html(tiles)


def _panels(run: RunData, against: RunData | None) -> tuple[Panel, ...]:
    loss = loss_panel(run, against)
    if loss.figure is not None:
        loss.figure.axes[0].set_ylabel("nats per image")
    return loss, _accuracy_panel(run, against), _exit_panel(run), reliability_panel(run, against)


def _accuracy_panel(run: RunData, against: RunData | None) -> Panel:
    name, title = "accuracy", "Accuracy of each exit"
    prefix = numbers(entry(run.evaluation, "accuracy", "prefix"))
    if not prefix:
        return Panel(name, title, "Left out: the run was not evaluated.")
    figure = new_figure(3.0)
    axes = panels(figure, 1)[0]
    places = np.arange(1, len(prefix) + 1)
    colours = [look(k, len(prefix)).colour for k in range(len(prefix))]
    axes.bar(places, [100 * value for value in prefix], color=colours, width=0.6)
    for place, value in zip(places, prefix, strict=True):
        axes.annotate(f"{100 * value:.2f}", (place, 100 * value), ha="center", va="bottom")
    axes.set(ylabel="accuracy, %", xticks=places, xlabel="exit after stage")
    finite = [100 * value for value in prefix if math.isfinite(value)] or [0.0]
    other = number(entry(against.evaluation, "accuracy", "prediction")) if against else math.nan
    if math.isfinite(other):
        axes.axhline(100 * other, color=BACKPROP, linewidth=1.4, label=f"{against.name}" if against else "")
        legend_below(figure, axes)
        finite.append(100 * other)
    axes.set_ylim(max(min(finite) - 5, 0), min(max(finite) + 3, 103))
    rows = tuple((f"exit after stage {k + 1}", _share(value)) for k, value in enumerate(prefix))
    table = Table("Accuracy on held-out images", ("exit", "accuracy"), rows)
    alt = "Accuracy of each exit: " + ", ".join(f"{100 * value:.2f} %" for value in prefix)
    caption = "The share of held-out images that the network names right when it stops after each stage."
    return Panel(name, title, caption, figure, alt, table)


def _curve(run: RunData) -> list[Mapping[str, Any]]:
    exits = run.evaluation.get("exits")
    return [point for point in exits if isinstance(point, Mapping)] if isinstance(exits, list) else []


def _exit_panel(run: RunData) -> Panel:
    name, title = "exit-curve", "Accuracy against depth"
    curve = _curve(run)
    if not curve:
        return Panel(name, title, "Left out: the network has one exit.")
    depth = [100 * number(point.get("depth")) for point in curve]
    hits = [100 * number(point.get("accuracy")) for point in curve]
    figure = new_figure(3.2)
    axes = panels(figure, 1)[0]
    axes.plot(depth, hits, marker="o", color=look(0, 2).colour)
    for x, y, point in zip(depth, hits, curve, strict=True):
        axes.annotate(
            f"{number(point.get('threshold')):g}", (x, y), textcoords="offset points", xytext=(4, -10)
        )
    axes.set(xlabel="mean share of the layers that ran, %", ylabel="accuracy, %")
    rows = tuple(
        (f"{number(p.get('threshold')):g}", _share(p.get("accuracy")), _share(p.get("depth"))) for p in curve
    )
    table = Table("Early exit by confidence", ("leave at", "accuracy", "mean depth"), rows)
    caption = (
        "An image leaves at the first stage whose largest probability reaches the number beside the point. "
        "Higher and further to the left is better."
    )
    alt = "Accuracy against mean depth: " + "; ".join(
        f"{y:.2f} % at {x:.0f} %" for x, y in zip(depth, hits, strict=True)
    )
    return Panel(name, title, caption, figure, alt, table)


def _examples(shown: Mapping[str, Any]) -> str:
    blocks = []
    for k, stage in enumerate(shown["stages"], start=1):
        won = "that the stage before got wrong" if stage.get("corrected") else "the least sure first"
        blocks.append(f"<h3>Stage {k}: {_share(stage['accuracy'])} right</h3>")
        blocks.append(f'<p class="note">Right, {won}:</p>{_gallery(stage["right"])}')
        blocks.append(f'<p class="note">Wrong, the surest first:</p>{_gallery(stage["wrong"])}')
    looked = f'<p class="note">Chosen among {whole(number(shown["looked_through"]))} held-out images.</p>'
    return looked + "\n".join(blocks)


def _leaving(shown: Mapping[str, Any]) -> str:
    stages = shown["stages"]
    if len(stages) < 2:
        return '<p class="missing">The network has one exit.</p>'
    blocks = []
    for k, stage in enumerate(stages, start=1):
        words = f"After stage {k}: {_share(stage['share'])} of the images"
        if stage["accuracy_of_leaving"] is not None:
            words += f", {_share(stage['accuracy_of_leaving'])} of them right"
        blocks.append(f"<h3>{escape(words)}</h3>{_gallery(stage['leaving'])}")
    sure = 100 * number(shown["threshold"])
    note = f"An image leaves as soon as a stage is {sure:g} % sure; the least sure first."
    return f'<p class="note">{escape(note)}</p>' + "\n".join(blocks)


def _gallery(records: Sequence[Mapping[str, Any]]) -> str:
    if not records:
        return '<p class="missing">None among those that were looked through.</p>'
    return f'<div class="gallery">{"".join(map(_example, records))}</div>'


def _example(record: Mapping[str, Any]) -> str:
    label, guess = record["label"], record["guess"]
    sure = f"{100 * number(record['confidence']):.0f} %"
    words = f"{label}, {sure}" if label == guess else f"{label}, not {guess}: {sure}"
    data = base64.b64encode(png(record["pixels"])).decode()
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="an image of class {escape(label)}">'
        f"<figcaption>{escape(words)}</figcaption></figure>"
    )


def png(pixels: Sequence[Any]) -> bytes:
    """An image (channels, height, width) of bytes as a PNG file; one channel is grey."""
    array = np.asarray(pixels, dtype=np.uint8)
    file = io.BytesIO()
    if len(array) == 3:
        imsave(file, np.moveaxis(array, 0, -1), format="png")
    else:
        imsave(file, array[0], format="png", cmap="gray", vmin=0, vmax=255)
    return file.getvalue()
