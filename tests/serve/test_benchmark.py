"""Several clients at a depth against full depth: the numbers are there, and the texts are full depth's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raising import refused
from topograd.errors import ConfigError
from topograd.serve.benchmark import bench_serve, code_prompts
from topograd.serve.settings import ServeSettings

SMALL = ServeSettings(clients=3, tokens=4, prompt_tokens=6, rounds=2)


def test_drafts_write_what_full_depth_writes(make_desk: Callable[..., Any]) -> None:
    desk = make_desk()
    found = bench_serve(desk.session, desk.model.engine, SMALL)
    assert found["mismatches"] == found["ties"] == 0, "float64"
    assert found["tokens_per_second"] > 0
    assert found["speedup_over_full"] == found["spread"]["median"] > 0
    assert found["settings"]["clients"] == 3


def test_prompts_are_unlike_and_fit(make_desk: Callable[..., Any]) -> None:
    session = make_desk().session
    prompts = code_prompts(session.tokenizer, 20, 6)
    assert len(prompts) == 20
    assert len({tuple(prompt) for prompt in prompts}) > 10, "six bytes of code are often spaces"
    assert {len(prompt) for prompt in prompts} == {6}
    with refused(ConfigError, setting="clients", given=0):
        ServeSettings(clients=0)


def test_tokens_fit_the_context(make_desk: Callable[..., Any]) -> None:
    desk = make_desk()
    context = desk.session.config.model.context
    assert context < 96 + context // 2, "shorter than the default asks for"
    found = bench_serve(desk.session, desk.model.engine, ServeSettings(clients=1, rounds=1, depth="prefix:1"))
    assert found["settings"]["tokens"] == context - context // 2
    with refused(ConfigError, setting="tokens", given=4000):
        bench_serve(desk.session, desk.model.engine, ServeSettings(tokens=4000))


def test_depths_of_other_plans_are_refused(make_desk: Callable[..., Any]) -> None:
    desk = make_desk()
    with refused(ConfigError, setting="depth", given="path:1,3"):
        bench_serve(desk.session, desk.model.engine, ServeSettings(depth="path:1,3", tokens=4))
