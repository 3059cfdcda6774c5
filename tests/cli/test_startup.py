"""Help and a mistyped flag are answered before anything heavy is imported, and every option has help.

Each verb is asked in a process of its own, with all of its sub-verbs: one that imports torch for its help
would hide the next. The processes are forked from one that has what all verbs need.
"""

import ast
import dataclasses
import inspect
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from topograd.cli import console
from topograd.cli.main import VERBS, main

HEAVY = ("torch", "numpy", "scipy", "matplotlib", "optuna", "transformers", "tokenizers", "safetensors")

ASK = """
import contextlib, io, json, os, re, sys
from topograd.cli import console
from topograd.cli.main import main

def ask(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    said = {"out": out.getvalue(), "err": err.getvalue()}
    return {"words": words, "code": code, **said, "heavy": sorted(set(heavy) & set(sys.modules))}

def ask_all(verb):
    yield (overview := ask(verb, "--help"))
    yield ask(verb, "--no-such-flag")
    parts = re.match(r"usage: topograd \\S+ \\{(\\S+)\\} \\.\\.\\.", overview["out"])
    for part in parts[1].split(",") if parts else ():
        yield ask(verb, part, "--help")
        yield ask(verb, part, "--no-such-flag")

heavy, verbs = (word.split(",") for word in sys.argv[1:])
for verb in verbs:
    child = os.fork()
    if child == 0:
        print(json.dumps({verb: list(ask_all(verb))}), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """What every verb says to --help and to a flag that it does not have, with what was imported by then."""
    command = [sys.executable, "-c", ASK, ",".join(HEAVY), ",".join(VERBS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {verb: said for line in done.stdout.splitlines() for verb, said in json.loads(line).items()}


@pytest.mark.parametrize("verb", VERBS)
def test_help_and_a_mistyped_flag_import_nothing_heavy(verb: str, answers: dict[str, Any]) -> None:
    assert len(answers[verb]) >= 2
    for answer in answers[verb]:
        words = answer["words"]
        assert answer["heavy"] == [], words
        if words[-1] == "--help":
            assert (answer["code"], answer["err"]) == (0, ""), words
            assert answer["out"].startswith(f"usage: topograd {' '.join(words[:-1])}")
        else:
            assert (answer["code"], answer["out"]) == (2, ""), words
            assert answer["err"].startswith("topograd: "), words
            assert answer["err"].count("\n") == 1, words
            assert "--no-such-flag" in answer["err"] or "missing" in answer["err"], "a required word"


def test_looking_around_imports_nothing_heavy() -> None:
    code = (
        "import sys; from topograd.cli.main import main;"
        "codes = main(['--help']), main(['--version']), main(['nonsense']), main(['space', 'show', '4,4']),"
        "main(['study', 'list']), main(['space', 'count', '9', '--json']);"
        "assert codes == ((0), (0), (2), (0), (2), (0)), codes;"
        f"assert not set({HEAVY!r}) & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def kinds_of(verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[type]:
    """The dataclasses of a verb and of its sub-verbs, caught where their help is made."""
    caught: list[type] = []

    def help_text(kind: type, *_: Any, **__: Any) -> str:
        caught.append(kind)
        return ""

    monkeypatch.setattr(console, "help_text", help_text)
    capsys.readouterr()
    main([verb, "--help"])
    usage = capsys.readouterr().out
    if not caught:
        for part in usage.partition("{")[2].partition("}")[0].split(","):
            main([verb, part, "--help"])
    return caught


def without_help(kind: type) -> Iterator[str]:
    """The fields, nested ones too, that neither a docstring nor `tyro.conf.arg(help=...)` explains."""
    explained: set[str] = set()
    for base in kind.__mro__[:-1]:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for line, after in zip(body.body, body.body[1:], strict=False):
            text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and text:
                explained.add(line.target.id)
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        inner, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if dataclasses.is_dataclass(inner):
            yield from without_help(inner)  # type: ignore[arg-type]
        elif field.name not in explained and not any(getattr(extra, "help", None) for extra in extras):
            yield f"{kind.__name__}.{field.name}"


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_has_help(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = kinds_of(verb, monkeypatch, capsys)
    assert kinds
    assert [name for kind in kinds for name in without_help(kind)] == []
    assert all(kind.__doc__ for kind in kinds)
