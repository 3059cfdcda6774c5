"""A draft stage: unrolled as it drafts, a stage of a topology, and nothing of the base in it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from pieces import Decoded
from raising import refused
from topograd.errors import StackError
from topograd.exec.forward import stage_outputs
from topograd.nn.draft_stage import DraftStage, PreviousRelay, rank_tokens, shifted, step_mask, unit
from topograd.nn.gpt import GPT
from topograd.nn.stack import Stack
from topograd.nn.transformer.config import TransformerConfig
from topograd.nn.transformer.stack import Transformer
from topograd.topology.dag import Edge, Stage, Topology
from topograd.topology.plan import Plan

VOCAB, WIDTH, TIME = 40, 16, 9


def base_of(kind: str) -> GPT | Transformer:
    torch.manual_seed(0)
    if kind == "gpt":
        base: GPT | Transformer = GPT(layers=2, width=WIDTH, heads=2, vocab=VOCAB, context=16)
    else:
        shape = {"layers": 2, "width": WIDTH, "heads": 2, "kv_heads": 1, "head_width": 8, "mlp_width": 24}
        base = Transformer(TransformerConfig(family="llama", vocab=VOCAB, context=16, tied=True, **shape))  # type: ignore[arg-type]
    base = base.double()
    for parameter in base.parameters():
        nn.init.normal_(parameter, std=0.4)
    return base


def stage_of(
    base: Stack, std: float = 0.4, depths: tuple[int, ...] | None = None, slots: int = 1
) -> DraftStage:
    stage = DraftStage(base, torch.arange(0, VOCAB, 2), depths, slots)
    for parameter in stage.parameters():
        nn.init.normal_(parameter, std=std)
    return stage


@pytest.mark.parametrize("kind", ["gpt", "transformer"])
def test_unrolled_it_is_what_it_drafts(kind: str) -> None:
    """The decoding form, token by token from any position on its own states, against all at once."""
    base = base_of(kind)
    stage = stage_of(base)
    inputs, states = torch.randint(VOCAB, (2, TIME)), torch.randn(2, TIME, WIDTH).double()
    steps = list(stage.unroll(inputs, states[:, :, None], 3))
    decoding = stage.stack.for_decoding()
    layer = decoding.layers[0]
    for n in (0, 3, 5):
        memory = layer.new_state(2, 16)  # type: ignore[operator]
        x0 = decoding.embed(inputs[:, : n + 1])
        ctx = decoding.layer_context(x0, inputs[:, : n + 1])
        g = layer(stage.relay.join(x0, shifted(states)[:, : n + 1]), ctx, memory)
        torch.testing.assert_close(g, steps[0][:, : n + 1])
        for step in (1, 2):
            here = slice(n + step, n + step + 1)
            x0 = decoding.embed(inputs[:, here], inputs[:, n + step - 1])
            g = layer(
                stage.relay.join(x0, g[:, -1:]), decoding.layer_context(x0, inputs[:, here], n + step), memory
            )
            torch.testing.assert_close(g, steps[step][:, here])
    torch.testing.assert_close(decoding.readout(g, 0), stage.readout(g))


@pytest.mark.parametrize("kind", ["gpt", "transformer"])
def test_a_block_is_one_pass_over_tokens_and_empty_slots(kind: str) -> None:
    """Against the layer run once over a text that ends in the learned vectors."""
    base = base_of(kind)
    stage = stage_of(base, depths=(0, 1), slots=3)
    inputs, states = torch.randint(VOCAB, (2, TIME)), torch.randn(2, TIME, 2, WIDTH).double()
    steps = list(stage.unroll(inputs, states, 3))
    assert stage.fusion is not None
    assert stage.masks is not None
    read = stage.fusion(torch.cat([unit(states[:, :, 0]), unit(states[:, :, 1])], dim=-1))
    for n in (0, 4):
        tokens = torch.cat([inputs[:, : n + 1], torch.zeros(2, 2, dtype=torch.long)], dim=1)
        x0 = torch.cat([stage.stack.embed(inputs[:, : n + 1]), unit(stage.masks).expand(2, 2, WIDTH)], dim=1)
        before = shifted(read)[:, : n + 1]
        before = torch.cat([before, before[:, -1:], before[:, -1:]], dim=1)
        g = stage(stage.stack.layer_context(x0, tokens), before)
        for step in range(3):
            torch.testing.assert_close(g[:, n + step], steps[step][:, n + step])


def test_several_depths_begin_as_the_last() -> None:
    base = base_of("gpt")
    torch.manual_seed(1)
    plain = DraftStage(base, torch.arange(VOCAB))
    torch.manual_seed(1)
    deep = DraftStage(base, torch.arange(VOCAB), (0, 1))
    deep.load_state_dict(plain.state_dict(), strict=False)
    inputs, states = torch.randint(VOCAB, (2, TIME)), torch.randn(2, TIME, 3, WIDTH).double()
    assert deep.pick(states).equal(states[:, :, :2])
    assert plain.pick(states).equal(states[:, :, 2:])
    each = zip(
        plain.unroll(inputs, states[:, :, 1:2], 2), deep.unroll(inputs, states[:, :, :2], 2), strict=True
    )
    for a, b in each:
        torch.testing.assert_close(a, b)


def extended(base: GPT, stage: DraftStage) -> tuple[GPT, Plan]:
    """The base with the draft stage as one more stage: its layer behind the others, its relay by name."""
    whole = copy.deepcopy(base)
    whole.layers.append(stage.layer)
    whole.add_relay("previous", stage.relay)
    frozen = tuple(Stage(i, i + 1, (Edge(i - 1),), weight=0.0, frozen=True) for i in range(len(base.layers)))
    last = len(base.layers)
    topology = Topology(last + 1, (*frozen, Stage(last, last + 1, (Edge(last - 1, relay="previous"),))))
    return whole, Plan.of(topology, last + 1)


def test_it_is_a_stage_of_a_topology() -> None:
    """The executor's own forward gives its first step, for a whole text and for one token after the other."""
    base = base_of("gpt")
    assert isinstance(base, GPT)
    stage = stage_of(base)
    whole, plan = extended(base, stage)
    inputs = torch.randint(VOCAB, (2, TIME))
    out = stage_outputs(whole, plan, inputs, [1, 2])
    first = next(iter(stage.unroll(inputs, out[1][:, :, None], 1)))
    torch.testing.assert_close(out[2], first)
    decoded = Decoded(whole, plan, 2, 16)
    parts = [decoded.outputs(inputs[:, t : t + 1], [2])[2] for t in range(TIME)]
    torch.testing.assert_close(torch.cat(parts, 1), out[2])


