"""The properties of a trained configuration: worked out by hand where that can be done, and all together."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from raising import refused
from topograd.data.windows import Text
from topograd.decode.calibration.measure import Readings, read
from topograd.errors import ConfigError
from topograd.exec.forward import stage_outputs
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.search import property_probes
from topograd.search.measured import Trained
from topograd.search.properties import (
    LESS,
    MORE,
    PROPERTIES,
    TABLES,
    measure,
    named_objectives,
    read_numbers,
    read_properties,
)
from topograd.search.property_readings import (
    edge_ranks,
    head,
    head_parameters,
    information,
    pooling_gain,
    skipped,
    step_bytes,
    union_layers,
    within_budget,
)
from topograd.search.utility import capability
from topograd.topology.configuration import Configuration
from topograd.topology.dag import EMBEDDING, Edge, Topology
from topograd.topology.plan import Plan
from topograd.training.evaluation import ByPrediction, activation_rank, evaluate

VOCAB, TIME, WIDTH = 12, 16, 16


def text(rows: int = 8) -> Text:
    tokens = torch.randint(VOCAB, (rows, TIME + 1), generator=torch.Generator().manual_seed(3))
    targets = tokens[:, 1:].clone()
    targets[-1, 9:] = -100
    return Text(tokens[:, :-1], targets, 2 * int((targets != -100).sum()))


def model(topology: Topology, **settings: Any) -> tuple[GPT, Plan]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"width": WIDTH, "heads": 2, "vocab": VOCAB, "context": TIME}
    stack = GPT(**sizes | {"layers": topology.layers} | settings)
    plan = prepare(stack, replace(topology, relay_rank=3))
    for parameter in stack.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return stack, plan


@pytest.fixture(scope="module", autouse=True)
def _short_probes() -> Iterator[None]:
    """What the probes find is for their own tests; here they need only run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(property_probes, "STEPS", 2)
        yield


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return measure(*model(Topology.chain(Configuration.parse("2,2", heads="per-stage"))), text())


def test_every_property_is_there_and_is_json(measured: dict[str, Any]) -> None:
    assert set(measured) == set(PROPERTIES) == {*LESS, *MORE, *TABLES}
    assert json.loads(json.dumps(measured, allow_nan=False)) == measured


def test_the_properties_of_a_hard_chain(measured: dict[str, Any]) -> None:
    stack, plan = model(Topology.chain(Configuration.parse("2,2", heads="per-stage")))
    reading = evaluate(stack, plan, text())
    assert measured["bpb"] == asdict(reading.bpb)
    assert measured["prefix_bpb"] == reading.bpb.prefix[0]
    assert measured["ece"] == reading.ece
    assert measured["calibration"] == pytest.approx(sum(reading.ece) / 2)
    assert measured["effective_rank"] == reading.effective_rank
    assert (measured["gradient_depth"], measured["pipeline_granularity"]) == (2, 2)
    assert (measured["coupling_cost"], measured["coupling"]) == (2, 2 / 3)
    assert measured["update"]["others"] == 0
    assert measured["update"]["own"] > 0
    assert measured["head_parameters"] == 3 * VOCAB * WIDTH
    assert measured["head"] == 2.0
    assert 0 < measured["target_alignment"] < 1


def test_the_capability_is_the_mean_of_four_measured_shares(measured: dict[str, Any]) -> None:
    right = measured["prefix"]["accuracy"]
    gain, price = measured["specialist_capacity"], measured["specialist_price"]
    assert measured["capability"] == capability(
        prefix_exit=min(measured["prefix"]["within_budget"] / right[-1], 1.0),
        wand=measured["wand"]["gain"],
        specialist=max(gain - max(price, 0), 0) / max(gain, measured["specialist_reference"]),
        composition=max(measured["composition_gain"], 0) / min(measured["bpb"]["stages"]),
    )
    assert 0 < measured["capability"] < 1


