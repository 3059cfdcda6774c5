"""Branches: the trie, what its nodes compute, how often, and how users write paths."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pieces import Decoded
from raising import refused
from topograd.errors import ConfigError, TopologyError
from topograd.exec.forward import stage_outputs
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.nn.stack import LayerContext
from topograd.topology.branches import (
    Branches,
    branches,
    parse_branches,
    parse_path,
    path_name,
    predicting_plan,
)
from topograd.topology.configuration import Configuration
from topograd.topology.dag import EMBEDDING, Edge, Stage, Topology
from topograd.topology.plan import EdgeOutput, Plan

LAYERS, STAGES, VOCAB = 6, 4, 17
CHAIN = Topology.chain(Configuration.parse("1,2,1,2", heads="per-stage"))


@pytest.fixture
def model() -> GPT:
    """Four stages with heads of their own, in float64, every parameter disturbed."""
    torch.manual_seed(0)
    stack = GPT(layers=LAYERS, width=16, heads=2, vocab=VOCAB, context=12).double().eval()
    prepare(stack, CHAIN)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return stack


@pytest.fixture
def plan() -> Plan:
    return Plan.of(CHAIN, LAYERS)


@pytest.fixture
def inputs() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(VOCAB, (2, 8))


@torch.no_grad()
def by_hand(model: GPT, inputs: Tensor, layers: list[int], head: int) -> Tensor:
    """Logits behind these layers, in this order."""
    h = x0 = model.embed(inputs)
    ctx = model.layer_context(x0, inputs)
    for i in layers:
        h = model.layers[i](h, ctx)
    return model.readout(h, head)


@torch.no_grad()
def logits_of(model: GPT, found: Branches, inputs: Tensor, states: Decoded | None = None) -> list[Tensor]:
    """The logits of every path."""
    ends = sorted(set(found.ends))
    hidden = (
        stage_outputs(model, found.plan, inputs, ends) if states is None else states.outputs(inputs, ends)
    )
    return [model.readout(hidden[node], found.plan.stages[node].head) for node in found.ends]


def heads(found: Branches) -> list[int]:
    """The stage whose head reads each node."""
    return [node.head for node in found.plan.stages]


def calls(model: GPT, run: Callable[[], object]) -> list[int]:
    """How often each layer runs."""
    counts = [0] * len(model.layers)

    def count(index: int) -> Callable[[nn.Module, tuple[object, ...]], None]:
        def hook(module: nn.Module, arguments: tuple[object, ...]) -> None:
            counts[index] += 1

        return hook

    hooks = [layer.register_forward_pre_hook(count(i)) for i, layer in enumerate(model.layers)]
    run()
    for hook in hooks:
        hook.remove()
    return counts


def test_the_trained_path_is_the_trained_model_and_a_skip_is_its_layers_by_hand(
    model: GPT, plan: Plan, inputs: Tensor
) -> None:
    full, skip = logits_of(model, branches(plan, [(0, 1, 2, 3), (0, 2)]), inputs)
    with torch.no_grad():
        assert torch.equal(full, model(inputs))
        assert torch.equal(full, model.readout(stage_outputs(model, plan, inputs, [3])[3], 3))
    assert torch.equal(skip, by_hand(model, inputs, [0, 3], head=2))
    trained = by_hand(model, inputs, [0, 1, 2, 3], head=2)
    assert not torch.allclose(skip, trained), "to skip a stage is to compute something else"
    assert not torch.allclose(skip, by_hand(model, inputs, [0, 3], head=3)), "the head is the last stage's"


def test_a_shared_prefix_is_computed_once(model: GPT, plan: Plan, inputs: Tensor) -> None:
    result = branches(plan, [(0, 1, 2, 3), (0, 2), (0, 1, 3)])
    # stage 1: once. Stage 2: once, for both paths. Stage 3: behind 2 and behind 1. Stage 4: behind 3 and 2.
    assert calls(model, lambda: logits_of(model, result, inputs)) == [1, 1, 1, 2, 2, 2]
    assert heads(result) == [0, 1, 2, 3, 2, 3]
    assert result.ends == (3, 4, 5)


def test_prefixes_cost_what_the_longest_costs(model: GPT, plan: Plan, inputs: Tensor) -> None:
    """The "parallel prefix" of §6.5.5: no node but those of the chain."""
    result = branches(plan, [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)])
    assert result.ends == (0, 1, 2, 3)
    assert calls(model, lambda: logits_of(model, result, inputs)) == [1] * LAYERS
    hidden = stage_outputs(model, plan, inputs, range(STAGES))
    for k, z in enumerate(logits_of(model, result, inputs)):
        assert torch.equal(z, model.readout(hidden[k], k))


def test_a_path_given_twice_is_one_node(plan: Plan) -> None:
    once, twice = branches(plan, [(0, 2)]), branches(plan, [(0, 2), [0, 2]])
    assert twice.plan == once.plan
    assert twice.ends == (1, 1)


def test_the_order_of_paths_changes_no_value(model: GPT, plan: Plan, inputs: Tensor) -> None:
    paths = [(0, 1, 2, 3), (0, 2), (0,), (0, 2, 3)]
    there = logits_of(model, branches(plan, paths), inputs)
    back = logits_of(model, branches(plan, paths[::-1]), inputs)
    assert all(torch.equal(a, b) for a, b in zip(there, back[::-1], strict=True))


def test_the_nodes_of_the_trained_path_are_the_trained_stages(plan: Plan) -> None:
    nodes = branches(plan, [(0, 1, 2, 3)]).plan.stages
    for node, trained in zip(nodes, plan.stages, strict=True):
        assert [port for port, _ in node.inputs] == [port for port, _ in trained.inputs]
        assert (node.index, node.outputs, node.last_use) == (trained.index, trained.outputs, trained.last_use)
        assert (node.layers, node.predicts) == (trained.layers, trained.predicts)


def test_no_gradient_crosses_and_messages_are_dropped_after_their_last_use() -> None:
    plan = Plan.of(Topology.chain("1,1,1,1", grad_scale=1.0), 4)
    nodes = branches(plan, [(0, 1, 2), (0, 2), (0, 3)]).plan.stages
    assert [node.num_grad_consumers for node in nodes] == [0] * 5
    assert all(lam == 0 for node in nodes for _, lam in node.inputs)
    root, middle = EdgeOutput(0, 1, "identity"), EdgeOutput(1, 2, "identity")
    assert nodes[0].outputs == (root,)
    assert nodes[2].last_use == (middle,)
    assert nodes[4].last_use == (root,), "stage 1 is heard by the last node too"
    assert nodes[3].last_use == ()


def test_every_node_has_a_memory_of_its_own(model: GPT, plan: Plan, inputs: Tensor) -> None:
    result = branches(plan, [(0, 1, 2, 3), (0, 2), (0, 2, 3), (0,)])
    states = Decoded(model, result.plan, len(inputs), inputs.shape[1])
    whole = logits_of(model, result, inputs)
    pieces = [logits_of(model, result, inputs[:, a:b], states) for a, b in ((0, 5), (5, 6), (6, 7), (7, 8))]
    for p, z in enumerate(whole):
        stepped = torch.cat([piece[p] for piece in pieces], dim=1)
        torch.testing.assert_close(stepped, z, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("paths", [[(0,)], [(0, 3)], [(0, 2), (0, 3)]], ids=str)
def test_layers_that_no_path_needs_may_be_left_out(
    model: GPT, plan: Plan, inputs: Tensor, paths: list[tuple[int, ...]]
) -> None:
    layers = [list(stage.layers) for stage in plan.stages]
    for path, z in zip(paths, logits_of(model, branches(plan, paths), inputs), strict=True):
        assert torch.equal(z, by_hand(model, inputs, [i for k in path for i in layers[k]], path[-1]))


def test_a_stage_keeps_its_relay_and_the_embedding_that_it_hears(model: GPT, inputs: Tensor) -> None:
    """With a layer context from the embedding and a relay that halves, for stage 3 alone."""

    class Half(nn.Module):
        def send(self, h: Tensor, received: Tensor | None) -> Tensor:
            return h / 2

        def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
            return message + 1

    model.add_relay("halving", Half())
    root, ctx = Edge(EMBEDDING, grad_scale=1.0), Edge(EMBEDDING)
    stages = (
        Stage(0, 1, (root,)),
        Stage(1, 3, (Edge(0),)),
        Stage(3, 6, (ctx, Edge(1, relay="halving"))),
    )
    result = branches(Plan.of(Topology(LAYERS, stages), LAYERS), [(0, 2), (0, 1, 2)])
    assert [p for p, _ in result.plan.stages[1].inputs] == [
        EdgeOutput(-1, 0, "identity"),
        EdgeOutput(0, 1, "halving"),
    ]
    assert result.plan.stages[1].stage.sources == (ctx, Edge(0, 1, relay="halving"))
    hidden = stage_outputs(model, result.plan, inputs, result.ends)
    with torch.no_grad():
        x0 = model.embed(inputs)
        heard = model.layer_context(x0, inputs)
        h = x0 + (model.layers[0](x0, heard) / 2 + 1)
        for i in (3, 4, 5):
            h = model.layers[i](h, heard)
    assert torch.equal(hidden[result.ends[0]], h)


def test_a_source_is_tapped_where_it_was_and_any_other_stage_at_its_end() -> None:
    plan = Plan.of(Topology.cover([(0, 2), (1, 4), (3, 6)]), LAYERS)
    nodes = branches(plan, [(0, 1, 2), (0, 2)]).plan.stages
    assert [[port for port, _ in node.inputs] for node in nodes] == [
        [EdgeOutput(EMBEDDING, 0, "identity")],
        [EdgeOutput(0, 1, "identity")],
        [EdgeOutput(1, 3, "identity")],
        [EdgeOutput(0, 2, "identity")],
    ]
    assert nodes[0].outputs == (EdgeOutput(0, 1, "identity"), EdgeOutput(0, 2, "identity"))


def test_a_forest_has_several_first_stages() -> None:
    plan = Plan.of(Topology.forest(["1,2", "1,2"]), LAYERS)
    result = branches(plan, [(0, 1), (2, 3), (0, 3)])
    assert heads(result) == [0, 1, 2, 3, 3]
    assert result.ends == (1, 3, 4)


def test_a_specialist_and_its_base() -> None:
    """{[1..4], [1..5]}: a frozen base and a stage behind it; the base still predicts."""
    plan = Plan.of(Topology.chain("1,1,1,1").with_specialist(2), LAYERS)
    result = branches(plan, [(0, 1, 2, 3), (0, 1, 2, 3, 4)])
    assert result.ends == (3, 4)
    assert result.plan.predicting() == [0, 1, 2, 3, 4]


def test_a_stage_without_a_loss_still_does_not_predict() -> None:
    plan = Plan.of(Topology.soft([1.0, 0.0]), 3)
    result = branches(plan, [(0, 1, 2), (0, 2)])
    assert heads(result) == [0, 1, 2, 2]
    assert result.plan.predicting() == [1, 2, 3]


@pytest.mark.parametrize(
    ("paths", "setting", "remedy"),
    [
        ([], "paths", ""),
        ([(0,), ()], "path", "give at least one"),
        ([(0, 4)], "path", "the plan has stages 1 to 4"),
        ([(-1, 2)], "path", "the plan has stages 1 to 4"),
        ([(0, 1, 1)], "path", "a stage runs at most once in a path"),
        ([(0, 3, 2)], "path", "list its stages in increasing order"),
        ([(0, 1), (1, 2)], "path", "begin with a stage that starts at the embedding: 1"),
    ],
    ids=["no-path", "empty", "beyond", "below", "repeated", "back", "not-from-the-start"],
)
def test_what_is_no_path_is_refused(
    plan: Plan, paths: list[tuple[int, ...]], setting: str, remedy: str
) -> None:
    given = [] if setting == "paths" else paths[-1]
    with refused(TopologyError, setting=setting, given=given, remedy=remedy):
        branches(plan, paths)


def test_stages_that_a_path_cannot_feed_are_refused() -> None:
    forest = Plan.of(Topology.forest(["1,2", "1,2"]), LAYERS)
    with refused(TopologyError, setting="path"):
        branches(forest, [(0, 2)])
    with refused(TopologyError, setting="path"):
        branches(forest, [(1,)])
    two = Plan.of(Topology.chain("2,2,2").with_input_bus(Edge(0)), LAYERS)
    with refused(TopologyError, setting="path"):
        branches(two, [(0, 1, 2)])
    assert branches(two, [(0, 1)]).ends == (1,)
    ctx = Plan.of(Topology.chain("2,2,2").with_input_bus(), LAYERS)
    with refused(TopologyError, setting="path"):
        branches(ctx, [(1, 2)])


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("1", (0,)),
        ("1-3", (0, 1, 2)),
        ("1,3", (0, 2)),
        ("1-2,4", (0, 1, 3)),
        (" 1 - 2 , 4-4 ", (0, 1, 3)),
    ],
)
def test_paths_as_users_write_them(text: str, path: tuple[int, ...]) -> None:
    assert parse_path(text) == path


@given(st.lists(st.integers(0, 40), min_size=1))
def test_a_path_reads_back_as_it_was_written(path: list[int]) -> None:
    assert parse_path(path_name(path)) == tuple(path)


def test_names_of_paths() -> None:
    assert path_name((0,)) == "1"
    assert path_name((0, 1)) == "1-2"
    assert path_name((0, 2, 3, 4, 6)) == "1,3-5,7"


@pytest.mark.parametrize(
    "text",
    ["", "0-2", "1,,2", "1-", "1-2-3", "one", "1-999999999", "²", "1,4-2"],
    ids=["empty", "zero", "gap", "open", "three", "word", "huge", "superscript", "down"],
)
def test_bad_paths(text: str) -> None:
    with refused(ConfigError, setting="path", given=text):
        parse_path(text)


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("1-4", {(0, 1, 2, 3): 1.0}),
        ("1-4*3+1-5", {(0, 1, 2, 3): 3.0, (0, 1, 2, 3, 4): 1.0}),
        ("1-2 + 1-2 * 2 + 1,3 * 0.5", {(0, 1): 3.0, (0, 2): 0.5}),
        ("1,2+1-2", {(0, 1): 2.0}),
    ],
)
def test_weighted_branches(text: str, weights: dict[tuple[int, ...], float]) -> None:
    assert parse_branches(text) == weights


@pytest.mark.parametrize("factor", ["0", "-1", "nan", "inf", "", "much", "2*2"])
def test_bad_weights(factor: str) -> None:
    with refused(ConfigError, setting="branches"):
        parse_branches(f"1*{factor}+1-2")


@pytest.mark.parametrize("text", ["", "1-2+", "+1", "1++2", "*3"])
def test_missing_branches(text: str) -> None:
    with refused(ConfigError, setting="path", given=""):
        parse_branches(text)


@pytest.mark.parametrize("objective", ["residual", "diversity"])
def test_the_path_of_all_stages_predicts_as_the_model_does(objective: str) -> None:
    topology = Topology.chain("1,1,1", objective=objective)
    plan = Plan.of(topology, 3)
    assert branches(plan, [(0, 1, 2)]).plan.prediction.full == plan.prediction.full
    assert branches(plan, [(0, 2)]).plan.prediction.full == ((0, 1.0), (1, 1.0))
    by_path = Plan.of(replace(topology, prediction="path:1-3"), 3)
    assert predicting_plan(by_path).prediction.full == plan.prediction.full


@pytest.mark.parametrize(
    ("prediction", "skipped"),
    [("sum", ((0, 1.0), (1, 1.0))), ("mean", ((0, 0.5), (1, 0.5))), ((0.2, 0.5, 0.3), ((0, 0.4), (1, 0.6)))],
    ids=str,
)
def test_a_path_keeps_the_weights_of_its_stages(prediction: Any, skipped: Any) -> None:
    plan = Plan.of(replace(Topology.chain("1,1,1"), prediction=prediction), 3)
    whole = branches(plan, [(0, 1, 2)]).plan.prediction.full
    assert [w for _, w in whole] == pytest.approx([w for _, w in plan.prediction.full])
    full = branches(plan, [(0, 2)]).plan.prediction.full
    assert [node for node, _ in full] == [node for node, _ in skipped]
    assert [w for _, w in full] == pytest.approx([w for _, w in skipped])