def test_nothing_of_the_base_is_in_it() -> None:
    base = base_of("transformer")
    before = {name: t.clone() for name, t in base.state_dict().items()}
    stage = stage_of(base)
    shared = {id(p) for p in base.parameters()}
    assert not shared & {id(p) for p in stage.parameters()}
    assert all(name.startswith(("relay", "layer", "norm", "vocabulary")) for name in stage.state_dict())
    base.requires_grad_(False)
    inputs, states = torch.zeros(1, 4, dtype=torch.long), torch.randn(1, 4, 1, WIDTH).double()
    loss = torch.stack([g.square().sum() for g in stage.unroll(inputs, states, 2)]).sum()
    loss.backward()
    assert all(p.grad is not None for name, p in stage.named_parameters() if not name.startswith("norm"))
    assert all(torch.equal(t, before[name]) for name, t in base.state_dict().items())


def test_what_a_step_sees() -> None:
    seen = step_mask(4, 1, torch.device("cpu"))
    assert seen[2].int().tolist() == [1, 1, 0, 0, 0, 0, 1, 0], "true keys up to t - 1, then its own"
    assert step_mask(3, 0, torch.device("cpu")).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_the_most_frequent_tokens() -> None:
    assert rank_tokens([5, 5, 1, 1, 1, 3, 0], 8, 3).tolist() == [0, 1, 5], "a tie goes to the smaller"
    assert rank_tokens([1], 3, 10).tolist() == [0, 1, 2]


def test_other_stacks_are_refused() -> None:
    with refused(StackError, setting="base", given="Stack"):
        DraftStage(Stack(), torch.arange(2))
    recurrent = GPT(layers=1, width=16, heads=2, vocab=9, context=8, architecture="mamba2")
    with refused(StackError, setting="base"):
        DraftStage(recurrent, torch.arange(2))
    assert isinstance(PreviousRelay(4).send_pooled(torch.ones(1), None), Tensor)
