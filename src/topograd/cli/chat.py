"""`topograd chat`: a conversation with a model, by its own chat template."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from topograd.cli.console import note, parse, print_json
from topograd.cli.generate import (
    Decoding,
    Writer,
    note_long,
    numbers,
    open_model,
    warm_up,
    warn_untrained,
    writer_of,
)
from topograd.errors import TopogradError

if TYPE_CHECKING:
    from topograd.decode.model import Generated, Model

COMMANDS = """/system TEXT   set the system message; without TEXT, remove it
/reset         forget the conversation
/help          these lines
/quit          end, as Ctrl-D does"""


@dataclass(frozen=True, kw_only=True)
class Chat(Decoding):
    """Talk with a model. Each line that is typed is a message; /help lists the commands."""

    prompt: str = ""
    """One message: print the answer and end. Without it, messages are read from standard input."""
    system: str = ""
    """The system message: what the model shall be or do."""


def run(argv: list[str]) -> int:
    args = parse(Chat, argv, "chat")
    model = open_model(args.model, args.specialists, args.runtime, args.weights, args.router)
    conversation = _Conversation(args, model)
    made = None
    if args.prompt:
        made = conversation.answer(args.prompt)
    else:
        for text in _typed(asking=sys.stdin.isatty() and not args.json):
            if text.startswith("/"):
                if text.strip() == "/quit":
                    break
                conversation.command(text)
            elif text.strip():
                try:
                    made = conversation.answer(text)
                except TopogradError as error:
                    if not sys.stdin.isatty():
                        raise
                    note(str(error))  # the conversation continues without that message
    if args.json:
        messages = conversation.messages
        answer: dict[str, Any] = {"run": str(model.session.run.folder), "prompt": args.prompt}
        answer |= {"messages": messages, "text": "" if made is None else str(made)}
        print_json(answer if made is None else answer | numbers(made, model))
    return 0


class _Conversation:
    def __init__(self, args: Chat, model: Model) -> None:
        self.args, self.model, self.writer = args, model, Writer(args, model)
        self.template, self.special, self.encode = _template(model)
        self.messages: list[dict[str, str]] = []
        self.set_system(args.system)

    def set_system(self, text: str) -> None:
        self.messages = [message for message in self.messages if message["role"] != "system"]
        if text:
            self.messages.insert(0, {"role": "system", "content": text})

    def command(self, line: str) -> None:
        name, _, text = line.strip().partition(" ")
        if name == "/system":
            self.set_system(text.strip())
        elif name == "/reset":
            self.messages = [message for message in self.messages if message["role"] == "system"]
        elif name == "/help":
            print(COMMANDS, file=sys.stderr)
        else:
            note(f"{name} is no command; /help lists them")

    def answer(self, text: str) -> Generated:
        """Write the answer to a message; both are part of the conversation afterwards."""
        from topograd.convert.chat import render_chat

        messages = [*self.messages, {"role": "user", "content": text}]
        tokens = self.encode(render_chat(self.template, messages, special_tokens=self.special))
        note_long(len(tokens), self.model, "conversation")
        settings = self.args.settings(len(self.model.session.plan.predicting()))
        warm_up(self.args, self.model, settings)
        made = self.model.generate(
            tokens, on_piece=lambda piece: self.writer.show(piece.text, writer_of(piece)), **settings
        )
        self.writer.end(made)
        warn_untrained(made, self.model)
        self.messages = [*messages, {"role": "assistant", "content": str(made)}]
        return made


def _template(model: Model) -> tuple[str, dict[str, str], Callable[[str], list[int]]]:
    """The chat template, the special tokens that it names, and what encodes its text.

    Specialists on a base without a template were trained on the plain one.
    """
    tokenizer, pool = model.session.tokenizer, getattr(model, "pool", None)
    if pool is not None:
        from topograd.specialists.records import template_of

        return template_of(pool.vocabulary), tokenizer.special_tokens, pool.vocabulary.encode_chat
    return tokenizer.get_chat_template(), tokenizer.special_tokens, partial(tokenizer.encode, kind="chat")


def _typed(asking: bool) -> Iterator[str]:
    """Each line of standard input, with a prompt before it where a person types."""
    while True:
        try:
            yield input("> " if asking else "")
        except EOFError:
            return