def test_one_stage_has_no_exits_and_what_it_learns_is_measured() -> None:
    """With one stage there is no early exit and no pool; what it learns and forgets is read as any is."""
    stack, plan = model(Topology.chain("4"))
    alone = measure(stack, plan, text())
    assert alone["wand"] == {"gain": 0.0, "agreement": 1.0}
    assert alone["prefix"]["within_budget"] == 0.0
    assert alone["composition_gain"] == 0.0
    assert alone["specialist_capacity"] == alone["specialist_reference"] != 0
    assert alone["specialist_price"] != 0
    assert alone["edge_ranks"] == []
    assert alone["bandwidth"] == 0.0
    assert alone["target_alignment"] == pytest.approx(1.0, abs=1e-5)
    assert alone["coordination"] == 1.0


def test_heads_and_private_decoders_are_counted_in_vocabulary_matrices() -> None:
    stack, plan = model(Topology.chain("2,2").with_decoders(1))
    layer = sum(p.numel() for p in stack.layers[4].parameters())
    other = sum(p.numel() for p in stack.layers[5].parameters())
    assert head(Trained(stack, plan, text(), layers=4)) == (layer + other) / (VOCAB * WIDTH)
    low = model(Topology.chain(Configuration.parse("2,2", heads="per-stage")), head_rank=2)
    assert head(Trained(*low, text())) == pytest.approx(2 * 2 * (VOCAB + WIDTH) / (VOCAB * WIDTH))
    assert head(Trained(*model(Topology.chain("2,2")), text())) == 0


def test_the_bandwidth_is_that_of_what_a_stage_receives() -> None:
    """A boundary of rank 3 is narrow; a bus beside it widens it, and gradient that crosses makes it none."""

    def bandwidth(topology: Topology, floor: float) -> float:
        found = read_numbers(Trained(*model(topology), text(), floor=floor), ["bandwidth"])
        return found["bandwidth"]

    narrow = Topology.chain("2,2").with_relays("low-rank")
    stack, plan = model(narrow)
    (edge,) = edge_ranks(stack, plan, text().inputs)
    assert edge.after <= 3
    assert bandwidth(narrow, 0.5) == pytest.approx(0.5 - edge.after / WIDTH)
    assert bandwidth(narrow, 0.05) == 0.0
    x0 = stack.embed(text().inputs)
    assert activation_rank(x0.flatten(0, 1)) > 8
    assert bandwidth(narrow.with_input_bus(), 0.5) < bandwidth(narrow, 0.5)
    assert bandwidth(Topology.chain("2,2", grad_scale=1.0).with_relays("low-rank"), 0.5) == 0.0


def squared_layers(trained: Trained) -> float:
    """A property of somebody else."""
    return float(len(trained.stack.layers) ** 2)


def test_a_property_of_somebody_else() -> None:
    trained = Trained(*model(Topology.chain("2,2")), text())
    name = f"{__name__}:squared_layers"
    assert read_properties(trained, [name, "gradient_depth"]) == {name: 16.0, "gradient_depth": 2}
    assert named_objectives([name]) == {name: "minimize"}
    assert named_objectives([f"max:{name}", "min:bpb"]) == {name: "maximize", "bpb": "minimize"}
    with pytest.raises(ConfigError, match=r"property 'no\.such:thing' cannot be imported"):
        read_properties(trained, ["no.such:thing"])


def test_objectives_by_name() -> None:
    assert named_objectives(["bpb", "capability"]) == {"bpb": "minimize", "capability": "maximize"}
    with pytest.raises(ConfigError, match="property 'speed' is unknown; choose one of bpb"):
        named_objectives(["speed"])
    with refused(ConfigError, setting="objectives", given="wand"):
        named_objectives(["wand"])
    with refused(ConfigError, setting="objectives", given="bpb"):
        named_objectives(["bpb", "max:bpb"])
    with refused(ConfigError, setting="objectives"):
        named_objectives([])
    frozen = Trained(*model(Topology.chain("1,1").with_specialist(2)), text())
    with refused(ConfigError, setting="target_alignment"):
        read_numbers(frozen, ["target_alignment"])


