"""The papers' theorems about training, each as a test that carries its number.

"Stage-Partitioned Learning" unless the docstring names "Product of Experts". The oracles are a few lines of
plain torch: `hidden_states` runs the layers, `summand` is one stage's loss behind a stop-gradient.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lattice import from_bits
from topograd.exec.forward import stage_outputs
from topograd.exec.train_step import train_step
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.nn.stack import LayerContext
from topograd.topology.configuration import Configuration
from topograd.topology.dag import EMBEDDING, Topology
from topograd.topology.plan import Plan

if TYPE_CHECKING:
    from tests.exec.conftest import Case, Gradients, Tiny

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "tied-softcap": {"tied": True, "softcap": 15.0},
    "swiglu-gqa-windows": {"mlp": "swiglu", "kv_heads": 1, "windows": (4, 0)},
    "plain": {"smear": False, "x0_blend": False, "value_embeddings": "none"},
}


def chain(partition: str, heads: str = "shared", **settings: str) -> Topology:
    """The partition as the paper trains it: a hard chain whose losses are summed (eq. 6)."""
    return Topology.chain(Configuration.parse(partition, heads=heads), reduction="sum", **settings)  # type: ignore[arg-type]


def delta(stack: GPT, stage: int) -> nn.Parameter:
    """W_k, the matrix that only the head of `stage` has."""
    (matrix,) = stack.head_parameters(stage)
    return matrix


def trained(tiny: type[Tiny], stack: GPT, topology: Topology) -> Gradients:
    train_step(stack, topology, *tiny.batch())
    return tiny.gradients(stack)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def summand(stack: GPT, topology: Topology, k: int, inputs: Tensor, targets: Tensor) -> Tensor:
    """Stage k's loss alone: its layers on sg(h), the hidden state before them, its head, cross-entropy."""
    stage = topology.stages[k]
    x0 = stack.embed(inputs)
    ctx = stack.layer_context(x0 if k == 0 or topology.bus == "live" else x0.detach(), inputs)
    h = x0
    with torch.no_grad():
        for layer in stack.layers[: stage.start]:
            h = layer(h, ctx)
    for layer in stack.layers[stage.start : stage.stop]:
        h = layer(h, ctx)
    return cross_entropy(stack.readout(h, k), targets)


def summand_gradients(tiny: type[Tiny], stack: GPT, topology: Topology, k: int) -> Gradients:
    summand(stack, topology, k, *tiny.batch()).backward()
    return tiny.gradients(stack)


def layers_of(gradients: Gradients, start: int, stop: int) -> Gradients:
    """The part of `gradients` that belongs to layers start..stop-1."""
    return {
        n: g for n, g in gradients.items() if n.startswith("layers.") and start <= int(n.split(".")[1]) < stop
    }


