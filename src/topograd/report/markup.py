"""HTML fragments and the stylesheet of the pages: system fonts, one column, light and dark, figures on white.

Every text that goes in is escaped. On a narrow screen figures have another layout and wide tables stack.
"""

import html
import re
from collections.abc import Iterable, Sequence

from topograd.report.tables import Table

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


STYLESHEET = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1d2433; --muted: #5d6779; --line: #dfe3ea; --accent: #0067a3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12151c; --card: #1b202b; --ink: #e8ebf2; --muted: #a3adbf; --line: #323a49; --accent: #7cc4f2;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 57rem; background: var(--page); color: var(--ink);
  font: 1rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 0 0 .7rem; }
p { margin: 0 0 1rem; max-width: 46rem; }
section { margin-top: 2.75rem; }
a { color: var(--accent); }
nav ul { list-style: none; margin: 0; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; }
nav { font-size: .92rem; margin-top: 1.5rem; }
.lead, figcaption, .missing, .note { color: var(--muted); }
.tiles {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem;
  margin: 1.5rem 0; padding: 0;
}
.tiles div, .plot, pre { background: var(--card); border: 1px solid var(--line); border-radius: .75rem; }
.tiles div { padding: .8rem 1rem; display: flex; flex-direction: column; justify-content: space-between; }
.tiles dt { font-size: .84rem; line-height: 1.35; color: var(--muted); }
.tiles dd { margin: .15rem 0 0; font-size: 1.4rem; font-weight: 650; font-variant-numeric: tabular-nums; }
figure { margin: 0; }
.plot { background: #ffffff; padding: .5rem; overflow-x: auto; }
.plot svg { display: block; width: 100%; height: auto; }
.plot .narrow { display: none; }
figcaption { margin: .8rem 0 .5rem; font-size: .95rem; max-width: 46rem; }
details { margin-top: .5rem; }
summary { cursor: pointer; color: var(--accent); font-size: .92rem; }
.wide { overflow-x: auto; margin-top: .6rem; }
table {
  border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; background: var(--card);
  min-width: 60%;
}
caption { text-align: left; color: var(--muted); padding-bottom: .4rem; }
th, td { padding: .32rem .8rem; border: 1px solid var(--line); text-align: right; vertical-align: top; }
th { font-weight: 600; }
tbody th, thead th:first-child { text-align: left; font-weight: 500; }
.text { text-align: left; }
.settings th, .settings td { text-align: left; overflow-wrap: anywhere; }
.warning { border-left: 3px solid #d55e00; padding-left: .9rem; }
.advice { margin: 1.2rem 0; padding-left: 1.2rem; max-width: 46rem; }
.omitted { margin-top: 2.75rem; color: var(--muted); font-size: .92rem; }
pre {
  margin: 0; padding: .9rem 1rem;
  font: .86rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere;
}
pre b { color: var(--accent); }
.sample { margin-top: 1.1rem; }
.sample figcaption { margin: 0 0 .35rem; }
.gallery { display: flex; flex-wrap: wrap; gap: .6rem; margin: .3rem 0 1rem; }
.gallery figure { width: 4.6rem; text-align: center; }
.gallery img {
  width: 4.2rem; height: 4.2rem; object-fit: contain; image-rendering: pixelated; border: 1px solid
  var(--line);
}
.gallery figcaption { font-size: .78rem; line-height: 1.25; margin: .15rem 0 0; }
.missing { border-left: 3px solid var(--line); padding-left: .9rem; }
@media (max-width: 40rem) {
  body { padding: 1.5rem .9rem 3rem; }
  .plot .broad { display: none; }
  .plot .narrow { display: block; }
  table { width: 100%; font-size: .86rem; }
  th, td { padding: .28rem .5rem; }
  tbody th { overflow-wrap: anywhere; }
  .stack thead { position: absolute; clip-path: inset(50%); }
  .stack :is(tbody, tr, th, td) { display: block; border: 0; }
  .stack caption { display: block; }
  .stack, .stack tbody { background: none; }
  .stack tr { background: var(--card); border: 1px solid var(--line); margin-bottom: .5rem; }
  .stack tbody th { font-weight: 600; }
  .stack td { display: flex; justify-content: space-between; gap: 1rem; text-align: right; }
  .stack td::before { content: attr(data-label); color: var(--muted); text-align: left; }
  .stack td:empty { display: none; }
}
@media print { body { background: #ffffff; } section { break-inside: avoid; } }
"""