EVERY_KIND = {
    # stages that predict, stages that can be told apart by gradient, whether other layers stay where they are
    "forest": (Topology.forest(["1,1", "2"]), 3, 3, True),
    "cover": (Topology.cover([(0, 2), (1, 4)]), 2, 1, True),
    "gated-bus": (Topology.chain("2,2").with_input_bus(Edge(EMBEDDING, relay="gate")), 2, 2, True),
    "hierarchical": (Topology.chain("2,2", grad_scale=1.0).with_relays("sigmoid"), 2, 1, False),
    "soft": (Topology.soft([1.0, 0.5, 1.0]), 2, 1, False),
    "regions": (Topology.regions("2,2", "S=4,r=4"), 1, 1, True),
    "specialist": (Topology.regions("1,2", "S=4,r=4").with_specialist(1), 2, 1, True),
    "decoders": (Topology.chain("1,1").with_decoders(1), 2, 2, True),
}


@pytest.mark.parametrize(("topology", "exits", "groups", "still"), EVERY_KIND.values(), ids=EVERY_KIND)
def test_every_kind_of_configuration_is_measured(
    topology: Topology, exits: int, groups: int, still: bool
) -> None:
    found = measure(*model(topology), text(4))
    assert len(found["prefix"]["accuracy"]) == len(found["ece"]) == len(found["exit_layers"]) == exits
    assert found["pipeline_granularity"] == groups
    assert (found["update"]["others"] == 0) is still
    assert found["update"]["own"] > 0
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_measuring_leaves_the_model_as_it_was() -> None:
    stack, plan = model(Topology.chain("2,2"))
    stack.train()
    before = {name: value.clone() for name, value in stack.state_dict().items()}
    measure(stack, plan, text())
    assert stack.training
    assert all(torch.equal(before[name], value) for name, value in stack.state_dict().items())
    assert all(p.grad is None for p in stack.parameters())


def test_stages_hold_less_memory_than_backprop() -> None:
    here = text()
    staged = step_bytes(*model(Topology.chain("1,1,1,1")), here.inputs, here.targets)
    hierarchical = Topology.chain("1,1,1,1", grad_scale=1.0)
    late = step_bytes(*model(hierarchical.with_gradient(delay=1)), here.inputs, here.targets)
    assert late > step_bytes(*model(hierarchical), here.inputs, here.targets), "six more graphs of layers"
    whole = step_bytes(*model(Topology.chain("4")), here.inputs, here.targets)
    assert 0 < staged < 0.6 * whole


def test_information_is_what_is_known_beyond_frequencies() -> None:
    four = torch.arange(4).repeat(2, 4)
    even = Text(four, four, 64)  # an entropy of 2 bits a token, two bytes each
    assert information(0.5, even) == pytest.approx(1.0)
    assert information(0.0, even) == pytest.approx(2.0)
    assert information(3.0, even) == 0.0


def test_head_parameters_count_the_shared_matrix_and_the_deltas() -> None:
    own = Topology.chain(Configuration.parse("1,1,2", heads="per-stage"))
    assert head_parameters(Trained(*model(Topology.chain("1,1,2")), text())) == VOCAB * WIDTH
    assert head_parameters(Trained(*model(own), text())) == 4 * VOCAB * WIDTH
    assert head_parameters(Trained(*model(own, head_rank=2), text())) == VOCAB * WIDTH + 3 * 2 * (
        VOCAB + WIDTH
    )


def said(unsure: torch.Tensor) -> Readings:
    """Two stages on 40 rows of one token: the first says 0, hardly so where unsure or in rows 0, 8, ...

    The last says 0 too, but 1 in rows 0, 8, ...: there the first is wrong.
    """
    wrong = torch.arange(40) % 8 == 0
    z0, z1 = torch.zeros(40, 3), torch.zeros(40, 3)
    z0[:, 0] = torch.where(wrong, 0.2, torch.where(unsure, 0.1, 4.0))
    z1[:, 0], z1[wrong, 1] = 5.0, 9.0
    return read([z0, z1], torch.arange(40))


def test_wand_skips_what_sure_tokens_do_not_need() -> None:
    """Sure rows leave after 2 of 4 layers; unsure ones are below the margins of the wrong ones and go on."""
    found = skipped(said(torch.arange(40) % 4 == 1), [2, 4], eps=0.01)
    assert found == {"gain": 0.25, "agreement": 1.0}, "half of the odd rows skip half of the layers"
    assert skipped(said(torch.arange(40) < 0), [2, 4], eps=0.01)["gain"] == 0.5, "all of them"


