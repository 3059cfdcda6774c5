"""The GPT rewritten for decoding is the GPT: whole, in pieces, in ragged rows, with every option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pieces import Decoded
from topograd.decode.cache import Cache
from topograd.exec.forward import stage_outputs
from topograd.nn.config import GPTConfig
from topograd.nn.gpt import GPT
from topograd.nn.stack import Stack
from topograd.nn.transformer.decode import DecodingTransformer, Unit
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

VOCAB, CONTEXT, STAGES = 23, 12, 3
PLAN = Plan.of(Topology.chain("1,1,1"), 3)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no smear": {"smear": False},
    "no x0 blend": {"x0_blend": False},
    "no value embeddings": {"value_embeddings": "none"},
    "all value embeddings": {"value_embeddings": "all"},
    "one kv head": {"kv_heads": 1},
    "two kv heads": {"kv_heads": 2, "value_embeddings": "all"},
    "swiglu": {"mlp": "swiglu", "mlp_ratio": 1.3},
    "softcap": {"softcap": 2.0},
    "tied": {"tied": True},
    "windows": {"windows": (3, 0, 1)},
    "low-rank heads": {"head_rank": 2, "rope_base": 100.0},
    "everything": {
        "kv_heads": 2,
        "mlp": "swiglu",
        "softcap": 3.0,
        "tied": True,
        "windows": (4, 0),
        "value_embeddings": "all",
        "head_rank": 3,
    },
}


def make(options: dict[str, Any], heads: int = STAGES) -> GPT:
    """A float64 GPT, every parameter random."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"layers": 3, "width": 16, "heads": 4, "vocab": VOCAB, "context": CONTEXT}
    model = GPT(**sizes | options).double().eval()
    if heads:
        model.add_heads(range(heads))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


@pytest.fixture(params=list(OPTIONS))
def gpt(request: pytest.FixtureRequest) -> GPT:
    return make(OPTIONS[request.param])


def tokens(rows: int, time: int = CONTEXT) -> Tensor:
    return torch.randint(VOCAB, (rows, time), generator=torch.Generator().manual_seed(1))


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    """Within a share of the largest logit."""
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance * b.abs().max().item())


@torch.no_grad()
def logits(stack: Stack, inputs: Tensor, states: Decoded | None = None) -> Tensor:
    """Logits of every stage, (stages, rows, time, vocab)."""
    every = range(STAGES)
    hidden = stage_outputs(stack, PLAN, inputs, every) if states is None else states.outputs(inputs, every)
    return torch.stack([stack.readout(hidden[k], k) for k in range(STAGES)])


def test_the_whole_forward(gpt: GPT) -> None:
    fast, inputs = gpt.for_decoding(), tokens(3)
    assert isinstance(fast, DecodingTransformer)
    with torch.no_grad():
        close(fast(inputs), gpt(inputs))
        close(fast(inputs[:, :1]), gpt(inputs[:, :1]))
    expected = logits(gpt, inputs)
    close(logits(fast, inputs), expected)
    assert (expected[0].argmax(-1) != expected[2].argmax(-1)).any(), "equal stages would show less"


@pytest.mark.parametrize("pieces", [(1,) * 12, (12,), (5, 1, 1, 5), (1, 7, 4)], ids=str)
def test_in_pieces(gpt: GPT, pieces: tuple[int, ...]) -> None:
    fast, inputs = gpt.for_decoding(), tokens(2)
    states = Decoded(fast, PLAN, 2, CONTEXT)
    parts = [logits(fast, part, states) for part in inputs.split(list(pieces), dim=1)]
    close(torch.cat(parts, dim=2), logits(gpt, inputs))


@torch.inference_mode()
def test_ragged_rows(gpt: GPT) -> None:
    """Three sequences come to 12, 5 and 8 positions in three steps, packed; one step is empty for one."""
    inputs, lengths = tokens(3), (12, 5, 8)
    expected = [gpt(inputs[row : row + 1, :n]) for row, n in enumerate(lengths)]
    for stack in (gpt.for_decoding(), gpt):
        cache = Cache(stack, PLAN, CONTEXT)
        batch = [cache.new() for _ in lengths]
        result: list[list[Tensor]] = [[], [], []]
        for step in ([(0, 7), (0, 1), (0, 4)], [(7, 8), (1, 3), (4, 4)], [(8, 12), (3, 5), (4, 8)]):
            counts = [b - a for a, b in step]
            cache.push(batch, [inputs[row, a:b].tolist() for row, (a, b) in enumerate(step)])
            cache.run(batch, 2)
            some = [row for row in range(3) if counts[row]]
            h = cache.hidden([batch[row] for row in some], 2, [counts[row] for row in some])
            parts = stack.readout(h, stack.last_stage).split([counts[row] for row in some])
            for row, part in zip(some, parts, strict=True):
                result[row].append(part)
        for row in range(3):
            close(torch.cat(result[row]), expected[row][0])


