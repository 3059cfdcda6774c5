"""Experiment C: the same layers as one chain of stages, and as a forest of branches from the input.

Three partitions of six layers, each as a chain and as a forest: 2,2,2 is six layers one behind another with
two boundaries, or three branches of two layers that all start at the embedding. A chain predicts by its last
stage and a forest by the mean of its branches' logits, so BPB is compared twice, as separate claims: by what
each predicts, and by the mean of all stages' logits in both (the Log-OP with weights that add up to one). The
plain sum of eq. 40 is in the rows. Beside BPB:

    disagreement   share of tokens on which two stages have other first choices, mean over pairs
    wand           share of layers that early exits skip when at most 1 % of the tokens may change
    specialist     BPB of new text that its last stage gains in a short training, the rest frozen
    composition    BPB of the best single stage minus that of the better pooling

Source: "Stage-Partitioned Learning: A Configuration Space Between Backpropagation and Local Learning"
§10.5.2 (Def. 10.11, Prop. 10.12), §10.7 (Experiment C). The paper names what to measure and says of no number
where it should be; the claims below are those of the text around it: no single root, so no dependence on it,
independent experts, and interior configurations that compete.
Cost: 18 trainings and as many probes with the preset `small`.
Limits. A branch of the forest is shorter than the chain: 2 layers against 6. Early exits of a forest run the
branches in order; the last exit is the mean of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from papers.outcome import Asked, Row
from papers.staged_runs import (
    SHALLOW,
    Arm,
    Sizes,
    chain,
    differences,
    mean,
    slopes,
    spread,
    train_arms,
    values,
)
from papers.verdicts import Claim, Drawing, Found, Series, above
from topograd.data import Text
from topograd.exec.forward import stage_outputs
from topograd.nn.gpt import GPT
from topograd.search.measured import Trained
from topograd.search.properties import read_properties
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

PARTITIONS = ("1,3,2", SHALLOW, "4,1,1")
BATCH = 32
"""Rows of text in a pass."""


def forest(partition: str) -> Arm:
    """A branch from the input for each part."""
    return Arm(f"{partition} forest", partition, Topology.forest(partition.split(","), heads="per-stage"))


CHAINS = [chain(partition, f"{partition} chain") for partition in PARTITIONS]
FORESTS = [forest(partition) for partition in PARTITIONS]


def run(sizes: Sizes, args: Asked) -> Found:
    """Train chains and forests, probe them, and judge."""
    rows = train_arms([*CHAINS, *FORESTS], sizes, args, probe)
    keys = {"disagreement": "differ", "wand": "WAND", "specialist": "learn", "composition": "pool"}
    cells = [
        (
            arm.name,
            f"{mean(rows, arm.name):.4f}",
            spread(rows, arm.name),
            f"{mean(rows, arm.name, 'bpb_mean'):.4f}",
            *(f"{mean(rows, arm.name, key):+.3f}" for key in keys),
        )
        for arm in (*CHAINS, *FORESTS)
    ]
    return Found(
        rows,
        "One chain, or branches from the input, with the same layers",
        ("arm", "BPB", "±", "by mean", *keys.values()),
        tuple(cells),
        Drawing(
            "BPB by the depth of the first stage or branch",
            "layers in the first stage or branch",
            "bits per byte",
            (
                _curve("chain, last stage", rows, CHAINS),
                _curve("chain, mean of stages", rows, CHAINS, "bpb_mean"),
                _curve("forest, mean of branches", rows, FORESTS),
            ),
        ),
        claims(rows),
    )


READINGS = {"as they predict": "bpb", "both by the mean": "bpb_mean"}
"""What a chain and a forest are compared by, and its key in a row."""


def claims(rows: Sequence[Row]) -> tuple[Claim, ...]:
    """Dependence on the first stage and BPB, both in two ways; independence of the experts."""
    sequential, parallel = f"{SHALLOW} chain", f"{SHALLOW} forest"
    compared = [claim for name, key in READINGS.items() for claim in _compared(rows, name, key)]
    return (
        *compared,
        above(
            "diverse branches",
            f"branches of {SHALLOW} disagree more than stages of the chain",
            "the forest's disagreement minus the chain's",
            differences(rows, parallel, sequential, "disagreement"),
        ),
        above(
            "composition",
            f"pooling gains more over the best branch of {SHALLOW} than over the chain's best stage",
            "the forest's composition gain minus the chain's, BPB,",
            differences(rows, parallel, sequential, "composition"),
        ),
    )


def _compared(rows: Sequence[Row], name: str, key: str) -> tuple[Claim, Claim]:
    """Chains against forests by one reading of BPB."""
    slope = zip(slopes(rows, CHAINS, key), slopes(rows, FORESTS, key), strict=True)
    return (
        above(
            f"no root, {name}",
            "BPB depends less on the depth of the first branch than on that of a chain's first stage",
            f"the slope's size of chains minus that of forests, BPB for each layer, {name},",
            [abs(a) - abs(b) for a, b in slope],
        ),
        above(
            f"competes, {name}",
            f"the forest of {SHALLOW} has no more BPB than the chain",
            f"the chain's BPB minus the forest's, {name},",
            differences(rows, f"{SHALLOW} chain", f"{SHALLOW} forest", key),
        ),
    )


def probe(stack: GPT, plan: Plan, text: Text) -> Mapping[str, Any]:
    """What C reads of an arm beside its BPB."""
    names = ("wand", "specialist_capacity", "composition_gain")
    result = read_properties(Trained(stack, plan, text), names)
    return {
        "disagreement": disagreement(stack, plan, text),
        "wand": result["wand"]["gain"],
        "wand_agreement": result["wand"]["agreement"],
        "specialist": result["specialist_capacity"],
        "composition": result["composition_gain"],
    }


@torch.no_grad()
def disagreement(stack: GPT, plan: Plan, text: Text) -> float:
    """Share of tokens whose likeliest continuation differs, mean over pairs of stages; 0 for one stage."""
    stages = plan.predicting()
    pairs = list(itertools.combinations(range(len(stages)), 2))
    differ, tokens = 0, 0
    for inputs, targets in zip(text.inputs.split(BATCH), text.targets.split(BATCH), strict=True):
        outputs = stage_outputs(stack, plan, inputs, stages)
        counted = targets != -100
        firsts = [stack.readout(outputs[k][counted], plan.stages[k].head).argmax(-1) for k in stages]
        differ += sum(int((firsts[a] != firsts[b]).sum()) for a, b in pairs)
        tokens += int(counted.sum())
    return differ / (tokens * len(pairs)) if pairs else 0.0


def _curve(name: str, rows: Sequence[Row], arms: Sequence[Arm], key: str = "bpb") -> Series:
    return Series.of(name, [arm.depth for arm in arms], [values(rows, arm.name, key) for arm in arms])
