"""Experiments A, B, C and E: their arms, and their verdicts in worlds that are made up."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from papers.outcome import asked
from papers.stage_partitioned_learning import experiment_a, experiment_b, experiment_c, experiment_e
from papers.staged_runs import SHALLOW, Arm, Sizes, train_arms
from papers.verdicts import FAILED, HELD, Claim
from topograd.data import Text
from topograd.exec.train_step import train_step
from topograd.nn.gpt import GPT
from topograd.nn.learned_relays import LowRank
from topograd.nn.preparation import prepare
from topograd.topology.dag import EMBEDDING


def verdicts(claims: Sequence[Claim]) -> dict[str, str]:
    return {claim.name: claim.verdict for claim in claims}


def test_a_asks_the_same_partitions_two_things(invent: Any) -> None:
    assert {stage.objective for arm in experiment_a.RESIDUAL for stage in arm.topology.stages} == {"residual"}
    assert [arm.partition for arm in experiment_a.PLAIN] == [arm.partition for arm in experiment_a.RESIDUAL]
    arms = [*experiment_a.PLAIN, *experiment_a.RESIDUAL]

    def world(slope: float, use: float, tail: float) -> dict[str, str]:
        def bpb(arm: Arm) -> float:
            residual = "residual" in arm.name
            return 3 - (slope if residual else 0.1) * arm.depth + tail * (arm.name == "3,1,2 residual")

        rows = invent(
            arms, bpb=bpb, usefulness=lambda arm: [use, use] if "residual" in arm.name else [0.1, 0.1]
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
                assert (edge.source, edge.grad_scale, edge.relay) == (EMBEDDING, 0.0, "identity")
        assert len(experiment_b.ARMS["e0"][i].topology.stages[1].sources) == 2
    r0 = experiment_b.ARMS["r0"][1].topology.stages
    assert [(e.source, e.layer, e.relay) for e in r0[2].sources[1:]] == [(0, 1, "low-rank-2-beside-1")]
    arms = [arm for group in experiment_b.ARMS.values() for arm in group]

    def world(better: float, slope: float, use: float) -> set[str]:
        def bpb(arm: Arm) -> float:
            return 3 - 0.1 * arm.depth if "chain" in arm.name else 3 - better - slope * arm.depth

        rows = invent(arms, bpb=bpb, usefulness=lambda arm: [0.1, 0.1] if "chain" in arm.name else [use, use])
        return {claim.verdict for ctx in experiment_b.BUSES for claim in experiment_b.claims(rows, ctx)}

    assert world(better=0.5, slope=0.0, use=0.2) == {HELD}
    assert world(better=-0.5, slope=0.2, use=0.0) == {FAILED}


def test_b_opens_its_learned_bus_and_chooses_its_rate(sizes: Sizes) -> None:
    stack = GPT(sizes.config(0).gpt)
    arm = experiment_b.with_bus(SHALLOW, "r0")
    prepare(stack, arm.topology)
    buses = [relay for relay in stack.learned_relays().values() if isinstance(relay, LowRank)]
    assert len(buses) == 2
    assert not any(relay.up.weight.any() for relay in buses), "silent, as relays beside another start"
    assert arm.start is not None
    arm.start(stack)
    for relay in buses:
        projection = relay.up.weight @ relay.down.weight
        torch.testing.assert_close(projection @ projection, projection)
        assert torch.linalg.matrix_rank(projection) == sizes.width // 4
    told: list[int] = []
    watched = asked("experiment-b", "tiny", on_more=lambda done, total: told.append(done))
    tried = experiment_b.tune(sizes, watched)
    assert [row["relays"] for row in tried] == list(experiment_b.RATES)
    assert len({row["bpb"] for row in tried}) == len(tried), "the rate reaches the layer context"
    assert {row["seed"] for row in tried} == {experiment_b.TUNING}
    assert told == [1, 2, 3]


def test_b_trains_with_the_rate_that_was_best(
    sizes: Sizes, invent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float | None] = []
    tried = [{"arm": f"r0 at {rate}", "relays": rate, "bpb": abs(rate - 4e-3)} for rate in experiment_b.RATES]

    def trained(arms: Sequence[Arm], *rest: Any) -> list[Any]:
        seen.extend(arm.relays for arm in arms)
        rows: list[Any] = invent(arms, bpb=lambda arm: 3.0, usefulness=lambda arm: [0.1, 0.1])
        return rows

    monkeypatch.setattr(experiment_b, "tune", lambda sizes, asked: tried)
    monkeypatch.setattr(experiment_b, "train_arms", trained)
    found = experiment_b.run(replace(sizes, seeds=3), asked("experiment-b", "tiny"))
    assert seen == [4e-3] * 9
    assert found.rows[: len(tried)] == tried
    assert "r0 at the rate 0.004" in found.caption


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

        rows = invent(arms, bpb=bpb, bpb_mean=bpb, disagreement=beside, composition=beside)
        return set(verdicts(experiment_c.claims(rows)).values())

    assert world(slope=0.0, start=2.5, other=0.4) == {HELD}
    assert world(slope=0.3, start=3.8, other=0.1) == {FAILED}


def test_c_compares_by_prediction_and_by_one_pooling(invent: Any) -> None:
    """A forest that is better only because its branches are averaged is no better where both are."""

    def chains_gain_by_the_mean(arm: Arm) -> float:
        return 2.0 if "chain" in arm.name else 2.5

    rows = invent(
        [*experiment_c.CHAINS, *experiment_c.FORESTS],
        bpb=lambda arm: 3.0 if "chain" in arm.name else 2.5,
        bpb_mean=chains_gain_by_the_mean,
        disagreement=lambda arm: 0.1,
        composition=lambda arm: 0.1,
    )
    found = verdicts(experiment_c.claims(rows))
    assert found["competes, as they predict"] == HELD
    assert found["competes, both by the mean"] == FAILED


def test_disagreement_counts_other_first_choices(sizes: Sizes) -> None:
    arm = experiment_c.FORESTS[1]
    torch.manual_seed(0)
    stack = GPT(sizes.config(0).gpt)
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
    (row,) = train_arms(
        [experiment_c.FORESTS[1]], replace(sizes, seeds=1), asked("experiment-c", "tiny"), experiment_c.probe
    )
    assert 0 <= row["disagreement"] <= 1
    assert 0 <= row["wand"] < 1
    best = min(row["bpb_sum"], row["bpb_mean"])
    assert row["composition"] == pytest.approx(min(row["bpb_stages"]) - best)


def test_e_changes_the_relay_behind_the_first_stage_alone(sizes: Sizes) -> None:
    for arm, kind in zip(experiment_e.RELAYED, experiment_e.RELAYS, strict=True):
        relays = [edge.relay for stage in arm.topology.stages for edge in stage.sources]
        assert relays == ["identity", f"{kind}-1", "identity"]
    arm = experiment_e.RELAYED[0]
    torch.manual_seed(0)
    stack = GPT(sizes.config(0).gpt)
    prepare(stack, arm.topology)
    with torch.no_grad():
        stack.head.weight.normal_()
    tokens = torch.randint(257, (2, 16))
    train_step(stack, arm.topology, tokens, tokens)
    relay = stack.learned_relays()["gate-1"]
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
