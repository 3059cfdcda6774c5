"""Pieces of HTML that pages are made of. Every text that goes in is escaped."""

import html

from topograd.report.tables import Table

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The content policy of every page: no script, nothing loaded."""
_CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}


def escape(value: object) -> str:
    """Text that is safe in HTML and in attributes. Control characters become their visible pictures."""
    text = str(value).encode("utf-8", "replace").decode()  # a lone surrogate becomes "?"
    return html.escape(text.translate(_CONTROL))


def section(anchor: str, title: str, body: str) -> str:
    """A part of a page, with a heading; `body` is HTML."""
    heading = f'<h2 id="{anchor}-title">{escape(title)}</h2>'
    return f'<section id="{anchor}" aria-labelledby="{anchor}-title">\n{heading}\n{body}\n</section>'


def table_html(table: Table, kind: str = "") -> str:
    """A table with its caption."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.header)
    lines = []
    for row in table.rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        lines.append(f'<tr><th scope="row">{escape(row[0])}</th>{cells}</tr>')
    name = f' class="{kind}"' if kind else ""
    return (
        f'<div class="wide"><table{name}><caption>{escape(table.caption)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n" + "\n".join(lines) + "\n</tbody></table></div>"
    )