def with_grad_scale(topology: Topology, grad_scale: float) -> Topology:
    """The same with this λ on every edge but those that come from a frozen stage."""
    stages = []
    for stage in topology.stages:
        edges = [
            e
            if e.source != EMBEDDING and topology.stages[e.source].frozen
            else replace(e, grad_scale=grad_scale)
            for e in stage.sources
        ]
        stages.append(replace(stage, sources=tuple(edges)))
    return replace(topology, stages=tuple(stages))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_theorem_5_1_backprop_is_the_minimum(variant: str, dtype: torch.dtype, tiny: type[Tiny]) -> None:
    """T((L), sh) is backprop: the same loss and the same gradient of every parameter, bit for bit."""
    stack, (inputs, targets) = tiny.gpt(dtype=dtype, **VARIANTS[variant]), tiny.batch()
    loss = F.cross_entropy(stack(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    expected = tiny.gradients(stack)
    losses = train_step(stack, Topology.chain("4"), inputs, targets)
    actual = tiny.gradients(stack)
    assert torch.equal(losses[0], loss)
    assert not [name for name, g in expected.items() if not torch.equal(actual[name], g)]
    assert all(g.any() for g in expected.values()), "every parameter takes part"


def test_proposition_5_2_two_heads_of_one_stage_both_get_backprops_gradient(tiny: type[Tiny]) -> None:
    """T((L), ps): W and W_0 both get backprop's gradient on W' = W + W_0; hidden gradients are the same."""
    topology = chain("4", "per-stage")
    stack = tiny.gpt(topology)
    actual = trained(tiny, stack, topology)
    merged = tiny.gpt()
    merged.load_state_dict(stack.state_dict(), strict=False)
    with torch.no_grad():
        merged.head.weight.add_(delta(stack, 0))
    inputs, targets = tiny.batch()
    cross_entropy(merged(inputs), targets).backward()
    expected = tiny.gradients(merged)
    own = actual.pop("head.deltas.0.weight")
    assert torch.equal(own, actual["head.weight"])
    assert not [name for name, g in expected.items() if not torch.equal(actual[name], g)]


def test_remark_5_3_moving_between_the_heads_changes_nothing(tiny: type[Tiny]) -> None:
    """(W, W_0) → (W - Δ, W_0 + Δ) leaves the loss and every gradient as they are, up to rounding."""
    topology = chain("4", "per-stage")
    stack, (inputs, targets) = tiny.gpt(topology), tiny.batch()
    before = train_step(stack, topology, inputs, targets)
    expected = tiny.gradients(stack)
    shift = torch.randn(
        stack.head.weight.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )
    with torch.no_grad():
        stack.head.weight.sub_(shift)
        delta(stack, 0).add_(shift)
    after = train_step(stack, topology, inputs, targets)
    tiny.assert_same(tiny.gradients(stack), expected)
    torch.testing.assert_close(after, before, rtol=1e-13, atol=0)


@pytest.mark.parametrize("heads", ["shared", "per-stage"])
def test_proposition_4_7_layers_hear_their_own_stage_only(heads: str, tiny: type[Tiny]) -> None:
    """∂L̃/∂θ_k = ∂L̃_k/∂θ_k for the layers of stage k, and for the embedding where the bus is detached."""
    topology = chain("1,1,2", heads, bus="detached")
    stack = tiny.gpt(topology)
    actual = trained(tiny, stack, topology)
    for k, stage in enumerate(topology.stages):
        alone = summand_gradients(tiny, stack, topology, k)
        tiny.assert_same(
            layers_of(actual, stage.start, stage.stop), layers_of(alone, stage.start, stage.stop)
        )
        if k == 0:
            names = ("embedding.weight", "previous.weight")
            tiny.assert_same({n: actual[n] for n in names}, {n: alone[n] for n in names})


def test_proposition_4_7_with_a_live_bus_the_embedding_hears_every_stage(tiny: type[Tiny]) -> None:
    """x0 is behind no boundary: the embedding's gradient is the sum over the stages, the layers' is not."""
    topology = chain("1,1,2")
    stack = tiny.gpt(topology)
    actual = trained(tiny, stack, topology)
    alone = [summand_gradients(tiny, stack, topology, k) for k in range(3)]
    name = "embedding.weight"
    tiny.assert_same({name: actual[name]}, {name: sum((g[name] for g in alone), torch.zeros(()))})
    assert all(float(g[name].norm()) > 1e-3 * float(actual[name].norm()) for g in alone), "each is heard"
    for gradients, stage in zip(alone, topology.stages, strict=True):
        tiny.assert_same(
            layers_of(actual, stage.start, stage.stop), layers_of(gradients, stage.start, stage.stop)
        )


def test_proposition_4_8_a_shared_head_hears_the_sum_and_a_stages_head_its_own(tiny: type[Tiny]) -> None:
    """∂L̃/∂W = Σ_k ∂L̃_k/∂W under both head structures; ∂L̃/∂W_k = ∂L̃_k/∂W_k."""
    for heads in ("shared", "per-stage"):
        topology = chain("1,1,2", heads)
        stack = tiny.gpt(topology)
        actual = trained(tiny, stack, topology)
        alone = [summand_gradients(tiny, stack, topology, k) for k in range(3)]
        total = sum((g["head.weight"] for g in alone), torch.zeros(()))
        tiny.assert_same({"head.weight": actual["head.weight"]}, {"head.weight": total})
        for k in range(3 if heads == "per-stage" else 0):
            own = f"head.deltas.{k}.weight"
            tiny.assert_same({own: actual[own]}, {own: alone[k][own]})
            assert not any(alone[j][own].any() for j in range(3) if j != k)


def test_theorem_4_9_refining_keeps_values_and_changes_the_operator(tiny: type[Tiny]) -> None:
    """(i) A coarse stage's loss is the loss of the fine stage that ends where it does. (ii) Its gradient is
    not: a boundary zeroes what the layers before it would hear. Layer 0's gradient moves by 0.79 to 0.91 of
    its norm over four seeds; 0.5 is asked."""
    coarse, fine = chain("2,2"), chain("1,1,2")
    stack, (inputs, targets) = tiny.gpt(), tiny.batch()
    values = train_step(stack, coarse, inputs, targets)
    before = tiny.gradients(stack)
    assert torch.equal(train_step(stack, fine, inputs, targets)[[1, 2]], values)
    after = tiny.gradients(stack)
    tiny.assert_same(layers_of(after, 1, 4), layers_of(before, 1, 4))
    a, b = (torch.cat([g.flatten() for g in layers_of(x, 0, 1).values()]) for x in (before, after))
    assert float((a - b).norm() / a.norm()) > 0.5


def test_theorem_6_1_one_layer_per_stage_is_local_learning(tiny: type[Tiny]) -> None:
    """T((1,...,1), ps): layer i learns as if alone, on its input as data, with its own head and loss."""
    topology = chain("1,1,1,1", "per-stage", bus="detached")
    stack, (inputs, targets) = tiny.gpt(topology), tiny.batch()
    actual = trained(tiny, stack, topology)
    x0 = stack.embed(inputs).detach()
    ctx, h = stack.layer_context(x0, inputs), x0
    for i, layer in enumerate(stack.layers):
        h = layer(h, ctx)
        logits = F.linear(F.rms_norm(h, (16,)), stack.head.weight.detach() + delta(stack, i))
        cross_entropy(logits, targets).backward()
        h = h.detach()
        alone = {n: g for n, g in tiny.gradients(stack).items() if g.any()}
        assert alone.keys() == {*layers_of(actual, i, i + 1), f"head.deltas.{i}.weight"}
        tiny.assert_same({name: actual[name] for name in alone}, alone)


def test_remark_4_6_values_do_not_depend_on_grad_scale(tiny: type[Tiny], case: Case) -> None:
    """D_λ is the identity forward: the losses are bit-equal for every λ."""
    (inputs, targets), losses = tiny.batch(), []
    teacher = tiny.teacher(inputs)
    for grad_scale in (0.0, 0.3, 1.0):
        topology = with_grad_scale(case.topology, grad_scale)
        stack = tiny.gpt(topology, **case.settings)
        losses.append(train_step(stack, topology, inputs, targets, teacher=teacher))
    assert losses[0].isfinite().any()
    assert all(torch.equal(losses[0].nan_to_num(), other.nan_to_num()) for other in losses[1:])


@pytest.mark.parametrize("heads", ["shared", "per-stage"])
@pytest.mark.parametrize(
    "vector", list(itertools.product((0, 1), repeat=3)), ids=lambda b: "".join(map(str, b))
)
def test_proposition_9_4_soft_boundaries_at_a_vertex_are_the_hard_configuration(
    vector: tuple[int, ...], heads: str, tiny: type[Tiny]
) -> None:
    """λ = 1 - b(π) is T(π, H), losses and gradients (Remark 9.6); the head of a stage is its last layer's."""
    composition = from_bits(vector)
    hard = Topology.chain(Configuration.parse(composition, heads=heads))
    soft = Topology.soft([1.0 - bit for bit in vector], heads=hard.heads)
    stack, relaxed = tiny.gpt(hard), tiny.gpt(soft)
    relaxed.load_state_dict({n: v for n, v in stack.state_dict().items() if "deltas" not in n}, strict=False)
    ends = {k: stop - 1 for k, (_, stop) in enumerate(composition.intervals)}
    with torch.no_grad():
        for k, i in ends.items() if heads == "per-stage" else ():
            delta(relaxed, i).copy_(delta(stack, k))
    losses = train_step(stack, hard, *tiny.batch())
    soft_losses = train_step(relaxed, soft, *tiny.batch())
    assert torch.equal(soft_losses[list(ends.values())], losses)
    expected, actual = tiny.gradients(stack), tiny.gradients(relaxed)
    heard = {f"head.deltas.{i}.weight": f"head.deltas.{k}.weight" for k, i in ends.items()}
    unused = [n for n in actual if "deltas" in n and n not in heard]
    assert not [name for name in unused if actual.pop(name).any()]
    tiny.assert_same({heard.get(n, n): g for n, g in actual.items()}, expected)


def test_definition_2_4_hierarchical_is_autograd_of_the_mean_loss(tiny: type[Tiny]) -> None:
    """Undetached, a layer hears the losses of its own stage and of all later ones ("Product of Experts")."""
    stack, (inputs, targets) = tiny.gpt(), tiny.batch()
    h = stack.embed(inputs)
    ctx, losses = stack.layer_context(h, inputs), []
    for i, layer in enumerate(stack.layers):
        h = layer(h, ctx)
        if i in (0, 1, 3):
            losses.append(cross_entropy(stack.readout(h, 0), targets))
    torch.stack(losses).mean().backward()
    expected = tiny.gradients(stack)
    train_step(stack, Topology.chain("1,1,2", grad_scale=1.0), inputs, targets)
    tiny.assert_same(tiny.gradients(stack), expected)


class Forgetful(nn.Module):
    """A layer that keeps the first half of the coordinates and drops the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16, dtype=torch.float64))

    def forward(self, h: Tensor, ctx: LayerContext) -> Tensor:
        return h * self.scale * (torch.arange(16) < 8)


def indistinguishable(tiny: type[Tiny], topology: Topology) -> tuple[GPT, Tensor, Tensor]:
    """A stack whose stage 0 forgets, and two inputs that differ only in what it forgets.

    Neither the blend of x0 nor the value embeddings lead around the boundaries.
    """
    stack = tiny.gpt(topology, smear=False, x0_blend=False, value_embeddings="none")
    stack.layers[0] = Forgetful()
    with torch.no_grad():
        table = stack.embedding.weight
        table[1] = table[0]
        table[1, 8:] *= -1
    one = torch.randint(2, 50, (1, 12), generator=torch.Generator().manual_seed(2))
    other = one.clone()
    one[0, 3], other[0, 3] = 0, 1
    return stack, one, other


def test_proposition_8_5_root_bottleneck(tiny: type[Tiny]) -> None:
    """In a chain without bypass every later stage is a function of the root representation h_{ℓ_0}."""
    topology = Topology.chain("1,1,2")
    stack, one, other = indistinguishable(tiny, topology)
    plan = Plan.of(topology, 4)
    assert not torch.equal(stack.embed(one), stack.embed(other))
    a, b = (stage_outputs(stack, plan, inputs, [0, 1, 2]) for inputs in (one, other))
    assert all(torch.equal(a[k], b[k]) for k in range(3))


def test_proposition_10_10_a_detached_bus_passes_what_the_root_discarded(tiny: type[Tiny]) -> None:
    """With sg(e_0) on a bus later stages tell apart what stage 0 confused; no gradient takes that way."""
    topology = chain("1,1,2", bus="detached").with_input_bus()
    stack, one, other = indistinguishable(tiny, topology)
    plan = Plan.of(topology, 4)
    a, b = (stage_outputs(stack, plan, inputs, [0, 1, 2]) for inputs in (one, other))
    assert torch.equal(a[0], b[0])
    assert all(float((a[k] - b[k]).abs().max()) > 0.1 for k in (1, 2))
    bussed = trained(tiny, stack, topology)
    without = trained(tiny, stack, chain("1,1,2", bus="detached"))
    assert torch.equal(bussed["embedding.weight"], without["embedding.weight"])


def test_proposition_10_15_residual_losses_are_stage_local(tiny: type[Tiny]) -> None:
    """∂L_k/∂θ_j = 0 for j < k, though L_k = CE(Σ_{j<k} sg(z_j) + z_k, y) depends on all earlier logits."""
    topology = chain("1,1,2", objective="residual", bus="detached")
    stack, (inputs, targets) = tiny.gpt(topology), tiny.batch()
    actual = trained(tiny, stack, topology)
    x0 = stack.embed(inputs)
    ctx, h = stack.layer_context(x0.detach(), inputs), x0.detach()
    said = torch.zeros(2, 12, 50, dtype=torch.float64)
    for stage in topology.stages:
        for layer in stack.layers[stage.start : stage.stop]:
            h = layer(h, ctx)
        z = stack.readout(h, 0)
        cross_entropy(said + z, targets).backward()
        said, h = said + z.detach(), h.detach()
        alone = tiny.gradients(stack)
        tiny.assert_same(
            layers_of(actual, stage.start, stage.stop), layers_of(alone, stage.start, stage.stop)
        )
    last = replace(
        topology, stages=tuple(replace(s, weight=float(k == 2)) for k, s in enumerate(topology.stages))
    )
    assert not any(g.any() for g in layers_of(trained(tiny, stack, last), 0, 2).values())


@pytest.mark.parametrize("heads", ["shared", "per-stage"])
def test_proposition_4_1_prefix_consistency(heads: str, tiny: type[Tiny]) -> None:
    """The first j stages of K are bit for bit the j-stage model with their weights ("Product of Experts")."""
    whole = Topology.chain(Configuration.parse("1,1,2", heads=heads))
    settings: dict[str, Any] = {"value_embeddings": "all"}  # "alternate" counts from the last layer
    stack, (inputs, targets) = tiny.gpt(whole, **settings), tiny.batch()
    losses = train_step(stack, whole, inputs, targets)
    hidden = stage_outputs(stack, Plan.of(whole, 4), inputs, [0, 1, 2])
    for j, partition in enumerate(("1", "1,1", "1,1,2")):
        topology = Topology.chain(Configuration.parse(partition, heads=heads))
        prefix = tiny.gpt(topology, seed=9, **settings)
        known = prefix.state_dict().keys()
        prefix.load_state_dict({n: v for n, v in stack.state_dict().items() if n in known})
        assert torch.equal(train_step(prefix, topology, inputs, targets), losses[: j + 1])
        assert torch.equal(prefix(inputs), stack.readout(hidden[j], j))


def test_proposition_4_1_prefix_consistency_ends_at_what_stages_share(tiny: type[Tiny]) -> None:
    """From equal weights a prefix's layers learn as if alone; the shared head and the embedding do not."""
    settings: dict[str, Any] = {"value_embeddings": "all"}
    whole, prefix = (tiny.gpt(chain(partition), **settings) for partition in ("2,2", "2"))
    prefix.load_state_dict({n: v for n, v in whole.state_dict().items() if n in prefix.state_dict()})
    together, alone = trained(tiny, whole, chain("2,2")), trained(tiny, prefix, chain("2"))
    tiny.assert_same(layers_of(together, 0, 2), layers_of(alone, 0, 2))
    assert {n for n, g in alone.items() if not torch.equal(together[n], g)} >= {
        "head.weight",
        "embedding.weight",
    }


def test_a_specialist_leaves_its_base_bit_identical(tiny: type[Tiny]) -> None:
    """An optimizer with weight decay moves the new stage and nothing else ("Product of Experts" §6)."""
    topology = Topology.chain("1,1").with_specialist(2)
    stack, (inputs, targets) = tiny.gpt(topology), tiny.batch()
    plan = prepare(stack, topology)
    before = {name: p.detach().clone() for name, p in stack.named_parameters()}
    outputs = stage_outputs(stack, plan, inputs, [0, 1])
    optimizer = torch.optim.AdamW(stack.parameters(), lr=0.01, weight_decay=0.1)
    losses = []
    for _ in range(4):
        losses.append(train_step(stack, topology, inputs, targets)[-1])
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    moved = {name for name, p in stack.named_parameters() if not torch.equal(p, before[name])}
    own = {name for name in before if name.startswith(("layers.2.", "layers.3."))}
    assert moved == own | {"head.deltas.2.weight"}
    after = stage_outputs(stack, plan, inputs, [0, 1])
    assert all(torch.equal(after[k], outputs[k]) for k in (0, 1))
