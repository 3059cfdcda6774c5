"""Transformers of the published families: settings, decoding in pieces and in ragged rows, the decoding form.

That they are what transformers computes is in tests/models/test_exact.py.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from raising import refused
from tests.oracles.train_step import graph_losses
from topograd.decode.cache import Cache
from topograd.decode.engine import Engine
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.errors import StackError
from topograd.exec.train_step import train_step
from topograd.nn.heads import LowRankDelta
from topograd.nn.preparation import prepare
from topograd.nn.stack import Stack
from topograd.nn.transformer.config import TRAITS, TransformerConfig
from topograd.nn.transformer.decode import DecodingTransformer
from topograd.nn.transformer.parts import RMSNorm
from topograd.nn.transformer.stack import Transformer
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

VOCAB = 23
BASE = TransformerConfig(
    family="llama",
    layers=3,
    width=24,
    heads=4,
    kv_heads=2,
    head_width=6,
    mlp_width=37,
    vocab=VOCAB,
    context=16,
    norm_eps=1e-3,
)
GEMMA: dict[str, Any] = {"tied": True, "activation": "gelu_pytorch_tanh", "head_width": 10}
CONFIGS: dict[str, TransformerConfig] = {
    "llama": BASE,
    "llama-biases": replace(BASE, qkv_bias=True, output_bias=True, mlp_bias=True, kv_heads=4),
    "llama-tied": replace(BASE, tied=True, kv_heads=1, rope_base=50.0, activation="gelu"),
    "llama-long": replace(BASE, rope_scaling="llama3", rope_factor=8.0, rope_original_context=32),
    "mistral": replace(BASE, family="mistral", windows=(3,)),
    "qwen2": replace(BASE, family="qwen2", qkv_bias=True, windows=(0, 4, 4)),
    "qwen3": replace(BASE, family="qwen3", qk_norm=True, head_width=8),
    "gpt2": replace(
        BASE,
        family="gpt2",
        kv_heads=4,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied=True,
        activation="gelu_new",
    ),
    "gemma": replace(BASE, family="gemma", **GEMMA),
    "gemma2": replace(
        BASE, family="gemma2", windows=(3, 0), attention_softcap=2.0, softcap=3.0, query_scalar=13, **GEMMA
    ),
    "gemma3": replace(
        BASE,
        family="gemma3_text",
        windows=(3, 3, 0),
        local_rope_base=70.0,
        rope_base=1e6,
        qk_norm=True,
        **GEMMA,
    ),
    "gemma3-long": replace(
        BASE,
        family="gemma3_text",
        windows=(0, 4),
        local_rope_base=10.0,
        rope_scaling="linear",
        rope_factor=8.0,
        qk_norm=True,
        **GEMMA,
    ),
}

LOW_RANK = replace(Topology.chain(Configuration.parse("1,2", heads="per-stage")), head_rank=2)


def build(config: TransformerConfig, dtype: torch.dtype = torch.float64) -> Transformer:
    """A stack with noise on every parameter."""
    torch.manual_seed(3)
    stack = Transformer(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return stack


@pytest.fixture(params=CONFIGS.values(), ids=list(CONFIGS))
def stack(request: pytest.FixtureRequest) -> Transformer:
    return build(request.param)


@pytest.fixture(params=["plain", "for decoding"])
def form(request: pytest.FixtureRequest, stack: Transformer) -> Stack:
    """The stack, or its decoding form."""
    return stack if request.param == "plain" else stack.for_decoding()


def tokens(rows: int = 2, time: int = 9, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (rows, time), generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * expected.abs().max().item())


@torch.no_grad()
def run(stack: Stack, inputs: Tensor, offset: int | Tensor, states: list[Any], stage: int = 0) -> Tensor:
    """Logits of inputs (batch, time) whose first position, or whose positions, `offset` is."""
    h = stack.embed(inputs)
    ctx = stack.layer_context(h, inputs, offset)
    for layer, state in zip(stack.layers, states, strict=True):
        h = layer(h, ctx, state)
    return stack.readout(h, stage)


def states_of(stack: Stack, rows: int, capacity: int) -> list[Any]:
    return [layer.new_state(rows, capacity) for layer in stack.layers]  # type: ignore[operator]


def decode(stack: Stack, inputs: Tensor, pieces: Sequence[int], states: list[Any], start: int = 0) -> Tensor:
    """Logits at all positions, piece by piece."""
    result = []
    for piece in pieces:
        result.append(run(stack, inputs[:, start : start + piece], start, states))
        start += piece
    return torch.cat(result, dim=1)


@torch.no_grad()
def test_the_decoding_form_is_the_plain_one(stack: Transformer) -> None:
    fast = stack.for_decoding()
    assert isinstance(fast, DecodingTransformer)
    for rows, time in ((1, 1), (2, 3), (3, 4), (2, 16)):
        close(fast(tokens(rows, time)), stack(tokens(rows, time)), 1e-12)


@torch.no_grad()
def test_the_decoding_form_in_float32_is_equal_up_to_rounding() -> None:
    for config in CONFIGS.values():
        stack = build(config, torch.float32)
        close(stack.for_decoding()(tokens()), stack(tokens()), 1e-4)


@pytest.mark.parametrize("pieces", [(1,) * 9, (9,), (3, 1, 4, 1), (1, 8)], ids=str)
@torch.no_grad()
def test_decoding_in_pieces_is_the_whole_forward(
    stack: Transformer, form: Stack, pieces: tuple[int, ...]
) -> None:
    close(decode(form, tokens(), pieces, states_of(form, 2, 9)), stack(tokens()))


@torch.no_grad()
def test_going_back_and_on(stack: Transformer, form: Stack) -> None:
    inputs, other = tokens(), tokens(seed=2)
    other[:, :4] = inputs[:, :4]
    states = states_of(form, 2, 9)
    decode(form, inputs, (5, 1, 3), states)
    for state in states:
        assert state.truncate(4) == 4
    close(decode(form, other, (2, 1, 1, 1), states, start=4), stack(other)[:, 4:])


@pytest.mark.parametrize("piece", [1, 2])
@torch.inference_mode()
def test_ragged_rows_in_one_batch(stack: Transformer, form: Stack, piece: int) -> None:
    """Prompts of 5, 1 and 3 tokens, then four more tokens for each, some at a time."""
    inputs, lengths = tokens(rows=3).tolist(), [5, 1, 3]
    cache = Cache(form, Plan.of(Topology.chain("3"), 3), 9)
    batch = [cache.new() for _ in lengths]

    def step(starts: list[int], counts: list[int]) -> list[Tensor]:
        each = zip(inputs, starts, counts, strict=True)
        cache.push(batch, [row[start : start + count] for row, start, count in each])
        cache.run(batch, 0)
        return list(form.readout(cache.hidden(batch, 0, counts), 0).split(counts))

    parts = [step([0, 0, 0], lengths)]
    parts += [step([n + start for n in lengths], [piece] * 3) for start in range(0, 4, piece)]
    for r, length in enumerate(lengths):
        alone = stack(torch.tensor([inputs[r][: length + 4]]))[0]
        close(torch.cat([part[r] for part in parts]), alone)


@torch.no_grad()
def test_heads_of_their_own(stack: Transformer) -> None:
    prepare(stack, LOW_RANK)
    for delta in stack.head.deltas.values():
        torch.nn.init.normal_(delta.get_parameter("up"), std=0.3)
    fast, some, inputs = stack.for_decoding(), torch.tensor([5, 1]), tokens()
    logits = []
    for stage in range(3):
        expected = run(stack, inputs, 0, [None] * 3, stage)
        close(run(fast, inputs, 0, [None] * 3, stage), expected, 1e-12)
        h = torch.randn(2, 3, 24, dtype=torch.float64)
        close(fast.readout(h, stage, some), stack.readout(h, stage)[..., some], 1e-12)
        logits.append(expected)
    assert not torch.allclose(logits[0], logits[1])
    assert not torch.allclose(logits[1], logits[2])  # stage 2 has no head of its own


def test_a_training_step_with_low_rank_heads_is_that_of_one_graph(stack: Transformer) -> None:
    prepare(stack, LOW_RANK)
    assert {type(delta) for delta in stack.head.deltas.values()} == {LowRankDelta}
    with torch.no_grad():
        for delta in stack.head.deltas.values():
            delta.get_parameter("up").normal_(std=0.3)
    total, expected_losses = graph_losses(stack, LOW_RANK, tokens(), tokens(seed=2))
    total.backward()
    expected = {name: p.grad for name, p in stack.named_parameters()}
    stack.zero_grad()
    close(train_step(stack, LOW_RANK, tokens(), tokens(seed=2)), expected_losses)
    for name, parameter in stack.named_parameters():
        gradient = expected[name]
        assert gradient is not None, name
        assert parameter.grad is not None, name
        assert gradient.count_nonzero() > 0, name
        close(parameter.grad, gradient)


def test_ragged_prompts_write_what_they_write_alone(stack: Transformer) -> None:
    engine = Engine(stack, Plan.of(Topology.chain("1,1,1"), 3), context=16)
    prompts = [[1, 2, 3], [7], [4, 5, 6, 7, 8]]
    together = generate_batch(FixedDepth(engine), prompts, 11)
    alone = [generate_batch(FixedDepth(engine), [prompt], 11)[0] for prompt in prompts]
    assert together == alone


def test_greedy_tokens_are_those_of_the_whole_forward(stack: Transformer) -> None:
    text = [4, 7, 1]
    for _ in range(12):
        with torch.no_grad():
            text.append(int(stack(torch.tensor([text]))[0, -1].argmax()))
    engine = Engine(stack, Plan.of(Topology.chain("1,2"), 3), context=16)
    [written] = generate_batch(FixedDepth(engine), [text[:3]], 12)
    assert [emitted.token for emitted in written] == text[3:]


@torch.no_grad()
def test_appended_layers_are_the_identity(stack: Transformer) -> None:
    before = stack(tokens())
    stack.append_layers(2)
    assert len(stack.layers) == stack.config.layers == 5
    assert torch.equal(stack(tokens()), before)
    assert {p.dtype for p in stack.parameters()} == {torch.float64}


def test_half_precision_keeps_the_plain_form_and_exact_frequencies() -> None:
    stack = build(BASE, torch.bfloat16)
    assert not isinstance(stack.for_decoding(), DecodingTransformer)
    assert stack.frequencies.dtype == torch.float32
    with torch.no_grad():
        assert stack.for_decoding()(tokens()).dtype == torch.bfloat16


def test_on_the_meta_device_nothing_is_allocated() -> None:
    with torch.device("meta"):
        stack = Transformer(CONFIGS["gemma3"])
    assert all(p.is_meta for p in stack.parameters())
    assert not stack.frequencies.is_meta
    assert stack.head.weight is stack.embedding.weight


def test_learned_positions_end() -> None:
    stack = build(CONFIGS["gpt2"])
    for form in (stack, stack.for_decoding()):
        with refused(StackError, setting="inputs", given=17):
            form(tokens(time=17))
        with refused(StackError, setting="inputs", given=19):
            run(form, tokens(time=1), 18, states_of(form, 2, 16))


def test_a_norm_has_its_epsilon_and_a_gradient_at_zero() -> None:
    norm = RMSNorm(2, 0.25, around_one=False).double()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0]))
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    expected = torch.tensor([[3.0, 8.0], [0.0, 0.0]], dtype=torch.float64) / 12.75**0.5
    close(norm(x), expected)
    (gradient,) = torch.autograd.grad(norm(x)[1].sum(), x)
    assert torch.equal(gradient, torch.tensor([[0.0, 0.0], [2.0, 4.0]], dtype=torch.float64))


def test_norms_in_half_precision_are_reduced_in_float32() -> None:
    """Rounded once, at the end; a mean kept in bfloat16 would be off by up to 1/256 for a whole row."""
    x, norm = torch.randn(64, 300).bfloat16(), RMSNorm(300, 1e-6, around_one=False)
    assert torch.equal(norm.bfloat16()(x), RMSNorm(300, 1e-6, around_one=False)(x.float()).bfloat16())


def test_a_window_reaches_just_so_far() -> None:
    """A token that is outside every window of a stack of windows changes nothing."""
    stack, inputs = build(replace(BASE, family="mistral", windows=(3,), layers=2)), tokens(1, 9)
    changed = inputs.clone()
    changed[0, 2] = (changed[0, 2] + 1) % VOCAB
    with torch.no_grad():
        differs = (stack(inputs) != stack(changed)).any(-1)[0]
    assert differs.tolist() == [False, False, True, True, True, True, True, False, False]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "family": ({"family": "opt"}, "family"),
    "activation": ({"activation": "mish"}, "activation"),
    "scaling": ({"rope_scaling": "yarn"}, "rope_scaling"),
    "layers": ({"layers": 0}, "layers"),
    "many layers": ({"layers": 5000}, "layers"),
    "width": ({"width": 2.5}, "width"),
    "flag": ({"heads": True}, "heads"),
    "vocab": ({"vocab": 2**25}, "vocab"),
    "kv heads": ({"kv_heads": 3}, "kv_heads"),
    "head width": ({"head_width": 5}, "head_width"),
    "giant heads": ({"heads": 2**13, "kv_heads": 1, "head_width": 2**13}, "heads"),
    "gpt2": ({"family": "gpt2"}, "kv_heads"),
    "epsilon": ({"norm_eps": 0.0}, "norm_eps"),
    "base": ({"rope_base": float("inf")}, "rope_base"),
    "cap": ({"softcap": -1.0}, "softcap"),
    "factors": ({"rope_scaling": "llama3", "rope_low_factor": 4.0}, "rope_low_factor"),
    "attention cap": ({"attention_softcap": 1.0}, "attention_softcap"),
    "window": ({"windows": (3, -1)}, "windows"),
}


@pytest.mark.parametrize(("settings", "setting"), WRONG.values(), ids=WRONG)
def test_wrong_settings_are_refused(settings: dict[str, Any], setting: str) -> None:
    given = settings.get(setting, getattr(BASE, setting))
    with refused(StackError, setting=setting, given=given):
        TransformerConfig(**asdict(BASE) | settings)


def test_every_family_is_tried() -> None:
    assert {config.family for config in CONFIGS.values()} == set(TRAITS)
