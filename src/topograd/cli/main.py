"""The command `topograd VERB ...`.

Exit codes: 0 done, 1 a bug, 2 something given that cannot be done (said in one line), 130 interrupted.
A verb's module is imported when it is called, and imports what is heavy when it runs: help and a mistyped
flag are answered at once. Nothing is imported here before `main` has begun, so that Ctrl-C is one line from
the first moment.
"""

from __future__ import annotations

import os
import sys

VERBS = {
    "demo": "train a staged model and its backprop twin, compare them, write a report",
    "train": "train a model, or continue a run",
    "eval": "measure a run: bits per byte, calibration, rank; `eval core`: the tasks of CORE, at every depth",
    "score": "how likely a model finds a text behind another, token by token, at every depth",
    "compare": "put runs side by side",
    "calibrate": "measure when a run's tokens may leave early, and which drafts pay",
    "generate": "continue a text with the first stages of a run, or all of them",
    "attach": "add a specialist to a frozen run: a stage and a head of its own, in a small folder",
    "finetune": "train a specialist on chats or text, and prove that its base did not move",
    "compose": "measure specialists alone and together on some text",
    "route": "learn which specialist a text wants",
    "align": "carry a specialist to another version of its base",
    "serve": "an OpenAI-compatible server with depth per request, and a playground",
    "import": "make a run of a model from outside: a Hugging Face folder, a GGUF file",
    "retrofit": "give a frozen model a draft stage and a table of its own text, in a sidecar",
    "bench": "measure ways of running a model, and of training one",
    "simulate": "what a step takes on many ranks, by every way of spreading it",
    "consolidate": "write what several processes saved as the checkpoint of one",
    "report": "explain a run in one HTML page",
    "export": "write a run's model for transformers or for llama.cpp",
    "search": "choose where gradients stop: dynamic programming, soft boundaries, surgery, the Pareto front",
    "space": "look around the space of partitions",
    "probe": "where a model knows something, stage by stage",
    "inspect": "read the geometry of a run or of a Hugging Face checkpoint, in one HTML page",
    "interfaces": "check bounded interfaces: exact gradients, no look ahead, which backward pays",
    "doctor": "what is installed here, what each extra would add, and whether it works",
}
MOVED = {
    "study": "python -m papers list, then python -m papers run NAME",
    "reproduce": "python -m papers reproduce",
    "optim": "python -m papers check equivariance, or cells",
    "fields": "python -m papers check kernel, or simulate",
}
"""Commands that reproduce the papers: they run from a clone of the repository and are not installed."""
INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return the exit code. Whatever a user can cause becomes one line on stderr."""
    try:
        _prepare_streams()
        if argv is None:
            sys.path.append(os.getcwd())  # for parts of the user's own, `package.module:attribute`
        code = _guarded(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()  # here, where a full disk can still be named
        return code
    except KeyboardInterrupt:
        if argv is None:
            _ignore_interrupts()
        _fail("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output has gone
        _discard_output()
        return 1
    except OSError as error:
        _discard_output()
        return _fail(f"the output cannot be written: {error}")


def _guarded(argv: list[str]) -> int:
    from topograd.errors import TopogradError

    try:
        return _dispatch(argv)
    except TopogradError as error:
        from topograd.cli.console import in_flags

        return _fail(in_flags(str(error)))
    except BrokenPipeError:
        raise
    except OSError as error:
        where = "" if error.filename else " (the output, or a file that it does not name)"
        return _fail(f"the system refused: {error}{where}")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in _TOO_LARGE):
            raise
        return _fail("there is not enough memory for this; choose a smaller model, batch or context")
    except SystemExit as end:  # of --help
        return end.code if isinstance(end.code, int) else 0


_TOO_LARGE = ("allocate", "Storage size calculation overflowed")
"""What torch says of a tensor that does not fit."""


def _dispatch(argv: list[str]) -> int:
    verb = argv[0] if argv else ""
    if verb in ("-h", "--help"):
        print(_overview())
        return 0
    if verb == "--version":
        from importlib.metadata import version

        print(f"topograd {version('topograd')}")
        return 0
    if not verb:
        print(_overview(), file=sys.stderr)
        return 2
    if verb in MOVED:
        return _fail(
            f"{verb!r} is not part of the installed package; in a clone of the repository, run {MOVED[verb]}"
        )
    if verb not in VERBS:
        return _fail(f"{verb!r} is not a verb; choose one of {', '.join(VERBS)}")
    import importlib

    module = {"import": "import_model"}.get(verb, verb)  # a word of Python's own
    code: int = importlib.import_module(f"topograd.cli.{module}").run(argv[1:])
    return code


def _overview() -> str:
    lines = [f"  {verb:12}{words}" for verb, words in VERBS.items()]
    return "\n".join(
        ["usage: topograd VERB ...", "", *lines, "", "topograd VERB --help says what a verb takes."]
    )


def _fail(message: str) -> int:
    print("topograd: " + " ".join(message.splitlines()), file=sys.stderr)
    return 2


def _prepare_streams() -> None:
    """Output that is closed goes nowhere, and a letter that a stream cannot show is escaped."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # its descriptor is free: taken here, no file that is opened later gets it
            stream = open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, stream)
        if name != "stdin" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """What is still to be written goes nowhere: Python's own flush at exit must not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _ignore_interrupts() -> None:
    """The process is about to end; a second Ctrl-C must not show a traceback."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
