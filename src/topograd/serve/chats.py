"""From messages to a prompt: by the model's own template, in a process that is started before it is needed.

A template is a stranger's program, so each conversation gets a process of its own (`models/chat.py`). To
start one takes longer than to render: the next is started as soon as the last was used.

A model without a template gets the messages' texts with an empty line between them, and nothing else: such a
model was not trained on conversations.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from topograd.data.foreign_tokenizer import ForeignTokenizer
from topograd.errors import CheckpointError, ConfigError
from topograd.models.chat import Renderer, chat_template
from topograd.serve.fields import RequestError
from topograd.serve.texts import Served


class Chats:
    """Renders conversations for one model."""

    def __init__(self, served: Served) -> None:
        self.served = served
        tokenizer = served.tokenizer
        self.template = chat_template(tokenizer.config) if isinstance(tokenizer, ForeignTokenizer) else None
        self._lock = threading.Lock()
        self._renderer = None if self.template is None else Renderer()

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a conversation, ready for the answer; not on the event loop."""
        plain = [{**message, "content": _text(message.get("content"))} for message in messages]
        tokenizer = self.served.tokenizer
        if self.template is None or self._renderer is None or not isinstance(tokenizer, ForeignTokenizer):
            return self.served.encode("\n\n".join(message["content"] for message in plain))
        try:
            with self._lock:
                text = self._renderer.render(self.template, plain, special_tokens=tokenizer.special_tokens)
        except (ConfigError, CheckpointError) as error:
            raise RequestError(str(error), "messages") from None
        return tokenizer.encode_chat(text) or [tokenizer.separator]

    def close(self) -> None:
        """End the process that waits."""
        if self._renderer is not None:
            self._renderer.close()


def _text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
