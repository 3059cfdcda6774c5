"""The command `topograd VERB ...`, and how any program of this project runs its verbs.

Exit codes: 0 done, 1 a bug, 2 something given that cannot be done (said in one line), 130 interrupted.
A verb's module is imported when it is called, and imports what is heavy when it runs: help and a mistyped
flag are answered at once. Nothing is imported here before `main` has begun, so that Ctrl-C is one line from
the first moment.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # as typing's, which is not imported this early
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
    "retrofit": "give a frozen model a draft stage and a table of its own text, in an adapter",
    "bench": "measure ways of running a model, and of training one",
    "consolidate": "write what several processes saved as the checkpoint of one",
    "report": "explain a run in one HTML page",
    "export": "write a run's model for transformers or for llama.cpp",
    "search": "choose where gradients stop: dynamic programming, soft boundaries, surgery, the Pareto front",
    "space": "look around the space of partitions",
    "probe": "where a model knows something, stage by stage",
    "inspect": "read the geometry of a run or of a Hugging Face checkpoint, in one HTML page",
    "doctor": "what is installed here, what each extra would add, and whether it works",
}
MOVED = {
    "study": "python -m papers list, then python -m papers run NAME",
    "reproduce": "python -m papers reproduce",
    "optim": "python -m papers check equivariance, or cells",
    "fields": "python -m papers check kernel, or simulate",
    "probe catalogue": "python -m papers check catalogue",
    "probe ladder": "python -m papers check ladder",
    "probe families": "python -m papers check families",
    "interfaces": "python -m papers check parity, leak, plan or costs",
    "bench scan": "python benchmarks/scan.py",
    "bench kernel": "python benchmarks/kernel.py",
    "bench optim": "python benchmarks/optimizer_step.py",
    "bench monitors": "python benchmarks/monitors.py",
    "bench prompts": "python benchmarks/prompts.py",
    "simulate": "python benchmarks/simulate.py",
}
"""Commands of the papers and benchmarks: they run from a clone of the repository and are not installed."""
INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run one verb of `topograd` and return the exit code."""
    return run_program("topograd", VERBS, _run_verb, argv, MOVED)


def _run_verb(verb: str, argv: list[str]) -> int:
    import importlib

    module = {"import": "import_model"}.get(verb, verb)  # a word of Python's own
    code: int = importlib.import_module(f"topograd.cli.{module}").run(argv)
    return code


def run_program(
    program: str,
    verbs: Mapping[str, str],
    run: Callable[[str, list[str]], int],
    argv: list[str] | None = None,
    moved: Mapping[str, str] | None = None,
) -> int:
    """Run one verb of a program by `run(verb, its words)` and return the exit code.

    Whatever a user can cause becomes one line on stderr. `verbs` has what each does, in a line; `moved` has
    what replaces a verb, or two words, of earlier versions.
    """
    try:
        _prepare_streams()
        if argv is None:
            sys.path.append(os.getcwd())  # for parts of the user's own, `package.module:attribute`
        given = sys.argv[1:] if argv is None else argv
        code = _guarded(lambda: _dispatch(program, verbs, run, given, moved or {}))
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


def _guarded(work: Callable[[], int]) -> int:
    from topograd.errors import TopogradError

    try:
        return work()
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


def _dispatch(
    program: str,
    verbs: Mapping[str, str],
    run: Callable[[str, list[str]], int],
    argv: list[str],
    moved: Mapping[str, str],
) -> int:
    verb = argv[0] if argv else ""
    if verb in ("-h", "--help"):
        print(_overview(program, verbs))
        return 0
    if verb == "--version":
        from importlib.metadata import version

        print(f"topograd {version('topograd')}")
        return 0
    if not verb:
        print(_overview(program, verbs), file=sys.stderr)
        return 2
    for words in (verb, " ".join(argv[:2])):
        if words in moved:
            return _fail(f"{words!r} is not installed; in a clone of the repository, run {moved[words]}")
    if verb not in verbs:
        return _fail(f"{verb!r} is not a verb; choose one of {', '.join(verbs)}")
    return run(verb, argv[1:])


def _overview(program: str, verbs: Mapping[str, str]) -> str:
    lines = [f"  {verb:12}{words}" for verb, words in verbs.items()]
    return "\n".join(
        [f"usage: {program} VERB ...", "", *lines, "", f"{program} VERB --help says what a verb takes."]
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
