"""Chat templates: from the messages of a conversation to the text that the model was trained on.

A template is a Jinja program that comes with a model, so it is treated as a stranger's: it is rendered in
Jinja's immutable sandbox, as transformers does, and in a process of its own (`chat_worker`) whose time,
memory and output are bounded. The text is that of transformers' `apply_chat_template`; it is to be encoded
with `Tokenizer.encode(text, "chat")`, since it spells the special tokens itself.

Cost. One process for each rendering, which imports Jinja: little beside an answer. `render_chats` renders
many conversations in one process. A `Renderer` starts the next process before it is asked for.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from topograd.errors import CheckpointError, ConfigError

MAX_TEMPLATE_CHARACTERS = 2**20
MAX_MESSAGE_CHARACTERS = 2**24
MAX_OUTPUT_CHARACTERS = 2**24
SECONDS = 10
"""Of processor time."""
PATIENCE = 6
"""By the clock it may take so many times as long: the machine may be busy, or the process stopped."""
AT_ONCE = 256
"""Conversations that one process renders, within the limits of one."""
_MEMORY = 2**29
_WORKER = Path(__file__).with_name("chat_worker.py")


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    special_tokens: Mapping[str, str] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """The text of a conversation, ready for the assistant's answer.

    `messages` are {"role": ..., "content": ...}; `special_tokens` are a tokenizer's, by their names in
    templates ("bos_token"); `variables` are whatever else a template reads, such as `enable_thinking`.
    """
    given = {"tools": tools, **variables}
    (text,) = render_chats(template, [(messages, add_generation_prompt)], special_tokens, **given)
    return text


def render_chats(
    template: str,
    conversations: Sequence[tuple[Sequence[Mapping[str, Any]], bool]],
    special_tokens: Mapping[str, str] | None = None,
    **variables: Any,
) -> list[str]:
    """The texts of many conversations, each with whether it is to be ready for an answer."""
    given = {"documents": None, "tools": None, **(special_tokens or {}), **variables}
    many = [given | {"messages": m, "add_generation_prompt": ready} for m, ready in conversations]
    texts = []
    for start in range(0, len(many), AT_ONCE):
        for answer in _ask(_request(template, many[start : start + AT_ONCE]), _start()):
            texts.append(_text_of(answer))
    return texts


class Renderer:
    """`render_chat` for many conversations: the process of the next one has started already."""

    def __init__(self) -> None:
        self._next: subprocess.Popen[bytes] | None = _start()

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        special_tokens: Mapping[str, str] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """As `render_chat`, ready for the assistant's answer; for one thread at a time."""
        given = {"documents": None, "tools": tools, **(special_tokens or {})}
        request = _request(template, [{**given, "messages": messages, "add_generation_prompt": True}])
        process, self._next = self._next or _start(), None
        try:
            (answer,) = _ask(request, process)
        finally:
            self._next = _start()
        return _text_of(answer)

    def close(self) -> None:
        """End the process that waits."""
        if self._next is not None:
            self._next.kill()
            self._next.communicate()
            self._next = None


def _text_of(answer: Mapping[str, str]) -> str:
    if "refused" in answer:
        raise ConfigError(f"the chat template refuses this conversation: {_line(answer['refused'])}")
    if "error" in answer:
        raise _failed(_line(answer["error"]))
    return answer["text"]


def _request(template: str, many: Sequence[Mapping[str, Any]]) -> bytes:
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise _failed(f"it has {len(template)} characters of {MAX_TEMPLATE_CHARACTERS} at most")
    limits = {"most": MAX_OUTPUT_CHARACTERS, "memory": _MEMORY, "seconds": SECONDS}
    try:
        text = json.dumps({"template": template, "many": many, **limits})
    except (TypeError, ValueError, RecursionError) as problem:
        message = f"these messages are not plain text, numbers, lists and tables: {problem}"
        raise ConfigError(message) from None
    if len(text) > MAX_MESSAGE_CHARACTERS:
        remedy = f"give {MAX_MESSAGE_CHARACTERS} at most"
        raise ConfigError(f"this conversation has {len(text)} characters", remedy=remedy)
    return text.encode()


def _start() -> subprocess.Popen[bytes]:
    """A process that waits for a template."""
    if importlib.util.find_spec("jinja2") is None:
        raise ConfigError("chat templates need the package jinja2: pip install 'topograd[models]'")
    # -I: nothing of the caller's environment and folder is imported there
    command, pipe = [sys.executable, "-I", str(_WORKER)], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)


def _ask(request: bytes, process: subprocess.Popen[bytes]) -> list[dict[str, str]]:
    try:
        with process:
            try:
                said, _ = process.communicate(request, timeout=PATIENCE * SECONDS)
            except BaseException:
                process.kill()
                raise
        answers: list[dict[str, str]] = json.loads(said)
    except subprocess.TimeoutExpired:
        raise _failed(f"it takes longer than {PATIENCE * SECONDS} s") from None
    except ValueError:  # it was ended by the system, or its sandbox did not hold
        raise _failed("it needs too much memory or time") from None
    return answers


def _line(text: str) -> str:
    return " ".join(text.split())[:300]


def _failed(reason: str) -> CheckpointError:
    return CheckpointError(
        f"the model's chat template cannot be rendered: {reason}", remedy="give another template"
    )
