"""Chat templates, against transformers' own rendering; and what hostile ones can do."""

from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from topograd.convert import chat
from topograd.convert.chat import Renderer, render_chat
from topograd.errors import CheckpointError, ConfigError, TopogradError

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
    "trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system, rest = messages[0]['content'], messages[1:] %}
{%- else %}
    {%- set system, rest = false, messages %}
{%- endif %}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must\\nalternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + ('<<SYS>>' + system if loop.first and system else '') }}
        {{- message['content'] | trim + ' [/INST]' }}
    {%- else %}
        {%- generation %}
        {{- ' ' + message['content'] | trim + ' ' + eos_token }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}
"""
TOOLS = """
{%- set ns = namespace(count=0, last='') -%}
{% for message in messages %}
    {% if message.role == 'skip' %}
        {% continue %}
    {% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- macro show(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}
  {{ show(message) }}
{% endfor %}
{{ ns.count }}: {{ tools | tojson(indent=2) }} {{ dict(a=1) | tojson }} {{ "<&>'é" | tojson }}
{%- if enable_thinking is defined and not enable_thinking %} off{% endif %} {{ strftime_now("%Y") }}
"""
TEMPLATES = {"smollm2": SMOLLM2, "llama2": LLAMA2, "tools": TOOLS}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def _theirs(template: str, messages: list[dict[str, Any]], **settings: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(models.BPE()), chat_template=template, **TOKENS
    )
    text = tokenizer.apply_chat_template(messages, tokenize=False, **settings)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=6, deadline=None)
@given(
    contents=st.lists(st.text(max_size=30), min_size=1, max_size=4),
    system=st.booleans(),
    prompt=st.booleans(),
)
def test_renders_as_transformers(name: str, contents: list[str], system: bool, prompt: bool) -> None:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    if system:
        messages.insert(0, {"role": "system", "content": "Be brief.\n"})
    more: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "é"}}]} if system else {}
    ours = render_chat(
        TEMPLATES[name],
        messages,
        add_generation_prompt=prompt,
        special_tokens=TOKENS,
        enable_thinking=False,
        **more,
    )
    assert ours == _theirs(
        TEMPLATES[name], messages, add_generation_prompt=prompt, enable_thinking=False, **more
    )


def test_a_template_may_refuse_a_conversation() -> None:
    wrong = [{"role": "assistant", "content": "a"}]
    with pytest.raises(ConfigError, match="refuses this conversation: Conversation roles must alternate"):
        render_chat(LLAMA2, wrong, special_tokens=TOKENS)


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'] }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ (''|attr('__class__')).mro() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['sys'] }}",
    "{{ strftime_now.__globals__.sys.modules }}",
    "{{ self.__init__.__globals__.x }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{% set ns = namespace(__class__=1) %}",
    "{% set ns = namespace() %}{% set ns.__dict__ = 1 %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_escapes_from_the_sandbox_are_refused(template: str) -> None:
    with pytest.raises(TopogradError, match="cannot be rendered") as caught:
        render_chat(template, [{"role": "user", "content": "a"}])
    assert "\n" not in str(caught.value)


ENDLESS = {
    "loops": "{% set r = range(99999) %}" + "{% for a in r %}" * 3 + "{% endfor %}" * 3,
    "quiet loop": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "power": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "string": "{{ 'a' * 10 ** 12 }}",
    "doubling": "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s * 2 %}{% endfor %}",
    "filter": "{{ 'a' | center(10 ** 11) }}",
    "join": "{{ range(99999) | map('string') | join('a' * 10 ** 5) | length }}",
    "output": "{% for a in range(99999) %}{{ 'a' * 10000 }}{% endfor %}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "nested": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_time_memory_and_output_are_bounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "SECONDS", 1)
    with pytest.raises(CheckpointError, match="cannot be rendered") as caught:
        render_chat(ENDLESS[name], [{"role": "user", "content": "a"}])
    assert "\n" not in str(caught.value)


def test_wrong_templates_and_messages_are_one_line() -> None:
    message = [{"role": "user", "content": "a"}]
    with pytest.raises(CheckpointError, match="TemplateSyntaxError"):
        render_chat("{% if %}\n{{", message)
    with pytest.raises(CheckpointError, match="UndefinedError"):
        render_chat("{{ nothing.here }}", message)
    with pytest.raises(CheckpointError, match="characters"):
        render_chat("a" * (chat.MAX_TEMPLATE_CHARACTERS + 1), message)
    with pytest.raises(ConfigError, match="not plain text"):
        render_chat(SMOLLM2, [{"role": "user", "content": object()}])
    with pytest.raises(ConfigError, match="conversation has"):
        render_chat(SMOLLM2, [{"role": "user", "content": "a" * chat.MAX_MESSAGE_CHARACTERS}])


def test_a_renderer_gives_what_render_chat_gives_again_and_again() -> None:
    messages = [{"role": "user", "content": "a"}]
    renderer = Renderer()
    try:
        for _ in range(2):
            assert renderer.render(SMOLLM2, messages) == render_chat(SMOLLM2, messages)
        with pytest.raises(ConfigError, match="refuses this conversation: no"):
            renderer.render("{{ raise_exception('no') }}", messages)
        assert renderer.render("{{ bos_token }}", messages, {"bos_token": "B"}) == "B", "and it goes on"
    finally:
        renderer.close()
