"""The executor against one graph with one backward (`tests/oracles/train_step.py`), and its schedule."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from raising import refused
from tests.oracles.train_step import graph_losses
from topograd.errors import ConfigError, StackError, TopologyError
from topograd.exec.forward import Predictor
from topograd.exec.objectives import OBJECTIVES, Logits, teacher_logits
from topograd.exec.train_step import train_step
from topograd.memory import peak_step_bytes
from topograd.nn.gpt import GPT
from topograd.nn.images.config import ImageConfig
from topograd.nn.layer_dropout import dropped_layers
from topograd.nn.preparation import prepare
from topograd.nn.stack import LayerContext, Stack
from topograd.topology.closed_forms import activation_layers
from topograd.topology.dag import EMBEDDING, Edge, Stage, Topology
from topograd.topology.plan import Plan

if TYPE_CHECKING:
    from tests.exec.conftest import Case, Tiny

HARD = Topology.chain("1,1,2")
HIERARCHICAL = Topology.chain("1,1,2", grad_scale=1.0)


@st.composite
def dags(draw: st.DrawFn) -> Topology:
    """Up to five stages over up to four layers: any intervals, taps, λ, weights, objectives."""
    layers = draw(st.integers(1, 4))
    stages: list[Stage] = []
    for k in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, layers - 1))
        sources = draw(st.lists(st.integers(EMBEDDING, k - 1), min_size=1, max_size=3, unique=True))
        edges = []
        for j in sources:
            tap = (
                None if j == EMBEDDING else draw(st.none() | st.integers(stages[j].start + 1, stages[j].stop))
            )
            edges.append(Edge(j, tap, draw(st.sampled_from([0.0, 0.3, 1.0]))))
        objective = draw(st.sampled_from(["cross-entropy", "residual"]))
        weight = draw(st.sampled_from([0.0, 0.5, 1.0]))
        stop, every = draw(st.integers(start + 1, layers)), draw(st.sampled_from([1, 1, 3]))
        stages.append(Stage(start, stop, tuple(edges), objective, weight, every=every))
    idle = set(range(layers)) - {i for s in stages[:-1] for i in range(s.start, s.stop)}
    start, stop = min({stages[-1].start, *idle}), max({stages[-1].stop, *(i + 1 for i in idle)})
    stages[-1] = replace(stages[-1], start=start, stop=stop, weight=1.0)
    return Topology(
        layers,
        tuple(stages),
        heads=draw(st.sampled_from(["shared", "per-stage"])),
        bus=draw(st.sampled_from(["live", "detached"])),
        reduction=draw(st.sampled_from(["mean", "sum"])),
        reach=draw(st.sampled_from(["all", "next"])),
    )


def both_ways(tiny: type[Tiny], topology: Topology, **settings: Any) -> None:
    """Losses and every gradient of the executor against those of the one graph."""
    inputs, targets = tiny.batch()
    stack = tiny.gpt(topology, **settings)
    teacher = Predictor(tiny.gpt(seed=7), "4")
    total, expected_losses = graph_losses(stack, topology, inputs, targets, teacher.stack(inputs).detach())
    total.backward()
    silent = {name for name, p in stack.named_parameters() if p.grad is None}
    expected = tiny.gradients(stack)
    losses = train_step(stack, topology, inputs, targets, teacher=teacher_logits(teacher, inputs))
    actual = tiny.gradients(stack)
    tiny.assert_same(actual, expected)
    assert not [name for name in silent if actual[name].any()], "no gradient here where the graph has none"
    with_loss = torch.tensor([stage.weight > 0 for stage in topology.stages])
    torch.testing.assert_close(losses[with_loss], expected_losses[with_loss], rtol=1e-13, atol=0)
    assert losses[~with_loss].isnan().all()


def test_equals_one_graph_with_one_backward(case: Case, tiny: type[Tiny]) -> None:
    both_ways(tiny, case.topology, **case.settings)


@settings(deadline=None, max_examples=30)
@given(topology=dags())
def test_equals_one_graph_on_random_dags(topology: Topology, tiny: type[Tiny]) -> None:
    both_ways(tiny, topology)


def test_gradients_add_up_over_batches_with_their_scale(tiny: type[Tiny]) -> None:
    topology = Topology.chain("1,3", grad_scale=0.3)
    stack, scales = tiny.gpt(topology), (0.25, 0.75)
    for seed, scale in enumerate(scales):
        (scale * graph_losses(stack, topology, *tiny.batch(seed))[0]).backward()
    expected = tiny.gradients(stack)
    losses = [
        train_step(stack, topology, *tiny.batch(seed), scale=scale) for seed, scale in enumerate(scales)
    ]
    tiny.assert_same(tiny.gradients(stack), expected)
    assert torch.equal(losses[1], train_step(stack, topology, *tiny.batch(1))), "the losses are not scaled"


def test_twice_the_same_step_doubles_the_gradients(tiny: type[Tiny], case: Case) -> None:
    stack, (inputs, targets) = tiny.gpt(case.topology, **case.settings), tiny.batch()
    teacher = tiny.teacher(inputs)
    train_step(stack, case.topology, inputs, targets, teacher=teacher)
    once = {name: 2 * g for name, g in tiny.gradients(stack).items()}
    for _ in range(2):
        train_step(stack, case.topology, inputs, targets, teacher=teacher)
    tiny.assert_same(tiny.gradients(stack), once)


@pytest.mark.parametrize("objective", ["cross-entropy", "residual"])
def test_bfloat16_autocast_is_close(objective: str, tiny: type[Tiny]) -> None:
    # bfloat16 rounds by 2^-9 = 0.2 %; four layers and a head are some ten matrix products deep, one way and
    # back, so a few per cent of the gradient's norm.
    topology = Topology.chain("1,3", grad_scale=0.3, objective=objective)
    stack = tiny.gpt(topology, dtype=torch.float32)
    exact = train_step(stack, topology, *tiny.batch())
    expected = torch.cat([g.flatten() for g in tiny.gradients(stack).values()])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = train_step(stack, topology, *tiny.batch())
    actual = torch.cat([g.flatten() for g in tiny.gradients(stack).values()])
    assert actual.dtype == torch.float32
    assert 0 < float((actual - expected).norm() / expected.norm()) < 0.05
    torch.testing.assert_close(rounded.float(), exact, rtol=0.01, atol=0)


class Recorder:
    """Forward and backward of every layer, in order, and how many layers' activations live at once.

    Each call of a layer is a number; a tensor that autograd saves within it belongs to it. After every
    layer, the calls of which a saved tensor is still alive are counted.
    """

    class Saved:
        def __init__(self, call: int, tensor: Tensor) -> None:
            self.call, self.tensor = call, tensor

    def __init__(self, stack: Stack) -> None:
        self.events: list[str] = []
        self.peak = 0
        self._calls = 0
        self._inside = False
        self._saved: WeakSet[Recorder.Saved] = WeakSet()
        self._layers = {id(layer): i for i, layer in enumerate(stack.layers)}
        self._handles = ExitStack()
        for layer in stack.layers:
            self._handles.enter_context(layer.register_forward_pre_hook(self._enter))
            self._handles.enter_context(layer.register_forward_hook(self._leave))
        self._handles.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda s: s.tensor))

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._handles.close()

    def _pack(self, tensor: Tensor) -> Recorder.Saved:
        saved = Recorder.Saved(self._calls, tensor.detach())  # not its graph, which would keep itself alive
        if self._inside:
            self._saved.add(saved)
        return saved

    def _enter(self, layer: nn.Module, args: tuple[object, ...]) -> None:
        self._calls, self._inside = self._calls + 1, True

    def _leave(self, layer: nn.Module, args: tuple[object, ...], h: Tensor) -> None:
        self._inside = False
        name = str(self._layers[id(layer)])
        self.events.append("F" + name)
        if h.requires_grad:
            h.register_hook(lambda gradient: self.events.append("B" + name))
        self.peak = max(self.peak, len({saved.call for saved in self._saved}))


def recorded(tiny: type[Tiny], topology: Topology) -> tuple[str, int]:
    """The order of forwards F and backwards B of the layers, and the most that lived at once."""
    stack, (inputs, targets) = tiny.gpt(topology), tiny.batch()
    teacher = tiny.teacher(inputs)
    with Recorder(stack) as recorder:
        train_step(stack, topology, inputs, targets, teacher=teacher)
    return " ".join(recorder.events), recorder.peak


def linked(topology: Topology) -> Topology:
    """The same with λ = 1 on every edge between stages."""
    return replace(
        topology,
        stages=tuple(
            replace(s, sources=tuple(replace(e, grad_scale=1.0) for e in s.sources)) for s in topology.stages
        ),
    )


@pytest.mark.parametrize(
    ("topology", "order"),
    [
        (Topology.chain("4"), "F0 F1 F2 F3 B3 B2 B1 B0"),
        (HARD, "F0 B0 F1 B1 F2 F3 B3 B2"),
        (HIERARCHICAL, "F0 F1 F2 F3 B3 B2 B1 B0"),
        (Topology.soft([0.0, 0.5, 0.0]), "F0 B0 F1 F2 B2 B1 F3 B3"),
        (Topology.forest(["1,1", "2"]), "F0 B0 F1 B1 F2 F3 B3 B2"),
        (linked(Topology.forest(["1,1", "1,1"])), "F0 F1 B1 B0 F2 F3 B3 B2"),
        (Topology.cover([(0, 2), (1, 3)]), "F0 F1 B1 B0 F1 F2 B2 B1"),
        (Topology.chain("1,1").with_specialist(1), "F0 F1 F2 B2"),
        (replace(HIERARCHICAL, reach="next"), "F0 F1 B1 B0 F2 F3 B3 B2 B1"),
    ],
    ids=[
        *("backprop", "hard", "hierarchical", "soft", "forest", "forest-hierarchical", "cover", "specialist"),
        "next",
    ],
)
def test_a_backward_runs_as_soon_as_nothing_answers_any_more(
    topology: Topology, order: str, tiny: type[Tiny]
) -> None:
    """λ = 0: before the next stage's forward. λ > 0: after the last listener's backward, and no later.

    With reach `next`, layer 1 hands its own loss's gradient to layer 0 before layer 2 begins (the first B1).
    """
    assert recorded(tiny, topology)[0] == order


def test_activations_live_as_the_closed_form_says(case: Case, tiny: type[Tiny]) -> None:
    assert recorded(tiny, case.topology)[1] == activation_layers(Plan.of(case.topology, case.topology.layers))


@settings(deadline=None, max_examples=25)
@given(topology=dags())
def test_activations_live_as_the_closed_form_says_on_random_dags(
    topology: Topology, tiny: type[Tiny]
) -> None:
    """Equal, but for stages without a loss that are heard only before their end: there it is a bound."""
    plan = Plan.of(topology, topology.layers)
    held = recorded(tiny, topology)[1]
    cut = [p for p in plan.stages if p.scale == 0 and p.outputs and p.outputs[-1].layer < p.stage.stop]
    assert held <= activation_layers(plan) if cut else held == activation_layers(plan)


class Doubling(nn.Module):
    """A relay of our own: sends twice the hidden state plus what it received, receives with x0 beside."""

    def send(self, h: Tensor, received: Tensor | None) -> Tensor:
        assert received is not None
        return 2 * h + received

    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        return message + ctx.x0


class ZLoss:
    """An objective of our own: cross-entropy, and a little of logsumexp²."""

    uses_prior = False

    def __call__(
        self, logits: Tensor, prior: Tensor | None, teacher: Tensor | None, targets: Tensor
    ) -> Tensor:
        counted = targets != -100
        return OBJECTIVES["cross-entropy"](logits, prior, teacher, targets) + 0.1 * (
            logits[counted].logsumexp(-1).square().sum()
        )


@pytest.mark.covers("own", "train", feature="objectives")
@pytest.mark.covers("own", "train", feature="relays")
def test_a_relay_and_an_objective_of_ones_own(tiny: type[Tiny]) -> None:
    """Both ends of the relay carry gradient, λ acts between them; the objective is used by name."""
    heard = Edge(0, grad_scale=0.3, relay="doubling")
    topology = Topology(
        2, (Stage(0, 1, (Edge(EMBEDDING, grad_scale=1.0),)), Stage(1, 2, (heard,), objective="z-loss"))
    )
    stack, (inputs, targets) = tiny.gpt(topology), tiny.batch()
    x0 = stack.embed(inputs)
    ctx = stack.layer_context(x0, inputs)
    h0 = stack.layers[0](x0, ctx)
    message = 2 * h0 + x0
    h1 = stack.layers[1](message.detach() + 0.3 * (message - message.detach()) + x0, ctx)
    z = stack.readout(h1, 1)[targets != -100]
    first = F.cross_entropy(stack.readout(h0, 0).flatten(0, 1), targets.flatten())
    second = F.cross_entropy(z, targets[targets != -100]) + 0.1 * z.logsumexp(-1).square().mean()
    ((first + second) / 2).backward()
    expected = tiny.gradients(stack)
    stack.add_relay("doubling", Doubling())
    train_step(stack, topology, inputs, targets, objectives={"z-loss": ZLoss()})
    tiny.assert_same(tiny.gradients(stack), expected)


def test_prepare_adds_silent_heads_once(tiny: type[Tiny]) -> None:
    stack, (inputs, _) = tiny.gpt(), tiny.batch()
    before = stack(inputs)
    topology = replace(HARD, heads="per-stage")
    plan = prepare(stack, topology)
    heads = list(stack.head.deltas.parameters())
    assert len(heads) == 3
    assert torch.equal(stack(inputs), before), "a new head changes no output"
    assert prepare(stack, topology) == plan
    train_step(stack, topology, *tiny.batch())
    assert list(map(id, stack.head.deltas.parameters())) == list(map(id, heads))


def test_a_partition_as_text_is_a_chain(tiny: type[Tiny]) -> None:
    stack = tiny.gpt()
    expected = train_step(stack, Topology.chain("2,2"), *tiny.batch())
    gradients = tiny.gradients(stack)
    for chain in ("2,2", Plan.of("2,2", 4)):
        assert torch.equal(train_step(stack, chain, *tiny.batch()), expected)
        tiny.assert_same(tiny.gradients(stack), gradients, tolerance=0)


PREPARE = "call tg.prepare(stack, topology) before you build the optimizer"


def test_a_stack_that_lacks_heads_is_refused_and_stays_as_it_is(tiny: type[Tiny]) -> None:
    """An optimizer that is built before they are added would never train them (D16)."""
    stack = tiny.gpt()
    names = [name for name, _ in stack.named_parameters()]
    with refused(StackError, setting="heads", given="per-stage", remedy=PREPARE):
        train_step(stack, replace(HARD, heads="per-stage"), *tiny.batch())
    assert [name for name, _ in stack.named_parameters()] == names
    assert all(p.grad is None for p in stack.parameters())
    stack.add_heads([0, 1])
    with refused(StackError, setting="heads", remedy=PREPARE):
        train_step(stack, replace(HARD, heads="per-stage"), *tiny.batch())
    prepare(stack, replace(HARD, heads="per-stage"))
    train_step(stack, replace(HARD, heads="per-stage"), *tiny.batch())
    assert all(p.grad is not None and p.grad.any() for p in stack.head.deltas.parameters())


def test_a_stage_without_a_loss_needs_no_head(tiny: type[Tiny]) -> None:
    topology = replace(Topology.soft([0.3, 1.0, 0.0]), heads="per-stage")
    stack = tiny.gpt(topology)
    assert [stack.has_head(k) for k in range(4)] == [True, False, True, True]
    train_step(stack, topology, *tiny.batch())


@pytest.mark.parametrize(
    ("topology", "relay"),
    [(HARD.with_relays("gate"), "gate-1"), (Topology.regions("2,2", "S=2,r=4"), "interface-1")],
    ids=["relay", "interface"],
)
def test_a_stack_that_lacks_relays_is_refused(topology: Topology, relay: str, tiny: type[Tiny]) -> None:
    stack = tiny.gpt()
    with refused(StackError, setting="relay", given=relay) as caught:
        train_step(stack, topology, *tiny.batch())
    assert "tg.prepare(" in caught.value.remedy
    assert not stack.learned_relays()
    prepare(stack, topology)
    assert stack.learned_relays()


def test_a_base_that_still_learns_is_refused(tiny: type[Tiny]) -> None:
    """Its gradients would be made and thrown away, or worse, used."""
    topology = Topology.chain("1,1").with_specialist(2)
    stack = tiny.gpt()
    stack.add_heads(range(3))
    with refused(StackError, setting="frozen", remedy=PREPARE):
        train_step(stack, topology, *tiny.batch())
    prepare(stack, topology)
    train_step(stack, topology, *tiny.batch())


def test_prepare_freezes_all_but_the_specialist(tiny: type[Tiny]) -> None:
    stack = tiny.gpt(Topology.chain("1,1").with_specialist(2))
    learning = {name for name, p in stack.named_parameters() if p.requires_grad}
    own = {name for name, _ in stack.named_parameters() if name.startswith(("layers.2", "layers.3"))}
    assert learning == own | {"head.deltas.2.weight"}


@pytest.mark.parametrize(
    ("stages", "error", "setting"),
    [
        ({"sources": (Edge(EMBEDDING, relay="pigeon"),)}, StackError, "relay"),
        ({"objective": "hinge"}, ConfigError, "objective"),
        ({"objective": "distillation"}, ConfigError, "teacher"),
    ],
)
def test_unknown_parts_are_one_clear_line(
    stages: dict[str, object], error: type[Exception], setting: str, tiny: type[Tiny]
) -> None:
    stage = replace(Stage(0, 4, (Edge(EMBEDDING),)), **stages)  # type: ignore[arg-type]
    with refused(error, setting=setting):
        train_step(tiny.gpt(), Topology(4, (stage,)), *tiny.batch())


def test_residual_wants_logits_that_every_frozen_stage_has(tiny: type[Tiny]) -> None:
    """The first of two regions never had a loss: its head has nothing to say that could be corrected."""
    topology = replace(Topology.chain("1,1"), stages=_regions()).with_specialist(2, "residual")
    with refused(TopologyError, setting="objective", given="residual") as raised:
        train_step(tiny.gpt(topology), topology, *tiny.batch())
    assert "\n" not in str(raised.value)
    plain = replace(Topology.chain("1,1"), stages=_regions()).with_specialist(2)
    assert train_step(tiny.gpt(plain), plain, *tiny.batch())[2] > 0


def _regions() -> tuple[Stage, ...]:
    """Two stages of which only the second has a loss."""
    first, second = Topology.chain("1,1", grad_scale=1.0).stages
    return replace(first, weight=0.0), second


def test_prepare_keeps_the_specialists_relay_learning(tiny: type[Tiny]) -> None:
    stack = tiny.gpt(Topology.chain("1,1").with_specialist(2).with_relays("gate"))
    learning = {name for name, p in stack.named_parameters() if p.requires_grad and "relays" in name}
    assert learning == {"relays.gate-2.gate.weight", "relays.gate-2.gate.bias"}


def test_wrong_depth_is_one_clear_line(tiny: type[Tiny]) -> None:
    with refused(TopologyError, setting="layers", given=5):
        train_step(tiny.gpt(), Topology.chain("2,3"), *tiny.batch())


def test_a_plain_module_is_pointed_to_adapt(tiny: type[Tiny]) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for call in (train_step, lambda *args: prepare(*args[:2]), lambda *args: Predictor(*args[:2])):
        with refused(StackError, setting="stack", given="Sequential") as caught:
            call(model, "1,1", *tiny.batch())
        assert "tg.adapt" in caught.value.remedy


def test_targets_of_a_wrong_type_or_shape(tiny: type[Tiny]) -> None:
    stack, (inputs, targets) = tiny.gpt(Topology.chain("4")), tiny.batch()
    with refused(ConfigError, setting="targets", given=torch.float32):
        train_step(stack, "4", inputs, targets.float())
    with refused(ConfigError, setting="targets", given=(*targets.shape, 3)):
        train_step(stack, "4", inputs, targets[..., None].expand(-1, -1, 3))
    with refused(ConfigError, setting="targets", given=[1, 2], allowed="a torch.Tensor"):
        train_step(stack, "4", inputs, [1, 2])  # type: ignore[arg-type]


def test_a_stack_with_one_head_says_so() -> None:
    class OneHead(GPT):
        add_heads = Stack.add_heads

    stack = OneHead(layers=2, width=16, heads=2, vocab=50, context=16)
    with refused(StackError, setting="heads", given="per-stage"):
        prepare(stack, replace(Topology.chain("1,1"), heads="per-stage"))


def test_a_teacher_is_heard_only_by_those_who_ask(tiny: type[Tiny]) -> None:
    def teacher(rows: slice) -> Tensor:
        raise AssertionError("cross-entropy asked the teacher")

    silent: Logits = teacher
    train_step(tiny.gpt(), HARD, *tiny.batch(), teacher=silent)


# Layers that run again


@pytest.mark.covers("own", "train", feature="recompute")
def test_recomputed_gradients_are_the_same_bits(case: Case, tiny: type[Tiny]) -> None:
    stack, (inputs, targets) = tiny.gpt(case.topology, **case.settings), tiny.batch()
    teacher = tiny.teacher(inputs)
    losses = train_step(stack, case.topology, inputs, targets, teacher=teacher)
    expected = tiny.gradients(stack)
    again = train_step(stack, case.topology, inputs, targets, teacher=teacher, recompute=True)
    assert torch.equal(again.nan_to_num(), losses.nan_to_num())
    tiny.assert_same(tiny.gradients(stack), expected, tolerance=0)


@pytest.mark.parametrize("drawn", ["dropout", "layer dropout"])
def test_a_layer_that_runs_again_draws_the_same(drawn: str, tiny: type[Tiny]) -> None:
    stack, topology = tiny.gpt(HIERARCHICAL), HIERARCHICAL
    if drawn == "dropout":
        stack.layers[2].mlp.register_forward_hook(lambda _, __, h: F.dropout(h, 0.5))  # type: ignore[union-attr]

    def gradients(recompute: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        with dropped_layers(stack.layers, [0.5] * 4 if drawn == "layer dropout" else []):
            train_step(stack, topology, *tiny.batch(), recompute=recompute)
        return tiny.gradients(stack)

    tiny.assert_same(gradients(True), gradients(False), tolerance=0)


def test_recomputed_layers_hold_their_inputs_alone() -> None:
    """Backprop through twelve layers holds twelve layers; recomputed, their inputs and one layer."""
    stack = GPT(layers=12, width=32, heads=2, vocab=23, context=64)
    inputs, targets = torch.randint(23, (2, 4, 64), generator=torch.Generator().manual_seed(0))
    peaks = [
        peak_step_bytes(
            partial(train_step, stack, "12", inputs, targets, recompute=recompute), list(stack.parameters())
        )
        for recompute in (False, True)
    ]
    assert peaks[1] < 0.4 * peaks[0]


def test_batch_norm_is_not_recomputed() -> None:
    config = ImageConfig(network="vgg", widths=(4, 4), shape=(1, 8, 8), classes=3)
    stack = config.build(topology := Topology.chain("2"))
    images, labels = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    with refused(ConfigError, setting="recompute", given=True):
        train_step(stack, topology, images, labels, recompute=True)
    train_step(stack.eval(), topology, images, labels, recompute=True)
