"""Chat prompts by the model's template, rendered in a process that is started ahead of time.

A template is untrusted code, so each conversation gets a process of its own (`convert/chat.py`). Starting one
takes longer than rendering: the next is started as soon as the last was used.

A model without a template gets the messages' texts with an empty line between them, and nothing else: such a
model was not trained on conversations. Its specialists may have been: they get the template that `finetune`
spells chats with, as `topograd chat` does.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from topograd.convert.chat import Renderer
from topograd.convert.tool_calls import describe, for_template
from topograd.errors import CheckpointError, ConfigError
from topograd.serve.request_schema import RequestError
from topograd.serve.texts import ServedModel
from topograd.specialists.records import template_of
from topograd.specialists.tokens import Vocabulary


class Chats:
    """Renders conversations for one model."""

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.template = served.tokenizer.chat_template
        self._lock = threading.Lock()
        rendered = self.template is not None or served.specialists is not None
        self._renderer = Renderer() if rendered else None

    def template_of(self, vocabulary: Vocabulary | None) -> str | None:
        """The template of a conversation; `vocabulary` is that of the active specialists."""
        return self.template if vocabulary is None else template_of(vocabulary)

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        vocabulary: Vocabulary | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """The tokens of a conversation up to the assistant's turn; not on the event loop."""
        template = self.template_of(vocabulary)
        tokenizer = self.served.tokenizer
        try:
            plain = for_template([{**each, "content": _text(each.get("content"))} for each in messages])
            if template is None or "tools" not in template:
                plain, tools = describe(plain, tools, template is None), None
            if template is None or self._renderer is None:
                return self.served.encode("\n\n".join(message["content"] for message in plain))
            with self._lock:
                text = self._renderer.render(template, plain, tokenizer.special_tokens, tools)
        except (ConfigError, CheckpointError) as error:
            raise RequestError(str(error), "messages") from None
        encode = self.served.encode_bare if vocabulary is None else vocabulary.encode_chat
        return encode(text) or [tokenizer.separator]

    def close(self) -> None:
        """End the process that was started ahead."""
        if self._renderer is not None:
            self._renderer.close()


def _text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
