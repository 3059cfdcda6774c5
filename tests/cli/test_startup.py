"""Help and a mistyped flag are answered before anything heavy is imported, and every option has help.

Each verb is asked in an interpreter of its own, with all of its sub-verbs: one that imports torch for its
help would hide the next.
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
import contextlib, io, json, re, sys
from topograd.cli.main import main

verb, heavy = sys.argv[1], sys.argv[2].split(",")
found = []

def ask(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    said = {"out": out.getvalue(), "err": err.getvalue()}
    found.append({"words": words, "code": code, **said, "heavy": sorted(set(heavy) & set(sys.modules))})
    return out.getvalue()

overview = ask(verb, "--help")
ask(verb, "--no-such-flag")
parts = re.match(r"usage: topograd \\S+ \\{(\\S+)\\} \\.\\.\\.", overview)
for part in parts[1].split(",") if parts else ():
    ask(verb, part, "--help")
    ask(verb, part, "--no-such-flag")
print(json.dumps(found))
"""


@pytest.mark.parametrize("verb", VERBS)
def test_help_and_a_mistyped_flag_import_nothing_heavy(verb: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASK, verb, ",".join(HEAVY)], capture_output=True, text=True, check=True
    )
    answers = json.loads(done.stdout)
    assert len(answers) >= 2
    for answer in answers:
        words = answer["words"]
        assert answer["heavy"] == [], words
        if words[-1] == "--help":
            assert (answer["code"], answer["err"]) == (0, ""), words
            assert answer["out"].startswith(f"usage: topograd {' '.join(words[:-1])}")
        else:
            assert (answer["code"], answer["out"]) == (2, ""), words
            assert answer["err"].startswith("topograd: "), words
            assert answer["err"].count("\n") == 1, words
            assert "--no-such-flag" in answer["err"] or "Missing" in answer["err"], "a required word"


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
    """The dataclasses of a verb and of its sub-verbs, caught on their way to tyro."""
    caught: list[type] = []

    def cli(kind: type, **_: Any) -> None:
        caught.append(kind)
        raise SystemExit(0)

    monkeypatch.setattr(console.tyro, "cli", cli)
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
