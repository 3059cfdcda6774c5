"""`python -m papers VERB ...`, from the root of the repository; a verb is the module of that name."""

from __future__ import annotations

import sys

from papers import PROGRAM
from topograd.cli.main import run_program

VERBS = {
    "list": "every study: its paper, what is predicted, its presets and the minutes that they take",
    "run": "run a study, or all of them; one that was ended goes on where it was",
    "reproduce": "every claim of the papers, what came of it here, and the command that gives it",
    "pages": "write the generated pages of docs/: the index of results, the papers, claim by claim",
    "check": "quick questions: rates of hand-set networks, optimizers on an orbit, kernels, interfaces",
}


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    return run_program(PROGRAM, VERBS, _run_verb, argv)


def _run_verb(verb: str, argv: list[str]) -> int:
    import importlib

    code: int = importlib.import_module(f"papers.{verb}").run(argv)
    return code


if __name__ == "__main__":
    sys.exit(main())
