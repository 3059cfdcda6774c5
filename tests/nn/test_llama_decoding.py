"""The Llama for decoding is the Llama: whole, by tokens, in ragged rows, on part of the head."""

from typing import Any

import pytest
import torch

from topograd.depth.engine import Engine, Prefix, generate_batch
from topograd.nn.llama import Llama
from topograd.nn.llama_decoding import DecodingLlama
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

transformers: Any = pytest.importorskip("transformers")


def llama(bias: bool, kv_heads: int, dtype: torch.dtype = torch.float64) -> Llama:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        attention_bias=bias,
        mlp_bias=bias,
    )
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return Llama.of(model)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@torch.no_grad()
def test_the_whole_forward(bias: bool, kv_heads: int) -> None:
    stack = llama(bias, kv_heads)
    fast = stack.for_decoding()
    assert isinstance(fast, DecodingLlama)
    inputs = torch.randint(40, (2, 9))
    expected = stack(inputs)
    torch.testing.assert_close(fast(inputs), expected, rtol=0, atol=1e-12 * expected.abs().max().item())


@torch.no_grad()
def test_token_by_token_and_heads_of_their_own() -> None:
    stack = llama(False, 2)
    stack.add_heads(range(2))
    for delta in stack.head.deltas.values():
        torch.nn.init.normal_(delta.get_parameter("weight"), std=0.2)
    fast, inputs = stack.for_decoding(), torch.randint(40, (2, 7))
    states = [layer.new_state(2, 7) for layer in fast.layers]  # type: ignore[operator]
    for stage in range(2):
        h = stack.embed(inputs)
        bus = stack.bus(h, inputs)
        for layer in stack.layers:
            h = layer(h, bus)
        expected = stack.readout(h, stage)
        for state in states:
            state.rewind([0, 0])
        for time in range(7):
            token = inputs[:, time : time + 1]
            x = fast.embed(token)
            bus = fast.bus(x, token, time)
            for layer, state in zip(fast.layers, states, strict=True):
                x = layer(x, bus, state)
            some, bound = torch.tensor([5, 1]), 1e-12 * expected.abs().max().item()
            found, part = fast.readout(x, stage)[:, 0], fast.readout(x, stage, some)[:, 0]
            torch.testing.assert_close(found, expected[:, time], rtol=0, atol=bound)
            torch.testing.assert_close(part, expected[:, time, some], rtol=0, atol=bound)


def test_ragged_rows_write_what_they_write_alone() -> None:
    engine = Engine(llama(False, 2), Plan.of(Topology.chain("1,1,1"), 3), context=16)
    prompts = [[1, 2, 3], [7], [4, 5, 6, 7, 8]]
    together = generate_batch(Prefix(engine), prompts, 20)
    alone = [generate_batch(Prefix(engine), [prompt], 20)[0] for prompt in prompts]
    assert together == alone


def test_half_precision_keeps_the_plain_form() -> None:
    assert not isinstance(llama(False, 2, torch.bfloat16).for_decoding(), DecodingLlama)