@torch.no_grad()
def test_positions_beyond_the_context(gpt: GPT) -> None:
    """The GPT has no last position; the tables of its copy grow."""
    inputs = tokens(2, 3 * CONTEXT)
    expected = logits(gpt, inputs)
    close(logits(gpt.for_decoding(), inputs), expected)
    fast = gpt.for_decoding()
    states = Decoded(fast, PLAN, 2, 3 * CONTEXT)
    parts = [logits(fast, part, states) for part in inputs.split([CONTEXT, 1, 1, 7, 15], dim=1)]
    close(torch.cat(parts, dim=2), expected)
    unlike = torch.tensor([[0, 1], [2 * CONTEXT, 2 * CONTEXT + 1]])
    assert (
        gpt.for_decoding().layer_context(gpt.embed(inputs[:, :2]), inputs[:, :2], unlike).positions is unlike
    )


@torch.no_grad()
def test_the_embedding_behind_a_token(gpt: GPT) -> None:
    fast, inputs = gpt.for_decoding(), tokens(2)
    whole = gpt.embed(inputs)
    close(fast.embed(inputs), whole)
    close(fast.embed(inputs[:, 4:], inputs[:, 3]), whole[:, 4:])
    close(fast.embed(inputs[:, 4:5], inputs[:, 3]), whole[:, 4:5])


@torch.no_grad()
def test_readout_on_rows_and_any_leading_shape(gpt: GPT) -> None:
    fast, rows = gpt.for_decoding(), torch.tensor([5, 0, 22, 5])
    h = torch.randn(2, 3, 16, dtype=torch.float64)
    for stage in range(STAGES + 1):  # the last has no head of its own
        expected = gpt.readout(h, stage)
        close(fast.readout(h, stage), expected)
        close(fast.readout(h, stage, rows), expected[..., rows])
        close(fast.readout(h[0, 0], stage), expected[0, 0])
        close(fast.readout(h[0, :1], stage, rows[:1]), expected[0, :1, 5:6])


@torch.no_grad()
def test_a_shared_head() -> None:
    gpt = make({}, heads=0)
    fast, inputs = DecodingTransformer(gpt), tokens(2)
    close(logits(fast, inputs), logits(gpt, inputs))
    assert len(fast._heads) == 1, "stages that share a matrix share its layout"
    assert fast.last_stage == gpt.last_stage == 0


@pytest.mark.parametrize("options", [{}, OPTIONS["everything"]], ids=["plain", "everything"])
def test_float32(options: dict[str, Any]) -> None:
    """Both round at every operation, in another order; errors of 6e-8 grow along three layers of weights
    of 0.4. Against the float64 model neither may be worse than this."""
    exact, gpt = make(options), make(options).float()
    inputs = tokens(2)
    expected = logits(exact, inputs)
    close(logits(gpt, inputs).double(), expected, 2e-5)
    close(logits(gpt.for_decoding(), inputs).double(), expected, 2e-5)


def test_the_gpt_is_left_as_it_was_and_its_copy_records_no_gradient() -> None:
    gpt, inputs = make({}), tokens(2)
    before = {name: p.clone() for name, p in gpt.named_parameters()}
    fast = gpt.for_decoding()
    x0 = fast.embed(inputs)
    assert not fast.layers[0](x0, fast.layer_context(x0, inputs)).requires_grad
    assert all(torch.equal(p, before[name]) for name, p in gpt.named_parameters())
    assert all(p.requires_grad for p in gpt.parameters())


def test_norm_is_the_direction_and_keeps_zero() -> None:
    x = torch.randn(3, 5, dtype=torch.float64)
    unit = Unit(GPTConfig(), x)
    torch.testing.assert_close(unit(x), x / x.square().sum(-1, keepdim=True).sqrt(), rtol=1e-14, atol=0)
    assert torch.equal(unit(torch.zeros(2, 4)), torch.zeros(2, 4))
