"""The command `topograd`: a module for each verb, whose `run` gives the exit code, and what verbs share."""

import sys

_shown_before = sys.excepthook


def _show(kind, value, trace):  # type: ignore[no-untyped-def]  # no import: this is the first code that runs
    """Ctrl-C before `main` has begun is one line too, and the shell sees 130; all else is shown as ever."""
    if kind is KeyboardInterrupt and sys.stderr is not None:
        print("topograd: interrupted", file=sys.stderr)
    else:
        _shown_before(kind, value, trace)


sys.excepthook = _show
