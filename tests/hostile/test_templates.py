"""Chat templates that were cut, changed or written by an enemy: a text, or one line that says why not."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from topograd.convert import chat
from topograd.convert.chat import render_chat
from topograd.errors import TopogradError

GOOD = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}[{{ m.content | trim }}]{% else %}"
    "<|{{ m.role }}|>{{ m['content'] + eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PIECES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.__init__.__globals__ }}",
    "{{ 'x' * 10**9 }}", "{% for i in range(10**9) %}x{% endfor %}", "{% include '/etc/passwd' %}",
    "{% import 'os' as o %}{{ o }}", "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self._TemplateReference__context }}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ 9**9**9 }}",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "{{ '%1000000000d' % 1 }}", "{{ nothing.at.all }}",
    "{% set ns = namespace(x=messages) %}{{ ns.x.append(1) }}", "{{ '{0.__class__}'.format(1) }}",
    "{% raw %}", "{%", "}}", "{{", "{#", "\x00", "\ud800", "{{ lipsum(n=10**6) }}", "{{ messages | tojson }}",
    "{% for a in range(9**5) %}{% for b in range(9**5) %}{% endfor %}{% endfor %}",
)  # fmt: skip


def broken(chance: random.Random) -> str:
    """A good template with a cut, a flip, or a piece of another kind in it."""
    place, kind = chance.randrange(len(GOOD)), chance.randrange(4)
    if kind == 0:
        return GOOD[:place] + GOOD[chance.randrange(place, len(GOOD)) :]
    if kind == 1:
        return GOOD[:place] + chr(ord(GOOD[place]) ^ (1 << chance.randrange(7))) + GOOD[place + 1 :]
    place = GOOD.find("{", place) if kind == 2 else place
    return GOOD[:place] + chance.choice(PIECES) + GOOD[place:]


def ending(template: str) -> str:
    """How a template ended, which is counted."""
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    try:
        text = render_chat(template, messages, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    except TopogradError as error:
        message = str(error)
    else:
        assert not any(word in text for word in ("root:", "uid=", "<class")), "it saw what is not its own"
        assert len(text) <= chat.MAX_OUTPUT_CHARACTERS
        return "rendered"
    assert "\n" not in message
    return "refused"


def test_broken_templates(
    count: Callable[[str, str], None], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "SECONDS", 1)
    monkeypatch.setattr(chat, "PATIENCE", 60)  # a busy machine
    chance = random.Random(0)
    for template in [*PIECES, *(broken(chance) for _ in range(24 * times))]:
        count("chat template", ending(template))
