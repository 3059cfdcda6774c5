"""Decoding against the obvious loop: read the whole window again for every token, through every layer."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from topograd.errors import ConfigError, DivergenceError
from topograd.nn.generate import choose, generate
from topograd.nn.gpt import GPT
from topograd.nn.stack import Bus
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.executor import prepare

VOCAB, CONTEXT = 17, 8
PROMPT = [3, 1, 4, 1, 5]


class Plain(nn.Module):
    """A layer that cannot decode step by step."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor, bus: Bus) -> Tensor:
        out: Tensor = self.layer(h, bus)
        return out


def model(**settings: Any) -> tuple[GPT, Plan]:
    """A float64 GPT of three stages with random weights; heads of their own for each."""
    torch.manual_seed(0)
    stack = GPT(layers=4, width=16, heads=2, vocab=VOCAB, context=CONTEXT, **settings).double()
    plan = prepare(stack, Topology.chain(Configuration.parse("1,2,1", heads="per-stage")))
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return stack.eval(), plan


def obvious(stack: GPT, layers: int, stage: int, tokens: int, **how: Any) -> list[int]:
    """What `generate` should give, by full forwards of at most CONTEXT tokens."""
    generator = torch.Generator().manual_seed(how.get("seed", 0))
    window, written = list(PROMPT), []
    for _ in range(tokens):
        inputs = torch.tensor([window])
        with torch.no_grad():
            h = stack.embed(inputs)
            bus = stack.bus(h, inputs)
            for layer in stack.layers[:layers]:
                h = layer(h, bus)
            logits = stack.readout(h, stage)[0, -1]
        written.append(choose(logits, how.get("temperature", 0.0), how.get("top_k"), generator))
        if len(window) == CONTEXT:
            window = window[CONTEXT // 2 :]
        window.append(written[-1])
    return written


@pytest.mark.parametrize("how", [{}, {"temperature": 0.9, "seed": 5}, {"temperature": 2.0, "top_k": 4}])
@pytest.mark.parametrize(("stage", "layers"), [(0, 1), (1, 3), (2, 4)])
@pytest.mark.parametrize(
    "settings", [{}, {"windows": (3, 0), "kv_heads": 1, "mlp": "swiglu", "softcap": 5.0}]
)
def test_cached_and_recomputed_give_the_tokens_of_full_forwards(
    settings: dict[str, Any], stage: int, layers: int, how: dict[str, Any]
) -> None:
    stack, plan = model(**settings)
    expected = obvious(stack, layers, stage, 20, **how)
    assert not how or len(set(expected)) > 2, "a constant answer would show nothing"
    assert list(generate(stack, plan, PROMPT, 20, stage=stage, context=CONTEXT, **how)) == expected
    stack.layers = nn.ModuleList(Plain(layer) for layer in stack.layers)
    assert list(generate(stack, plan, PROMPT, 20, stage=stage, context=CONTEXT, **how)) == expected


def test_only_the_needed_layers_run_and_one_position_at_a_time() -> None:
    stack, plan = model()
    seen: list[tuple[int, int]] = []
    for index, layer in enumerate(stack.layers):
        layer.register_forward_hook(lambda m, args, out, i=index: seen.append((i, args[0].shape[1])))
    list(generate(stack, plan, PROMPT, 6, stage=0, context=CONTEXT))
    # 5 + 3 tokens fill the context; of the last 8, four are kept and read again with the new one
    assert seen == [(0, 5), (0, 1), (0, 1), (0, 1), (0, 5), (0, 1)]


def test_tokens_come_as_they_are_made() -> None:
    stack, plan = model()
    stream = generate(stack, plan, PROMPT, 10**9, stage=2, context=CONTEXT)
    assert isinstance(stream, Iterator)
    assert list(islice(stream, 3)) == list(generate(stack, plan, PROMPT, 3, stage=2, context=CONTEXT))
    assert list(generate(stack, plan, PROMPT, 0, stage=2, context=CONTEXT)) == []


def test_a_prompt_longer_than_the_context_is_read_from_its_end() -> None:
    stack, plan = model()
    long = [*range(16), *PROMPT, 2, 7, 1]
    given = [
        list(generate(stack, plan, prompt, 5, stage=2, context=CONTEXT)) for prompt in (long, long[-CONTEXT:])
    ]
    assert given[0] == given[1]
    assert len(list(generate(stack, plan, PROMPT, 5, stage=2, context=1))) == 5


def test_the_prompt_is_left_as_it_was() -> None:
    stack, plan = model()
    prompt = list(PROMPT)
    list(generate(stack, plan, prompt, 3, stage=2, context=CONTEXT))
    assert prompt == PROMPT


def test_a_seed_decides_and_other_seeds_differ() -> None:
    stack, plan = model()

    def written(seed: int) -> list[int]:
        return list(generate(stack, plan, PROMPT, 12, stage=2, temperature=2.0, seed=seed, context=CONTEXT))

    before = torch.get_rng_state()
    assert written(1) == written(1)
    assert len({tuple(written(seed)) for seed in range(5)}) > 1
    assert torch.equal(torch.get_rng_state(), before), "the global generator is not touched"


def test_draws_follow_the_softmax_at_its_temperature() -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    draws = torch.tensor([choose(logits, 0.5, None, generator) for _ in range(4000)])
    shares = torch.bincount(draws, minlength=4) / len(draws)
    assert (shares - (logits / 0.5).softmax(-1)).abs().max() < 0.03  # 4 standard deviations
    kept = {choose(logits, 5.0, 2, generator) for _ in range(100)}
    assert kept == {0, 2}


@pytest.mark.parametrize("temperature", [0.0, 1e-300])
def test_no_temperature_takes_the_largest(temperature: float) -> None:
    logits = torch.tensor([1.0, 1e4, -1e4], dtype=torch.float64)
    assert choose(logits, temperature, None, torch.Generator()) == 1


def test_logits_that_are_not_finite_are_refused() -> None:
    stack, plan = model()
    with torch.no_grad():
        stack.head.weight.fill_(float("nan"))
    with pytest.raises(DivergenceError, match="not finite"):
        next(generate(stack, plan, PROMPT, 1, stage=2, context=CONTEXT))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": []}, "the prompt has no token"),
        ({"tokens": -1}, "tokens is -1"),
        ({"context": 0}, "context is 0"),
        ({"stage": 3}, "stage 3 does not exist; the plan has stages 0 to 2"),
        ({"stage": -1}, "stage -1 does not exist"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top-k is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(change: dict[str, Any], words: str) -> None:
    stack, plan = model()
    asked: dict[str, Any] = {"prompt": PROMPT, "tokens": 1, "stage": 0, "context": CONTEXT} | change
    with pytest.raises(ConfigError, match=words):
        generate(stack, plan, **asked)
