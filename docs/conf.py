"""The site: Sphinx with MyST Markdown and furo. `make docs` builds it without a warning.

The reference is made before the sources are read: `reference/api/` from docstrings and types,
`reference/commands/` from the flags of each command, `reference/config.md` from the dataclasses of a run's
settings. None of these is committed.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "_ext"))

project = "topograd"
author = "The topograd developers"
copyright = "The topograd developers, Apache-2.0"
version = release = importlib.metadata.version("topograd")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "_ext"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
nitpicky = False
highlight_language = "none"
smartquotes = False
pygments_style, pygments_dark_style = "default", "monokai"

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 120
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "topograd"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["llms.txt"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}


def setup(app: Any) -> None:
    """Make the reference, and read docstrings as plain text."""
    import site_api
    import site_commands
    import site_config_keys
    import site_llms

    reference = DOCS / "reference"
    site_commands.write(reference / "commands")
    site_commands.write_pages(reference / "api", site_api.pages())
    site_commands.write_page(reference / "config.md", site_config_keys.page())
    site_commands.write_page(DOCS / "llms.txt", site_llms.page(DOCS))

    def process(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
        lines[:] = site_api.plain(lines)

    app.connect("autodoc-process-docstring", process)
