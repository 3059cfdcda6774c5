"""Specialists attached to a frozen base, each an adapter in a folder of its own.

    attached = attach(open_session("runs/base"), [open_specialist("runs/chat"), ...])

The specialist s is a stage of `layers` new layers behind the end of the base, with a head of its own:

    h_s = f_s(h_K),     z_s = (W + W_K + W_s) norm(h_s)            "Product of Experts" §6.1, §6.5 eq. 10

K is the last stage that the base predicts by, and W + W_K its head, frozen; W_s starts at zero, whole or U V
of rank r. The output matrices of the new layers start at zero too, so that h_s = h_K and z_s = z_K when it is
inserted, bit for bit. What the base predicts, Σ_j w_j z_j (one stage, a sum, a mean, the branches of a
forest), becomes Σ_{j≠K} w_j z_j + w_K z_s, which is trained as it predicts. Gradient stops at the end of the
base, so nothing that the base computes can change. A specialist of 0 layers is a head alone: h_s = h_K.

Layers have absolute indices: whatever alternates by layer is counted on from the base's end, for every
specialist alike, so that one can be attached alone or beside others (appendix D.1). Specialists stand beside
one another, each behind the base; how they predict together is `composition.py`.

The folder is an adapter (`runs/adapter.py`): its tensors and the hash of its base, nothing of the
base itself. Parameters: about 12 width² a layer, and r (vocab + width) or vocab · width for the head.
Limits: stacks with `append_layers` and a `Head` (GPT with any mixer, imported transformers).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from topograd.errors import CheckpointError, ConfigError, RunError
from topograd.limits import DEPTH, SIZE, check_numbers
from topograd.nn.capabilities import Growable
from topograd.nn.heads import Head
from topograd.nn.preparation import prepare
from topograd.nn.stack import Stack
from topograd.runs.adapter import Adapter, BaseIdentity, create_adapter, open_adapter
from topograd.runs.session import Held, LoadedTextRun
from topograd.specialists.tokens import NewToken, Vocabulary, shallow, with_new_rows
from topograd.topology.plan import Plan

KIND = "specialist"
MAX_SPECIALISTS = 64
RANK_FROM_VOCAB = 8192
"""From this vocabulary on a head is of low rank unless asked otherwise: a whole one would be most of it."""
RANK = 16


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a specialist is made of; kept in its topograd_adapter.json."""

    layers: int = 1
    first_layer: int = 0
    """Absolute index of its first layer: the number of the base's layers."""
    head_rank: int | None = None
    """Rank of its own head; None is a whole matrix."""
    objective: str = "cross-entropy"
    behind: int | None = None
    """The stage K of the base that it reads; None in folders of before version 0.4, where it was the end."""
    tokens: tuple[NewToken, ...] = field(default=())

    def __post_init__(self) -> None:
        check_numbers(self, layers=(0, DEPTH[1]), head_rank=SIZE)

    @classmethod
    def of(cls, adapter: Adapter) -> Shape:
        """The shape that a specialist's settings tell."""
        settings = adapter.settings
        tokens = tuple(NewToken(**token) for token in settings.get("tokens", ()))
        known = {name: settings[name] for name in ("layers", "first_layer", "head_rank", "objective")}
        return cls(**known, behind=settings.get("behind"), tokens=tokens)

    def settings(self) -> dict[str, Any]:
        """As topograd_adapter.json has it."""
        return {"peft_type": "TOPOGRAD_SPECIALIST", "task_type": "CAUSAL_LM", **asdict(self)}