def test_wand_needs_rows_on_both_sides() -> None:
    one = said(torch.arange(40) < 0).take(torch.arange(40) == 0)
    with refused(ConfigError, setting="text", given=1):
        skipped(one, [2, 4], eps=0.01)


def test_an_exit_of_parallel_branches_pays_for_those_before() -> None:
    assert union_layers(Plan.of(Topology.chain("1,1,2"), 4)) == [1, 2, 4]
    assert union_layers(Plan.of(Topology.forest(["1,1", "2"]), 4)) == [1, 2, 4]
    assert union_layers(Plan.of(Topology.cover([(0, 3), (1, 4)]), 4)) == [3, 6]


def test_a_budget_buys_the_best_exit_within_it() -> None:
    found = within_budget([0.3, 0.2, 0.6], [2, 4, 6], 6, 0.7)
    assert found == {"accuracy": [0.3, 0.2, 0.6], "budget": 0.7, "within_budget": 0.3}
    assert within_budget([0.3], [6], 6, 0.5)["within_budget"] == 0.0
    assert within_budget([0.3, 0.6], [3, 6], 6, 1.0)["within_budget"] == 0.6


def test_composition_gain_is_over_the_best_stage() -> None:
    def bpb(stages: list[float], total: float, mean: float) -> ByPrediction:
        last = stages[-1]
        return ByPrediction(
            prediction=last, prefix=stages, stages=stages, last=last, sum=total, mean=mean, shrinkage=9.0
        )

    assert pooling_gain(bpb([3.0, 2.5], 2.75, 2.25)) == 0.25
    assert pooling_gain(bpb([3.0, 2.5], 2.75, 3.0)) == -0.25
    assert pooling_gain(bpb([3.0], 3.0, 3.0)) == 0.0


def test_edges_show_what_their_relay_does_to_the_rank() -> None:
    ranks = {kind: edge_ranks(*relayed(kind), text().inputs) for kind in ("identity", "low-rank")}
    assert [(r.stage, r.source, r.relay) for r in ranks["low-rank"]] == [
        (1, 0, "low-rank-1"),
        (2, 1, "low-rank-2"),
    ]
    assert all(r.before == r.after for r in ranks["identity"])
    assert all(r.after <= 3 + 1e-9 < r.before for r in ranks["low-rank"])


def test_an_interface_that_says_nothing_leaves_its_canvas_of_layers() -> None:
    stack, plan = model(Topology.regions("2,1,1", "S=2,r=3", canvas=2))
    for relay in stack.learned_relays().values():
        torch.nn.init.zeros_(relay.get_parameter("decode.outer.weight"))
    after = {(r.stage, r.relay): r.after for r in edge_ranks(stack, plan, text().inputs)}
    assert after[1, "interface-1"] == after[1, "canvas"] == after[2, "interface-2"]


def relayed(kind: str) -> tuple[GPT, Plan]:
    return model(Topology.chain("1,1,2").with_relays(kind))


def test_the_exits_of_a_residual_chain_are_running_sums() -> None:
    """The text is what the sum says: the sum is always right, the last stage alone is not."""
    stack, plan = model(Topology.chain("2,2", objective="residual"))
    outputs = stage_outputs(stack, plan, text().inputs, [0, 1])
    z = [stack.readout(outputs[k], k) for k in (0, 1)]
    said = (z[0] + z[1]).argmax(-1)
    assert (z[1].argmax(-1) != said).any()
    right = [(z[0].argmax(-1) == said).double().mean().item(), 1.0]
    found = measure(stack, plan, Text(text().inputs, said, said.numel()))
    assert found["prefix"]["accuracy"] == pytest.approx(right)


@pytest.mark.parametrize("budget", [0.0, 1.5, math.nan])
def test_a_budget_is_a_share(budget: float) -> None:
    with refused(ConfigError, setting="budget"):
        measure(*model(Topology.chain("2,2")), text(), budget=budget)
