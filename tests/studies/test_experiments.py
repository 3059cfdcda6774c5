"""Experiments A to E: their arms, and their verdicts in worlds that are made up."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from topograd.errors import ConfigError
from topograd.nn.gpt import GPT
from topograd.nn.learned_relays import add_relays
from topograd.studies import experiment_a, experiment_b, experiment_c, experiment_d, experiment_e
from topograd.studies.registry import STUDIES, run_study, study_named
from topograd.studies.staged_runs import PRESETS, Arm, Sizes, train_arms
from topograd.studies.verdicts import FAILED, HELD, UNDECIDED, Claim
from topograd.topology.dag import EMBEDDING
from topograd.training.evaluation import Text
from topograd.training.executor import prepare, train_step


def silent(done: int, total: int) -> None:
    pass


def verdicts(claims: Sequence[Claim]) -> dict[str, str]:
    return {claim.name: claim.verdict for claim in claims}


def test_a_asks_the_same_partitions_two_things(invent: Any) -> None:
    assert {stage.objective for arm in experiment_a.RESIDUAL for stage in arm.topology.stages} == {"residual"}
    assert [arm.partition for arm in experiment_a.PLAIN] == [arm.partition for arm in experiment_a.RESIDUAL]
    arms = [*experiment_a.PLAIN, *experiment_a.RESIDUAL]

    def world(slope: float, use: float, tail: float) -> dict[str, str]:
        def bpb(arm: Arm) -> float:
            residual = arm.pooling == "sum"
            return 3 - (slope if residual else 0.1) * arm.depth + tail * (arm.name == "3,1,2 residual")

        rows = invent(
            arms, bpb=bpb, usefulness=lambda arm: [use, use] if arm.pooling == "sum" else [0.1, 0.1]
        )
        return verdicts(experiment_a.claims(rows))

    assert set(world(slope=0.0, use=0.3, tail=0.2).values()) == {HELD}
    assert set(world(slope=0.2, use=0.0, tail=0.0).values()) == {FAILED}
    assert world(slope=0.1, use=0.1, tail=0.0)["tails differ"] == FAILED


def test_b_adds_a_detached_source_and_no_other_difference(invent: Any) -> None:
    for i, plain in enumerate(experiment_b.ARMS[None]):
        for stage, bused in zip(
            plain.topology.stages, experiment_b.ARMS["e0"][i].topology.stages, strict=True
        ):
            assert bused.sources[: len(stage.sources)] == stage.sources
            for edge in bused.sources[len(stage.sources) :]:
                assert (edge.source, edge.transmissivity, edge.relay) == (EMBEDDING, 0.0, "identity")
        assert len(experiment_b.ARMS["e0"][i].topology.stages[1].sources) == 2
    r0 = experiment_b.ARMS["r0"][1].topology.stages
    assert [(e.source, e.layer, e.relay) for e in r0[2].sources[1:]] == [(0, 1, "low-rank-2-beside-1")]
    arms = [arm for group in experiment_b.ARMS.values() for arm in group]

    def world(better: float, slope: float, use: float) -> set[str]:
        def bpb(arm: Arm) -> float:
            return 3 - 0.1 * arm.depth if "chain" in arm.name else 3 - better - slope * arm.depth

        rows = invent(arms, bpb=bpb, usefulness=lambda arm: [0.1, 0.1] if "chain" in arm.name else [use, use])
        return {claim.verdict for bus in experiment_b.BUSES for claim in experiment_b.claims(rows, bus)}

    assert world(better=0.5, slope=0.0, use=0.2) == {HELD}
    assert world(better=-0.5, slope=0.2, use=0.0) == {FAILED}


def test_c_has_branches_that_start_at_the_input(invent: Any) -> None:
    for arm in experiment_c.FORESTS:
        assert [[e.source for e in stage.sources] for stage in arm.topology.stages] == [[EMBEDDING]] * 3
        assert arm.topology.layers == 6
    arms = [*experiment_c.CHAINS, *experiment_c.FORESTS]

    def world(slope: float, start: float, other: float) -> set[str]:
        def bpb(arm: Arm) -> float:
            return 3 - 0.1 * arm.depth if "chain" in arm.name else start - slope * arm.depth

        def beside(arm: Arm) -> float:
            return 0.2 if "chain" in arm.name else other

        rows = invent(arms, bpb=bpb, disagreement=beside, composition=beside)
        return set(verdicts(experiment_c.claims(rows)).values())

    assert world(slope=0.0, start=2.5, other=0.4) == {HELD}
    assert world(slope=0.3, start=3.8, other=0.1) == {FAILED}


def test_disagreement_counts_other_first_choices(sizes: Sizes) -> None:
    arm = experiment_c.FORESTS[1]
    torch.manual_seed(0)
    stack = GPT(sizes.config(0).model)
    plan = prepare(stack, arm.topology)
    tokens = torch.randint(257, (3, 16))
    text = Text(tokens, tokens.clone().masked_fill(tokens < 60, -100), 48)
    assert experiment_c.disagreement(stack, plan, text) == 0.0  # all heads are zero
    first, second, third = (stack.head_parameters(k)[0] for k in range(3))
    with torch.no_grad():
        for delta in (first, second, third):
            delta.normal_()
        second.copy_(first)
    found = experiment_c.disagreement(stack, plan, text)
    assert 0.6 < found <= 1.0  # branches start alike, so two agree wherever their heads do


def test_c_reads_what_it_says(sizes: Sizes) -> None:
    (row,) = train_arms([experiment_c.FORESTS[1]], sizes, 1, silent, experiment_c.probe)
    assert row["bpb"] == row["bpb_mean"]
    assert 0 <= row["disagreement"] <= 1
    assert 0 <= row["wand"] < 1
    best = min(row["bpb_sum"], row["bpb_mean"])
    assert row["composition"] == pytest.approx(min(row["bpb_prefix"]) - best)


def test_d_hardens_to_any_three_stages() -> None:
    assert experiment_d.nearest([1, 1, 1, 0.1, 0.2]).parts == (4, 1, 1)
    assert experiment_d.nearest([1, 0.1, 1, 0.2, 1]).parts == (2, 2, 2)
    assert experiment_d.WEIGHTS["losses alone"] == 0


@pytest.mark.parametrize(
    ("alone", "worth", "expected"),
    [((4, 1, 1), (2, 2, 2), HELD), ((2, 2, 2), (4, 1, 1), FAILED)],
)
def test_d_in_both_worlds(alone: tuple[int, ...], worth: tuple[int, ...], expected: str) -> None:
    rows = []
    for seed in range(3):
        for arm in experiment_d.WEIGHTS:
            parts = alone if arm == "losses alone" else worth
            usable = sum(part >= 2 for part in parts) / 3
            rows.append({"arm": arm, "seed": seed, "first_depth": parts[0], "capability": usable})
    assert set(verdicts(experiment_d.claims(rows)).values()) == {expected}


def test_e_changes_the_relay_behind_the_first_stage_alone(sizes: Sizes) -> None:
    for arm, kind in zip(experiment_e.RELAYED, experiment_e.RELAYS, strict=True):
        relays = [edge.relay for stage in arm.topology.stages for edge in stage.sources]
        assert relays == ["identity", f"{kind}-1", "identity"]
    arm = experiment_e.RELAYED[0]
    torch.manual_seed(0)
    stack = GPT(sizes.config(0).model)
    add_relays(stack, arm.topology, sizes.width)
    prepare(stack, arm.topology)
    with torch.no_grad():
        stack.head.weight.normal_()
    tokens = torch.randint(257, (2, 16))
    train_step(stack, arm.topology, tokens, tokens)
    relay = stack.own_relays()["gate-1"]
    assert all(p.grad is not None and p.grad.any() for p in relay.parameters())


def test_e_in_both_worlds(invent: Any) -> None:
    arms = [*experiment_e.ARMS, *experiment_e.RELAYED]

    def world(sign: float) -> dict[str, str]:
        shift = {"2,2,2 gate": -0.1, "2,2,2 residual-gate": -0.1, "2,2,2 sigmoid": 0.3}
        rows = invent(
            arms,
            bpb=lambda arm: 3 - 0.1 * arm.depth + sign * shift.get(arm.name, 0.0),
            root_rank=lambda arm: 20 + sign * arm.depth,
            kept=lambda arm: 0.9 if ("gate" in arm.name) == (sign > 0) else 0.5,
        )
        return verdicts(experiment_e.claims(rows))

    assert set(world(1.0).values()) == {HELD}
    assert set(world(-1.0).values()) == {FAILED}
    rows = invent(experiment_e.ARMS, bpb=lambda arm: 3 - arm.depth, root_rank=lambda arm: 5 * arm.depth)
    assert experiment_e.correlations(rows) == pytest.approx([1.0] * 3, abs=1e-3)


@pytest.mark.parametrize("name", [name for name in STUDIES if name != "experiment-c"])
def test_every_study_runs(name: str, sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "tiny", sizes)
    told: list[tuple[int, int]] = []
    record = run_study(name, "tiny", 1, lambda *done: told.append(done))
    assert told[-1] == (len(record["rows"]), len(record["rows"]))
    assert record["verdict"] == UNDECIDED, "one seed"
    assert {"partition", "bpb", "seed"} <= record["rows"][0].keys()
    assert all(len(row) == len(record["table"]["header"]) for row in record["table"]["rows"])
    assert record["seeds"] == 1


def test_an_unknown_study() -> None:
    with pytest.raises(ConfigError, match="study 'f' is unknown; choose one of stage0-depth, experiment-a"):
        study_named("f")