@dataclass(frozen=True)
class Attached:
    """A base and the specialists on it as one stack and one plan; the base itself is not changed."""

    base: LoadedTextRun
    stack: Stack
    plan: Plan
    """The base's stages, frozen, and behind them a stage for each specialist."""
    stages: dict[str, int]
    """Which stage each specialist is, by name, in order."""
    vocabulary: Vocabulary

    def base_is_chain(self) -> bool:
        """Whether the base's layers follow one another, so that a hidden state is known by its layer."""
        stages = self.base.plan.topology.stages
        starts = [0, *(stage.stop for stage in stages)]
        return not self.stack.learned_relays() and all(
            stage.start == start and len(stage.sources) == 1 and stage.sources[0].layer in (None, start)
            for stage, start in zip(stages, starts, strict=False)
        )

    def part(self, name: str) -> SpecialistPart:
        """What one specialist consists of, as a module."""
        return SpecialistPart(self.stack, self.plan, self.stages[name])


class SpecialistPart(nn.Module):
    """The layers and the own head of one stage: everything that a specialist learns, and nothing else."""

    def __init__(self, stack: Stack, plan: Plan, stage: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([stack.layers[i] for i in plan.stages[stage].layers])
        head = stack.shared_head
        assert head is not None, "`copied` has checked it"
        self.head = head.deltas[str(plan.stages[stage].head)]

    def tensors(self) -> dict[str, Tensor]:
        """By names that do not depend on where the stage stands."""
        return {name: tensor.detach() for name, tensor in self.state_dict().items()}


def new_specialist(
    folder: Path | str,
    base: LoadedTextRun,
    *,
    layers: int = 1,
    head_rank: int | None = None,
    whole_head: bool = False,
    tokens: Sequence[NewToken] = (),
    seed: int = 0,
) -> Adapter:
    """A specialist that changes nothing yet, in a new folder.

    Without `head_rank` its head is whole, or of rank 16 where the vocabulary is large and it is not asked to
    be whole. `seed` draws what does not start at zero.
    """
    rank = head_rank
    if rank is None and not whole_head and base.stack.vocab >= RANK_FROM_VOCAB:
        rank = RANK
    full = base.plan.prediction.full
    shape = Shape(
        layers=layers,
        first_layer=len(base.stack.layers),
        head_rank=rank,
        objective="cross-entropy" if len(full) == 1 else "pooled",
        behind=full[-1][0],
        tokens=tuple(tokens),
    )
    return create_adapter(
        folder,
        kind=KIND,
        base=BaseIdentity.of(base),
        tensors=new_part(base, shape, seed).tensors(),
        settings=shape.settings() | {"steps": 0},
        card=card(Path(folder).name, base, shape),
    )


def new_part(base: LoadedTextRun, shape: Shape, seed: int = 0) -> SpecialistPart:
    """What a specialist of this shape consists of before it has learned anything."""
    torch.manual_seed(seed)
    return _attached(base, {"new": shape}).part("new")


def open_specialist(folder: Path | str) -> Adapter:
    """A specialist's folder, verified."""
    return open_adapter(folder, KIND)


def attach(base: LoadedTextRun, specialists: Sequence[Adapter] | Mapping[str, Adapter]) -> Attached:
    """The specialists on their base; those of another base raise RunError. Names default to folders'."""
    named = dict(specialists) if isinstance(specialists, Mapping) else by_folder(specialists)
    if len(named) > MAX_SPECIALISTS:
        raise ConfigError(setting="specialists", given=len(named), allowed=f"at most {MAX_SPECIALISTS}")
    for adapter in named.values():
        adapter.check_base(base)
    attached = _attached(base, {name: Shape.of(adapter) for name, adapter in named.items()})
    for name, adapter in named.items():
        part = attached.part(name)
        shapes = {key: tensor.shape for key, tensor in part.state_dict().items()}
        if shapes != {key: tensor.shape for key, tensor in adapter.tensors.items()}:
            raise CheckpointError(
                f"{adapter.folder} does not fit what its settings say", remedy="attach a new specialist"
            )
        part.load_state_dict(adapter.tensors)
    return attached


def _attached(base: LoadedTextRun, shapes: Mapping[str, Shape]) -> Attached:
    """New layers and heads for each shape on a copy of the base's stack that shares its weights."""
    if not shapes:
        return Attached(base, base.stack.eval(), base.plan, {}, Vocabulary(base.tokenizer, base.stack.vocab))
    tokens = next((shape.tokens for shape in shapes.values() if shape.tokens), ())
    for name, shape in shapes.items():
        if shape.tokens != tokens:  # ids differ, and so do the sizes of their heads
            raise ConfigError(
                setting="specialists", given=name, allowed="of the same new tokens as those beside it"
            )
    vocabulary = Vocabulary(base.tokenizer, base.stack.vocab, tokens)
    stack = copied(base.stack)
    with_new_rows(stack, vocabulary)
    topology, source = base.plan.topology, _source(base, shapes)
    depths = [shape.layers for shape in shapes.values()]
    topology = topology.with_specialists(depths, next(iter(shapes.values())).objective, source)
    first = len(base.plan.stages)
    for shape in shapes.values():
        stack.append_layers(shape.layers, index=shape.first_layer)  # type: ignore[operator]
    for stage, shape in enumerate(shapes.values(), first):
        stack.add_heads([stage], shape.head_rank)
        stack.shared_head.starts[stage] = source  # type: ignore[union-attr]
    plan = prepare(stack, topology)
    stages = {name: first + i for i, name in enumerate(shapes)}
    return Attached(base, stack.eval(), plan, stages, vocabulary)


def _source(base: LoadedTextRun, shapes: Mapping[str, Shape]) -> int:
    """The stage K behind which specialists stand."""
    prediction, head = base.plan.prediction, base.stack.shared_head
    if prediction.path is not None:
        raise ConfigError(
            "the base predicts by a path that skips stages",
            setting="prediction",
            remedy="specialists need another base",
        )
    last = prediction.full[-1][0]
    plain = len(prediction.full) == 1 and head is not None and not head.has_delta(last)
    for name, shape in shapes.items():
        if shape.behind is None and not (plain and base.plan.topology.leaves() == [last]):
            raise RunError(
                f"{name} was attached before version 0.4 to a base of several heads or predictions, where it "
                "began as another model than its base",
                setting="specialists",
                given=name,
                remedy="attach a new one",
            )
    return last


def copied(stack: Stack) -> Stack:
    """The same weights in a stack whose lists of layers and heads can grow by themselves."""
    head = stack.shared_head
    if not isinstance(stack, Growable) or head is None:
        raise ConfigError(
            f"a stack of type {type(stack).__name__} takes no new layers",
            remedy="specialists need a GPT or an imported model that topograd runs itself",
        )
    twin = shallow(stack)
    assert isinstance(twin, Stack)
    twin.layers = nn.ModuleList(stack.layers)
    own = shallow(head)
    assert isinstance(own, Head)
    own.deltas, own.starts = nn.ModuleDict(dict(head.deltas.items())), dict(head.starts)
    twin._modules["head"] = own
    return twin


def by_folder(specialists: Sequence[Adapter]) -> dict[str, Adapter]:
    """Specialists by the names of their folders."""
    names = [adapter.folder.resolve().name for adapter in specialists]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(setting="specialists", given=twice[0], allowed="in folders of different names")
    return dict(zip(names, specialists, strict=True))


def card(name: str, base: LoadedTextRun, shape: Shape, lines: Sequence[str] = ()) -> str:
    """The text of a specialist's model card."""
    head = "a whole head" if shape.head_rank is None else f"a head of rank {shape.head_rank}"
    return "\n".join(
        [
            f"# {name}",
            "",
            f"A specialist: {shape.layers or 'no'} layers and {head} behind the frozen base "
            f"`{base.run.folder.name}`. The base is not in this folder; it is referred to by hash:",
            "",
            f"- weights `{base.weights}`",
            f"- tokenizer `{base.tokenizer.digest}`",
            "",
            f"    topograd generate BASE --specialists {name} --prompt ...",
            "",
            *lines,
        ]
    )


def with_plan(attached: Attached, plan: Plan) -> LoadedTextRun:
    """The base as a session whose model is the attached one and predicts by `plan`."""
    return replace(attached.base, read_stack=Held(attached.stack), plan=plan, later=False)
