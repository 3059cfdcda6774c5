"""`python -m papers pages`: write the generated pages of docs/results/ and docs/papers/."""

from __future__ import annotations

from dataclasses import dataclass

from papers import PROGRAM
from papers.reproduction import DOCS, site_pages
from topograd.cli.console import Json, make_folder, out, parse, print_json
from topograd.files import write_atomic


@dataclass(frozen=True, kw_only=True)
class Pages:
    """Write the index of results, the index of papers and a page for each paper into docs/."""

    json: Json = False


def run(argv: list[str]) -> int:
    """Write the pages, and return the exit code."""
    args = parse(Pages, argv, "pages", program=PROGRAM)
    pages = site_pages()
    for name, text in pages.items():
        make_folder((DOCS / name).parent)
        write_atomic(DOCS / name, text)
    if args.json:
        print_json({"pages": [str(DOCS / name) for name in pages]})
    else:
        out().print(f"{len(pages)} pages in {DOCS}", soft_wrap=True)
    return 0
