"""Branches: other paths through a trained plan, compiled into a plan.

A path is an increasing tuple of stages, (0, 1, 2) or, skipping one, (0, 2). It runs the layers of its stages
in order. Its first stage reads the embedding, every other one the stage before it in the path, through the
relay that it was trained with. Its logits come from the head of its last stage.

A set of paths is a trie: a node is a prefix of a path, and a prefix that paths share is one node, computed
once. So {[1..4], [1..5]} costs what [1..5] costs, and one more readout ("Product of Experts" §6.5.6). The
nodes become the stages of a plan: the same code runs them, with a state for every node, since
stage 3 fed by stage 1 has other keys and values than stage 3 fed by stage 2.

    nodes   prefixes of the paths, each behind its own prefix            cost Σ over nodes of their layers
    ends    path -> its last node;  a node is read by the head of the trained stage that it runs

Source: "Product of Experts" §4.3, §6.5.5, §6.5.6, Appendix B.4 and C.1.

Limits. Behind a skipped stage the next one reads inputs that it was not trained on: another function, not a
faster form of the same one. (§4.3 calls S1 → {S2, S3, S4} in parallel "mathematically identical" to the
chain; in a chain S3 reads S2, so it is not.) A stage never runs twice in a path (Appendix B.5 found that it
only harms). Layers must take the shapes that a skip gives them. A stage that reads several stages at once
raises TopologyError; the embedding that a stage reads beside one stage is kept. The plan is for inference:
every edge has λ = 0, and `plan.topology` is still the trained one, of which the nodes need not cover every
layer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from topograd.errors import ConfigError, TopologyError, shown
from topograd.topology.composition import MAX_LAYERS
from topograd.topology.dag import EMBEDDING, Edge
from topograd.topology.plan import EdgeOutput, Plan, PlannedStage
from topograd.topology.prediction import Prediction, Terms

Path = tuple[int, ...]
"""Stages in the order in which they run, counted from 0."""


@dataclass(frozen=True)
class Branches:
    """A trie of paths as a plan: `plan.stages` are its nodes, each behind the one that it reads."""

    plan: Plan
    ends: tuple[int, ...]
    """For each path, the node at which it ends."""


def branches(plan: Plan, paths: Sequence[Sequence[int]]) -> Branches:
    """The trie of `paths` through the stages of the trained `plan`; a path may be given twice."""
    if not paths:
        raise TopologyError(setting="paths", given=paths, allowed="at least one path, such as (0,)")
    wanted = [_checked(plan, tuple(path)) for path in paths]
    nodes: dict[Path, int] = {}
    for path in wanted:
        for depth in range(1, len(path) + 1):
            nodes.setdefault(path[:depth], len(nodes))
    inputs = [_inputs(plan, prefix, nodes) for prefix in nodes]
    last_use = {output: i for i, outputs in enumerate(inputs) for output in outputs}
    stages = tuple(_node(plan.stages[prefix[-1]], i, inputs[i], last_use) for i, prefix in enumerate(nodes))
    ends = tuple(nodes[path] for path in wanted)
    prediction, late = _prediction(plan, stages, nodes, ends), (0,) * len(stages)
    made = replace(plan, stages=stages, prediction=prediction, lateness=late, embedding_lateness=0)
    return Branches(made, ends)


def predicting_plan(plan: Plan) -> Plan:
    """The plan that computes what `plan` predicts: that of its path, if it predicts by one, or itself."""
    return plan if plan.prediction.path is None else branches(plan, [plan.prediction.path]).plan


def _prediction(
    plan: Plan, stages: Sequence[PlannedStage], nodes: Mapping[Path, int], ends: Sequence[int]
) -> Prediction:
    """A node predicts as the exit after its trained stage does, by those of its terms that are on the path.

    A sum adds up what there is; a mean or weights share their whole weight out over it.
    """
    exits: dict[int, Terms] = {}
    for prefix, index in nodes.items():
        if stages[index].predicts:
            terms = plan.prediction.exits.get(prefix[-1], ((prefix[-1], 1.0),))
            exits[index] = _on_path(terms, prefix, nodes, plan.prediction.kind == "pool") or ((index, 1.0),)
    last = next((end for end in reversed(ends) if end in exits), None)
    full = () if last is None else exits[last]
    kind: Literal["last", "sum", "pool"] = "sum" if len(full) > 1 else "last"
    return Prediction("pool" if len(set(ends)) > 1 else kind, full, exits)


def _on_path(terms: Terms, prefix: Path, nodes: Mapping[Path, int], shared_out: bool) -> Terms:
    """The terms whose stages are in `prefix`, as its nodes."""
    some = [(nodes[prefix[: prefix.index(j) + 1]], w) for j, w in terms if j in prefix]
    scale = math.fsum(w for _, w in terms) / math.fsum(w for _, w in some) if some and shared_out else 1.0
    return tuple((node, w * scale) for node, w in some)


def _checked(plan: Plan, path: Path) -> Path:
    """`path`, if `plan` has it."""
    if not path:
        raise TopologyError("a path has no stage", setting="path", given=path, remedy="give at least one")
    for stage in path:
        if not 0 <= stage < len(plan.stages):
            problem = f"stage {stage + 1} does not exist"
            remedy = f"the plan has stages 1 to {len(plan.stages)}"
            raise TopologyError(problem, setting="path", given=path, remedy=remedy)
    name = path_name(path)
    if len(set(path)) < len(path):
        remedy = "a stage runs at most once in a path"
        raise TopologyError(f"path {name} repeats a stage", setting="path", given=path, remedy=remedy)
    if list(path) != sorted(path):
        remedy = "list its stages in increasing order"
        raise TopologyError(f"path {name} goes back", setting="path", given=path, remedy=remedy)
    counts = [_source_stages(plan, stage) for stage in path]
    if counts[0] > 0:
        roots = ", ".join(str(k + 1) for k in range(len(plan.stages)) if not _source_stages(plan, k))
        problem = f"path {name} begins with stage {path[0] + 1}, which was trained to read another stage"
        remedy = f"begin with a stage that starts at the embedding: {roots}"
        raise TopologyError(problem, setting="path", given=path, remedy=remedy)
    for stage, count in zip(path[1:], counts[1:], strict=True):
        if count == 0:
            problem = f"path {name} puts a stage before stage {stage + 1}, which starts at the embedding"
            raise TopologyError(problem, setting="path", given=path, remedy="begin a path with it")
        if count > 1:
            problem = f"path {name} runs stage {stage + 1}, which reads {count} stages' outputs at once"
            remedy = "a path has one to offer, so use paths without that stage"
            raise TopologyError(problem, setting="path", given=path, remedy=remedy)
    return path


def _source_stages(plan: Plan, stage: int) -> int:
    """The number of its sources that are stages."""
    return sum(output.source != EMBEDDING for output, _ in plan.stages[stage].inputs)


def _inputs(plan: Plan, prefix: Path, nodes: Mapping[Path, int]) -> tuple[EdgeOutput, ...]:
    """The inputs of the node of `prefix`: as trained, with the node before it in the stage's place.

    The trained source is tapped where it was in training; any other stage at its end.
    """
    outputs = []
    for output, _ in plan.stages[prefix[-1]].inputs:
        if output.source != EMBEDDING:
            before = prefix[-2]
            layer = output.layer if output.source == before else plan.stages[before].stage.stop
            output = EdgeOutput(nodes[prefix[:-1]], layer, output.relay)
        outputs.append(output)
    return tuple(outputs)


def _node(
    trained: PlannedStage, index: int, inputs: tuple[EdgeOutput, ...], last_use: Mapping[EdgeOutput, int]
) -> PlannedStage:
    """The trained stage at another place; its scale stays, so that it predicts if it did."""
    sources = tuple(
        Edge(output.source, None if output.source == EMBEDDING else output.layer, relay=output.relay)
        for output in inputs
    )
    return replace(
        trained,
        index=index,
        stage=replace(trained.stage, sources=sources),
        head=trained.head,
        inputs=tuple((output, 0.0) for output in inputs),
        outputs=tuple(sorted((p for p in last_use if p.source == index), key=lambda p: p.layer)),
        num_grad_consumers=0,
        live_bus=False,
        last_use=tuple(p for p, last in last_use.items() if last == index),
    )


def path_name(path: Sequence[int]) -> str:
    """`path` as users write it, counted from 1, with runs of stages as ranges.

    >>> path_name((0, 1, 2, 4))
    '1-3,5'
    """
    runs: list[list[int]] = []
    for stage in path:
        if runs and stage == runs[-1][1] + 1:
            runs[-1][1] = stage
        else:
            runs.append([stage, stage])
    return ",".join(str(a + 1) if a == b else f"{a + 1}-{b + 1}" for a, b in runs)


def parse_path(text: str) -> Path:
    """The path that a user wrote, counting from 1; `branches` checks whether a plan has it.

    >>> parse_path("1-2,4")
    (0, 1, 3)
    """
    path: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        start = _stage(text, first)
        stop = _stage(text, last) if dash else start
        if stop < start:
            problem = f"path {shown(text)} counts down in {shown(part.strip())}"
            raise ConfigError(problem, setting="path", given=text, remedy="write the smaller first")
        path.extend(range(start - 1, stop))
    return tuple(path)


def _stage(text: str, token: str) -> int:
    digits = token.strip()
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 9 and 0 < int(digits) <= MAX_LAYERS):
        problem = f"path {shown(text)} has {shown(digits)} where a stage from 1 to {MAX_LAYERS} belongs"
        raise ConfigError(problem, setting="path", given=text, remedy="write stages as in 1-4 or 1,3")
    return int(digits)


def parse_branches(text: str) -> dict[Path, float]:
    """Paths and their weights: "+" between branches, "*" before a weight; a path written twice adds up.

    >>> parse_branches("1-3*2 + 1,3 + 1-3")
    {(0, 1, 2): 3.0, (0, 2): 1.0}
    """
    weights: dict[Path, float] = {}
    for branch in text.split("+"):
        written, star, factor = branch.partition("*")
        path = parse_path(written)
        weights[path] = weights.get(path, 0.0) + (_weight(text, factor) if star else 1.0)
    return weights


def _weight(text: str, factor: str) -> float:
    try:
        weight = float(factor)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        problem = f"branches {shown(text)} have weight {shown(factor.strip())}"
        remedy = "a weight is a positive number, as in 1-4*3+1-5"
        raise ConfigError(problem, setting="branches", given=text, remedy=remedy)
    return weight
