"""`llms.txt`: every page of the site with its first sentence, made from the toctrees of the index."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

GENERATED = {
    "reference/commands/index": "Commands: every command with its flags.",
    "reference/config": "Config keys: every key of a run's config.toml.",
    "reference/api/index": "Python API: signatures, types and docstrings.",
}
"""Pages that are made from the code; their sources may not be there yet."""


def page(docs: Path) -> str:
    """The file, by the captions of the index."""
    index = (docs / "index.md").read_text(encoding="utf-8")
    lines = ["# topograd", "", f"> {summary(index)}", ""]
    for caption, names in sections(index):
        lines += [f"## {caption}", ""]
        for name in expanded(docs, names):
            lines.append(f"- [{title(docs, name)}]({name}.html): {about(docs, name)}")
        lines.append("")
    return "\n".join(lines)


def sections(index: str) -> Iterator[tuple[str, list[str]]]:
    """Caption and pages of each toctree."""
    for block in re.findall(r"^```\{toctree\}\n(.*?)^```", index, re.MULTILINE | re.DOTALL):
        caption = re.search(r":caption: (.*)", block)
        yield (
            caption[1] if caption else "Pages",
            [line for line in block.split("\n\n", 1)[1].splitlines() if line],
        )


def expanded(docs: Path, names: list[str]) -> Iterator[str]:
    """These pages; the index of results or papers is followed by the pages of its folder."""
    for name in names:
        yield name
        folder, _, last = name.rpartition("/")
        if last == "index" and name not in GENERATED:
            for path in sorted((docs / folder).rglob("*.md")):
                if path.stem != "index" or path.parent != docs / folder:
                    yield path.relative_to(docs).with_suffix("").as_posix()


def title(docs: Path, name: str) -> str:
    """The first heading of a page."""
    if name in GENERATED:
        return GENERATED[name].partition(":")[0]
    heading = re.search(r"^# (.*)$", (docs / f"{name}.md").read_text(encoding="utf-8"), re.MULTILINE)
    return heading[1] if heading else name


def about(docs: Path, name: str) -> str:
    """The first sentence of a page."""
    if name in GENERATED:
        return GENERATED[name].partition(": ")[2]
    return summary((docs / f"{name}.md").read_text(encoding="utf-8"))


def summary(text: str) -> str:
    """The first sentence of the first paragraph."""
    for block in re.split(r"\n\s*\n", text):
        if re.match(r"[A-Za-z`*\"]", block) and not block.startswith("```"):
            flat = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(block.split()))
            return re.split(r"(?<=\.) ", flat)[0]
    return ""
