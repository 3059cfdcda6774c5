"""Page of a Pareto search: configurations by two properties that the reader chooses, with the front.

It reads the plain record of `topograd search pareto --json`: `trials`, `objectives` and `space`. The
page stands alone, as a report does: no script, nothing loaded, every text escaped. The plot is in
`pareto_plot`; a table below it has every number.
"""

from collections.abc import Sequence
from pathlib import Path

from topograd.report.drawing import look
from topograd.report.markup import document, escape, section, table_html, tiles_html
from topograd.report.page import write_page
from topograd.report.pareto_plot import KINDS, STYLE, Axis, Record, Trial, field_html, kind_of, rules
from topograd.report.tables import DASH, Table, whole


def write_pareto(path: Path, record: Record) -> Path:
    """Write the page and return its path. The same record gives the same bytes."""
    return write_page(path, _page(record))


def _page(record: Record) -> str:
    measured, axes = _measured(record)
    lead = (
        "Each mark is one configuration: where gradients stop, and the settings beside it. On the front are "
        "those that no other beats: none is better in one objective and at least as good in all. Only "
        "configurations that trained to the end are compared for that."
    )
    links = [("plot", "Two properties"), ("table", "Every configuration")]
    bodies = (_plot(measured, axes), table_html(trials_table(record)))
    parts = [section(*link, body) for link, body in zip(links, bodies, strict=True)]
    return document("Pareto front", lead, links, parts, _tiles(record, axes))


def _measured(record: Record) -> tuple[list[Trial], list[Axis]]:
    """The trials that have every objective, the best first, and an axis for each objective."""
    objectives = record["objectives"]
    trials = [trial for trial in record["trials"] if set(objectives) <= set(trial["values"])]
    axes = [Axis.of(key, direction, trials) for key, direction in objectives.items()] if trials else []
    return sorted(trials, key=lambda trial: _rank(trial, axes)), axes


def _rank(trial: Trial, axes: Sequence[Axis]) -> tuple[int, float, int]:
    """The front first, then what trained to the end; among equals the best in the first objective."""
    return list(KINDS).index(kind_of(trial)), axes[0].sign * axes[0].read(trial), trial["number"]


def _tiles(record: Record, axes: Sequence[Axis]) -> str:
    trials = record["trials"]
    done = [trial for trial in trials if trial["state"] == "complete"]
    tiles = [
        ("configurations tried", f"{whole(len(trials))} of {whole(record['space'])}"),
        ("trained to the end", whole(len(done))),
        ("on the front", whole(sum(trial["on_front"] for trial in trials))),
    ]
    if done:
        first = axes[0]
        best = min(done, key=lambda trial: first.sign * first.read(trial))
        tiles.append((f"best {first.name}, by {_parts(best)}", first.text(first.read(best))))
    return tiles_html(tiles)


def trials_table(record: Record) -> Table:
    """Every trial: its partition, its settings, and what it came to."""
    trials, axes = _measured(record)
    trials += [trial for trial in record["trials"] if trial not in trials]
    settings = list(dict.fromkeys(name for trial in trials for name in trial["settings"]))
    rows = []
    for trial in trials:
        values = [axis.text(axis.read(trial)) if axis.key in trial["values"] else DASH for axis in axes]
        values = values or [DASH] * len(record["objectives"])
        chosen = [str(trial["settings"].get(name, DASH)) for name in settings]
        about = (str(trial["number"]), _parts(trial), _outcome(trial))
        rows.append((*about, *values, whole(trial["steps"]), *chosen))
    names = [name.replace("_", " ") for name in (*record["objectives"], "steps", *settings)]
    caption = "The front first, then what trained to the end; the best in the first objective on top"
    return Table(caption, ("trial", "partition", "outcome", *names), tuple(rows))


def _plot(trials: Sequence[Trial], axes: Sequence[Axis]) -> str:
    """The choice of two properties, the field with its marks, and a card for each of them."""
    if len(axes) < 2:
        why = "the study has one objective, and a plot needs two" if trials else "nothing is measured yet"
        return f'<p class="missing">Left out: {why}.</p>'
    facts = [_facts(trial, axes) for trial in trials]
    names = [", ".join(f"{name} {value}" for name, value in pairs) for pairs in facts]
    looks = [f'<span><span class="mark {kind}"></span> {words}</span>' for kind, words in KINDS.items()]
    caption = (
        "The line is the front of the two shown properties alone; the marks on the front are that by all the "
        "objectives. Configurations that are not at the end are drawn with what they had when they were last "
        "compared. Marks that would cover one another step aside, to the poorer side."
    )
    cards = [_card(trial, pairs) for trial, pairs in zip(trials, facts, strict=True)]
    return "\n".join(
        [
            f"<style>{STYLE}{rules(len(axes))}</style>",
            '<div class="pareto">',
            _choice("across", axes, chosen=1),
            _choice("up", axes, chosen=0),
            f'<figure><div class="board" style="--facts:{max(map(len, facts))}">',
            f'<div class="plot">{field_html(trials, axes, names, cards)}</div>',
            '<p class="card hint">Point at a mark to see its configuration. Choose it, with a click or with '
            "the arrow keys, to keep it here.</p></div>",
            f'<figcaption><p class="legend">{"".join(looks)}</p>{caption}</figcaption>',
            "</figure></div>",
        ]
    )


def _choice(side: str, axes: Sequence[Axis], chosen: int) -> str:
    buttons = "".join(
        f'<label><input type="radio" name="{side}" id="{side}-{i}"{" checked" if i == chosen else ""}> '
        f"{escape(axis.name)}</label>"
        for i, axis in enumerate(axes)
    )
    return f'<fieldset class="choice"><legend>{side.capitalize()}</legend>{buttons}</fieldset>'


def _facts(trial: Trial, axes: Sequence[Axis]) -> list[tuple[str, str]]:
    """What a configuration is and what it came to, as names and words."""
    return [
        ("partition", _parts(trial)),
        *((name.replace("_", " "), str(value)) for name, value in trial["settings"].items()),
        *((axis.name, axis.text(axis.read(trial))) for axis in axes),
        ("steps", whole(trial["steps"])),
        ("outcome", _outcome(trial)),
    ]


def _card(trial: Trial, facts: Sequence[tuple[str, str]]) -> str:
    """The facts, under the stages as blocks that are as wide as they are deep."""
    depths = trial["partition"]
    blocks = "".join(
        f'<span style="flex:{depth};background:{look(k, len(depths)).colour}"></span>'
        for k, depth in enumerate(depths)
    )
    pairs = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    number = trial["number"]
    return (
        f'<div class="card" id="card-{number}"><h3>Trial {number}</h3>'
        f'<div class="stages" aria-hidden="true">{blocks}</div><dl>{pairs}</dl></div>'
    )


def _outcome(trial: Trial) -> str:
    if trial["state"] == "complete":
        return "on the front" if trial["on_front"] else "beaten"
    return "under way" if trial["state"] == "running" else "stopped early"


def _parts(trial: Trial) -> str:
    return ",".join(map(str, trial["partition"]))
