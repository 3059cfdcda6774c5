"""Renders a chat template, once or many times: a request on standard input, the answers on standard output.

It is a program of its own, run by `topograd.convert.chat` with limits on memory and time, since a template
comes from outside. It imports nothing of this package.

The environment is transformers': an immutable sandbox, `trim_blocks`, `lstrip_blocks`, `break` and
`continue`, `{% generation %}` blocks, `tojson` without HTML's escapes, `raise_exception`, `strftime_now`, and
`dict` and `namespace` without a way to Python's internals.
"""

import json
import sys
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Refused(jinja2.TemplateError):
    """What a template raises itself, about the conversation."""


class Generation(Extension):
    """`{% generation %}`, which marks what the assistant wrote: nothing to be done but its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class Namespace(jinja2.utils.Namespace):
    """A namespace whose names do not begin with an underscore."""

    def __init__(*args: Any, **attributes: Any) -> None:
        self, given = args[0], dict(*args[1:], **attributes)
        for name in given:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class Dictionary:
    """`dict`, of which only what templates need can be reached."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def render(request: dict[str, Any], variables: dict[str, Any]) -> dict[str, str]:
    """{"text": ...}, or {"error": ...} about the template, or {"refused": ...} by the template."""
    try:
        pieces, left = [], request["most"]
        for piece in _environment().from_string(request["template"]).generate(**variables):
            left -= len(piece)
            if left < 0:
                return {"error": f"it writes more than {request['most']} characters"}
            pieces.append(piece)
        return {"text": "".join(pieces)}
    except Refused as problem:
        return {"refused": str(problem)}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except RecursionError:
        return {"error": "it is nested too deep"}
    except Exception as problem:  # templates run anything: whatever it raises is the template's error
        return {"error": f"{type(problem).__name__}: {problem}"}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
        "dict": Dictionary(),
        "namespace": Namespace,
    }
    return environment


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the name {name!r}")


def _raise_exception(message: object) -> None:
    raise Refused(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    more = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **more)


def _limit(memory: int, seconds: int) -> None:
    """Have the system end this process where it takes more; Windows knows no such limits."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    given = json.loads(sys.stdin.buffer.read())
    _limit(given["memory"], given["seconds"])
    answers = [render(given, variables) for variables in given["many"]]
    sys.stdout.buffer.write(json.dumps(answers).encode())
