"""HTML fragments and the stylesheet of the pages: system fonts, one column, light and dark, figures on white.

Every text that goes in is escaped. On a narrow screen figures have another layout and wide tables stack.
"""

import html
import re
from collections.abc import Iterable, Sequence
from importlib import resources

from topograd.report.tables import Table

STYLESHEET = "\n" + (resources.files("topograd.report") / "page.css").read_text("utf-8")
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The content policy of every page: no script, nothing loaded."""
_NUMERIC = re.compile(r"[^A-Za-z]*(?:(?:to|from|e|s|ms|bytes|[KMGT]iB)[^A-Za-z]*)*")
_MAX_BESIDE = 3  # columns that fit a phone; a wider table is stacked there
_CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}


def escape(value: object) -> str:
    """Text that is safe in HTML and in attributes. Control characters become visible symbols."""
    text = str(value).encode("utf-8", "replace").decode()  # a lone surrogate becomes "?"
    return html.escape(text.translate(_CONTROL))


def document(
    title: str,
    lead: str,
    links: Iterable[tuple[str, str]],
    parts: Iterable[str],
    tiles: str = "",
    images: bool = False,
) -> str:
    """A whole page: its title, a paragraph in plain words, tiles, contents (anchor, words), and its parts.

    With `images` it may hold some, written into the page itself; still nothing is loaded.
    """
    policy = f"{POLICY}; img-src data:" if images else POLICY
    items = "".join(f'<li><a href="#{anchor}">{escape(words)}</a></li>' for anchor, words in links)
    contents = f'<nav aria-label="Contents"><ul>{items}</ul></nav>\n' if items else ""
    lines = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLESHEET}</style>\n</head>\n<body>\n<header>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(lead)}</p>' if lead else "",
        tiles,
        f"{contents}</header>\n<main>",
        *parts,
        "</main>\n</body>\n</html>\n",
    ]
    return "\n".join(line for line in lines if line)


def tiles_html(tiles: Sequence[tuple[str, str]]) -> str:
    """The few numbers to remember, each under its name."""
    cells = "".join(f"<div><dt>{escape(term)}</dt><dd>{escape(value)}</dd></div>" for term, value in tiles)
    return f'<dl class="tiles">{cells}</dl>'


def section(anchor: str, title: str, body: str) -> str:
    """A part of a page, with a heading; `body` is HTML."""
    heading = f'<h2 id="{anchor}-title">{escape(title)}</h2>'
    return f'<section id="{anchor}" aria-labelledby="{anchor}-title">\n{heading}\n{body}\n</section>'


def table_html(table: Table, kind: str = "") -> str:
    """A table with its caption: numbers right-aligned, text left-aligned; wide ones stack on a phone."""
    columns = range(len(table.header))
    text = [any(not _NUMERIC.fullmatch(row[c]) for row in table.rows) for c in columns]
    stack = len(columns) > _MAX_BESIDE and kind != "settings"
    left = [' class="text"' if prose else "" for prose in text]
    name = [f' data-label="{escape(cell)}"' if stack else "" for cell in table.header]
    head = "".join(f'<th scope="col"{left[c] if c else ""}>{escape(table.header[c])}</th>' for c in columns)
    lines = []
    for row in table.rows:
        cells = "".join(f"<td{left[c]}{name[c]}>{escape(row[c])}</td>" for c in columns[1:])
        lines.append(f'<tr><th scope="row">{escape(row[0])}</th>{cells}</tr>')
    kinds = " ".join(filter(None, (kind, "stack" if stack else "")))
    look = f' class="{kinds}"' if kinds else ""
    return (
        f'<div class="wide"><table{look}><caption>{escape(table.caption)}'
        f"</caption><thead><tr>{head}</tr></thead>\n<tbody>\n" + "\n".join(lines) + "\n</tbody></table></div>"
    )
