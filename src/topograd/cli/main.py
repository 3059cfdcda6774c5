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

GROUPS = {
    "use a model (MODEL: a run, a Hugging Face folder, a GGUF file, hf:ORG/NAME)": {
        "chat": "talk with a model, by its own chat template",
        "generate": "continue a text, at full depth, an early exit, or with speculation",
        "serve": "OpenAI-compatible server with depth per request, and a playground",
        "score": "log-probabilities of a continuation given a context, per token and per exit",
        "eval": "bits per byte, calibration, rank; `eval core`: the CORE benchmark at every exit",
        "compare": "several models side by side",
        "calibrate": "measure early-exit thresholds and which drafter is fastest",
        "bench": "speed of decoding strategies, alone and in a server",
    },
    "train": {
        "demo": "a staged model and its backprop twin, trained and compared, with a report",
        "train": "train a model, or continue a run",
        "report": "explain a run in one HTML page",
        "specialist": "adapters on a frozen model: attach, finetune, compose, route, align",
        "retrofit": "train a draft stage and exit heads for a frozen model",
        "consolidate": "merge the checkpoint of several processes into one",
    },
    "convert": {
        "import": "make a run of a Hugging Face folder or a GGUF file",
        "export": "write a model for transformers, llama.cpp or ONNX Runtime",
    },
    "analyse": {
        "inspect": "Fisher geometry of a model, in one HTML page",
        "coefficient": "local learning coefficients of a model, by layer and by head",
        "probe": "where a model knows something, stage by stage; `probe ladder`: exponents at a frozen unit",
        "interfaces": "bounded interfaces: rank of gradients at every boundary, Jacobians, ablations",
        "search": "choose where gradients stop: dp, soft, surgery, pareto, choose",
        "space": "the lattice of partitions",
    },
    "set up": {
        "doctor": "what is installed, what each extra adds, and whether it works",
        "config": "the settings of a training as a JSON schema, for editors",
        "completion": "completion for bash, zsh or fish",
    },
}
VERBS = {verb: words for group in GROUPS.values() for verb, words in group.items()}
ALIASES = {name: f"specialist {name}" for name in ("attach", "finetune", "compose", "route", "align")}
"""Short names."""
INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run one command of `topograd` and return the exit code."""
    return run_program("topograd", VERBS, run_command, argv, ALIASES, GROUPS)


def run_command(verb: str, argv: list[str]) -> int:
    """Run the module of a command and return the exit code."""
    import importlib

    module = {"import": "import_model"}.get(verb, verb)  # a word of Python's own
    code: int = importlib.import_module(f"topograd.cli.{module}").run(argv)
    return code


def run_program(
    program: str,
    verbs: Mapping[str, str],
    run: Callable[[str, list[str]], int],
    argv: list[str] | None = None,
    aliases: Mapping[str, str] | None = None,
    groups: Mapping[str, Mapping[str, str]] | None = None,
) -> int:
    """Run one command of a program by `run(command, its arguments)` and return the exit code.

    Every error that a user can cause becomes one line on stderr. `verbs` says what each command does, in a
    line; `groups` has the same under headings. `aliases` says what a short name stands for.
    """
    try:
        _prepare_streams()
        if argv is None:
            sys.path.append(os.getcwd())  # for parts of the user's own, `package.module:attribute`
        given = sys.argv[1:] if argv is None else argv
        if given and given[0] in (aliases or {}):
            given = [*(aliases or {})[given[0]].split(), *given[1:]]
        code = _guarded(lambda: _dispatch(program, groups or {"": verbs}, run, given))
        sys.stdout.flush()  # here, where a full disk can still be named
        return code
    except KeyboardInterrupt as stopped:
        if argv is None:  # the process is about to end; a second Ctrl-C must not show a traceback
            import signal

            signal.signal(signal.SIGINT, signal.SIG_IGN)
        _fail(str(stopped) or "interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has closed it
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
        from topograd.cli.console import line_of

        return _fail(line_of(error))
    except UnicodeEncodeError as error:
        shown = ascii(error.object)[1:-1]  # the bytes that are no UTF-8, escaped
        return _fail(f"{shown} is not UTF-8 and cannot be written down; rename it")
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
    groups: Mapping[str, Mapping[str, str]],
    run: Callable[[str, list[str]], int],
    argv: list[str],
) -> int:
    verb = argv[0] if argv else ""
    if verb in ("-h", "--help"):
        print(_overview(program, groups))
        return 0
    if verb == "--version":
        from importlib.metadata import version

        print(f"topograd {version('topograd')}")
        return 0
    if not verb:
        print(_overview(program, groups), file=sys.stderr)
        return 2
    names = [name for group in groups.values() for name in group]
    if verb not in names:
        import difflib

        meant = difflib.get_close_matches(verb, names, n=1)
        hint = f"did you mean {meant[0]}?" if meant else f"choose one of {', '.join(names)}"
        return _fail(f"{verb!r} is not a command; {hint}")
    return run(verb, argv[1:])


def _overview(program: str, groups: Mapping[str, Mapping[str, str]]) -> str:
    lines = [f"usage: {program} COMMAND ..."]
    for heading, verbs in groups.items():
        lines += [
            "",
            *([f"{heading}:"] if heading else []),
            *(f"  {v:13}{words}" for v, words in verbs.items()),
        ]
    return "\n".join([*lines, "", f"{program} COMMAND --help lists what a command takes."])


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
