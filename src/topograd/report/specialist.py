"""The report of a specialist: what it learned, and that its base did not move while it did.

It reads what `finetune` keeps in the specialist's folder: a loss for each step, and for each checkpoint what
the base still is, by itself and with the specialist on. The page stands alone, as the others do.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from topograd.report.drawing import BACKPROP, legend_below, look, new_figure, panels, whole_steps
from topograd.report.figures import Panel
from topograd.report.markup import table_html, tiles_html
from topograd.report.page import write_figures
from topograd.report.tables import Table, fixed, read_row

Records = Sequence[Mapping[str, Any]]
Row = Mapping[str, Any]


def write_specialist_report(path: Path, name: str, settings: Row, base: str, records: Records) -> Path:
    """Write the report of the specialist `name`, trained as `records` say, to `path`."""
    losses = [record for record in records if record["kind"] == "train"]
    readings = [record for record in records if record["kind"] == "preservation"]
    rows = tuple((key, str(value)) for key, value in sorted(settings.items()))
    table = Table("As topograd_adapter.json has it", ("setting", "value"), rows)
    return write_figures(
        path,
        (f"{name}: a specialist", _lead(base, settings, readings), _tiles(readings, losses)),
        lambda: (_loss_panel(losses), _base_panel(readings), _tasks_panel(readings)),
        before=[("checkpoints", "The base at every checkpoint", table_html(checkpoints(readings)))],
        after=[("configuration", "Configuration", table_html(table, "settings"))],
    )


def checkpoints(readings: Records) -> Table:
    """A row for each checkpoint, of which there is at least one: the base by itself, then with it on."""
    tasks = list(readings[-1].get("base_tasks", ()))
    names = ("step", "base Δ logit", "base BPB", "base, questions")
    with_it = ("BPB with it", "questions with it")
    each = [name for task in tasks for name in (f"base {task}", f"{task} with it")]
    rows = tuple(
        (
            str(row["step"]),
            fixed(row["base_max_abs_logit_delta"], 4),
            fixed(row["base_bpb"], 4),
            fixed(row["base_choices"], 3),
            fixed(row["bpb"], 4),
            fixed(row["choices"], 3),
            *(fixed(row[which][task], 3) for task in tasks for which in ("base_tasks", "tasks")),
        )
        for row in readings
    )
    caption = (
        "Δ is the largest change, 0.0000 with every bit the same; questions and tasks are shares that are "
        "answered right."
    )
    return Table(caption, (*names, *with_it, *each), rows)


def _lead(base: str, settings: Row, readings: Records) -> str:
    head = "a whole head" if settings["head_rank"] is None else f"a head of rank {settings['head_rank']}"
    moved = [row for row in readings if not row["base_bit_identical"]]
    proof = (
        f"At all {len(readings)} checkpoints the base's logits on the probe set had the same bits as before."
        if not moved
        else f"The base's logits had changed at {len(moved)} of {len(readings)} checkpoints."
    )
    return f"{settings['layers']} layers and {head} behind the frozen base {base}. {proof}"


def _tiles(readings: Records, losses: Records) -> str:
    last = readings[-1]
    tiles = [
        ("largest change of a base logit", fixed(max(r["base_max_abs_logit_delta"] for r in readings), 4)),
        ("base BPB", fixed(last["base_bpb"], 4)),
        ("BPB with it", fixed(last["bpb"], 4)),
    ]
    return tiles_html(tiles + ([("loss", fixed(losses[-1]["loss"], 3))] if losses else []))


def _loss_panel(losses: Records) -> Panel:
    name, title = "loss", "Training loss"
    if not losses:
        return Panel(name, title, "Left out: it was not trained.")
    figure = new_figure(3.0)
    (axes,) = panels(figure, 1)
    drawn = look(0, 1)
    axes.plot([r["step"] for r in losses], [r["loss"] for r in losses], color=drawn.colour, linewidth=1.4)
    axes.set_ylabel("nats per token")
    whole_steps(axes)
    picked = [losses[i] for i in np.unique(np.linspace(0, len(losses) - 1, 12).astype(int))]
    table = Table(title, ("step", "loss"), tuple((str(r["step"]), fixed(r["loss"], 3)) for r in picked))
    caption = (
        "The loss of the specialist on its own text, of what the assistant says alone where it is a chat."
    )
    return Panel(name, title, caption, figure, f"{title}. {read_row(table, -1)}", table)


def _base_panel(readings: Records) -> Panel:
    figure = new_figure(3.4)
    left, right = panels(figure, 2)
    steps = [row["step"] for row in readings]
    left.plot(steps, [row["base_max_abs_logit_delta"] for row in readings], color=BACKPROP, marker="o")
    left.set(title="Largest change of a base logit", ylabel="logits")
    _pair(right, steps, [(r["base_bpb"], r["bpb"]) for r in readings], "base", "with the specialist")
    right.set(title="Probe sentences", ylabel="bits per byte")
    for axes in (left, right):
        whole_steps(axes)
    left.set_ylim(bottom=min(0.0, left.get_ylim()[0]))
    legend_below(figure, right)
    rows = tuple((str(r["step"]), fixed(r["base_bpb"], 4), fixed(r["bpb"], 4)) for r in readings)
    table = Table("Bits per byte", ("step", "base", "with the specialist"), rows)
    caption = (
        "Left: how far the base's own path moved since before the training; 0 is every bit the same. Right: "
        "bits per byte of sentences that it was not trained on, without the specialist and with it on."
    )
    return Panel(
        "base", "Did the base move?", caption, figure, f"Base over steps. {read_row(table, -1)}", table
    )


def _tasks_panel(readings: Records) -> Panel | None:
    """Zero-shot tasks over the checkpoints, if there are any."""
    tasks = list(readings[-1].get("base_tasks", ()))
    if not tasks:
        return None
    figure = new_figure(3.2)
    for axes, task in zip(panels(figure, len(tasks)), tasks, strict=True):
        pairs = [(row["base_tasks"][task], row["tasks"][task]) for row in readings]
        _pair(axes, [row["step"] for row in readings], pairs, "base", "with the specialist")
        axes.set(title=task, ylim=(0, 1))
        whole_steps(axes)
    legend_below(figure, figure.axes[0])
    last = readings[-1]
    rows = tuple((t, fixed(last["base_tasks"][t], 3), fixed(last["tasks"][t], 3)) for t in tasks)
    table = Table("Accuracy at the last checkpoint", ("task", "base", "with the specialist"), rows)
    caption = "Zero-shot accuracy on some items of each task."
    return Panel("tasks", "Zero-shot tasks", caption, figure, f"Accuracy. {read_row(table, 0)}", table)


def _pair(axes: Any, steps: Sequence[int], pairs: Sequence[tuple[float, float]], *names: str) -> None:
    for i, name in enumerate(names):
        drawn = look(i, len(names))
        values = [pair[i] for pair in pairs]
        axes.plot(steps, values, color=drawn.colour, linestyle=drawn.dash, marker=drawn.marker, label=name)
