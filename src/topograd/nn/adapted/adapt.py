"""Adapted models: a stack made of any nn.Module, which is not changed.

    stack = adapt(llama, layers="model.layers", norm="model.norm", head="lm_head")

The model's own forward decides how its layers are called. `embed` and `ctx` run it once each in a trace: for
that one call the layers, the norm and the head are stand-ins that only pass the hidden state on. What reaches
the first layer is x0, embedded by the model's own code. The other arguments of each layer (masks, rotary
tables, positions; layers may differ) go into the layer context, and the stack calls the layers with them.
Nothing is stored on the module between calls.

A trace also checks that the model is a stack: layers, norm and head run once each and in this order, each is
given what the one before it returned, and nothing else that could carry gradient or memory from layer to
layer. A model that breaks this raises StackError. A trace cannot see what the model does to its
logits; `verify` runs the whole model and compares. Models with a KV cache run without it.

Cost: two embeddings per step, and no layer twice. Limits: inputs are one tensor; no step-by-step decoding, so
generation runs the whole prefix again; arguments that a model computes from the hidden state of a later layer
are seen as x0 would make them (StackError where they carry gradient; `verify` finds them). Not thread-safe.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from topograd.errors import StackError
from topograd.nn.heads import Head, HeadedStack
from topograd.nn.stack import LayerContext, Projection, Stack

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))


def adapt(
    model: nn.Module, *, layers: str, head: str, norm: str | None = None, head_rank: int | None = None
) -> Adapted:
    """A stack of `model`, whose layers, last norm and head lie at these dotted paths.

    With an nn.Linear as head the stack may have per-stage heads, of rank `head_rank` if that is given.
    """
    blocks = _module(model, "layers", layers)
    if not isinstance(blocks, nn.ModuleList):
        lists = [name for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
        problem = f"layers={layers!r} is a {type(blocks).__name__}, not a ModuleList"
        remedy = f"{type(model).__name__} has these lists: {', '.join(lists) or 'none'}"
        raise StackError(problem, setting="layers", given=layers, remedy=remedy)
    if not len(blocks):
        raise StackError(setting="layers", given=layers, allowed="a list of at least one layer")
    chain = [_Link(f"{layers}.{i}", block) for i, block in enumerate(blocks)]
    if norm is not None:
        chain.append(_Link(norm, _module(model, "norm", norm)))
    chain.append(_Link(head, _module(model, "head", head)))
    return Adapted(model, chain, len(blocks), head_rank)


def _module(model: nn.Module, what: str, path: str) -> nn.Module:
    """The module at a dotted path."""
    module, where = model, type(model).__name__
    for part in path.split("."):
        child = getattr(module, part, None)
        if not isinstance(child, nn.Module):
            names = ", ".join(name for name, _ in module.named_children()) or "no modules"
            problem = f"{what}={path!r} is no path to a module: {where} has no {part!r}, it has {names}"
            raise StackError(problem, setting=what, given=path)
        module, where = child, part
    return module


@dataclass(frozen=True)
class _Link:
    """A module that the hidden state goes through, and its path in the model."""

    name: str
    module: nn.Module


@dataclass(frozen=True)
class _Call:
    """The arguments of a layer beside the hidden state."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class _Stop(BaseException):
    """The head is reached; the rest of the model's forward is not needed."""


class _Broken(BaseException):
    """The model is no stack, and why. Like _Stop, no `except Exception` of the model may swallow it."""


class _Trace:
    """One run of the model in which every link only passes the hidden state on."""

    def __init__(self, chain: Sequence[_Link], layers: int, pairs: bool) -> None:
        self.chain, self.layers = chain, layers
        self.pairs = pairs
        """Layers return (h, None) instead of h, for models that unpack or take [0]."""
        self.calls: list[_Call] = []
        self.x0: Tensor | None = None
        self._sent: tuple[Tensor, int] | None = None

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """The links' forwards are this trace's `visit`; afterwards they are what they were."""
        spaces = {link.module: link.module.__dict__ for link in self.chain}
        before = {module: space.get("forward") for module, space in spaces.items()}
        try:
            for module, space in spaces.items():
                space["forward"] = partial(self.visit, module)
            yield
        finally:
            for module, space in spaces.items():
                space.pop("forward", None)
                if before[module] is not None:
                    space["forward"] = before[module]

    def visit(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Record the link's arguments, and return as it would, with the hidden state unchanged."""
        place = len(self.calls)
        name = self.chain[place].name
        if module is not self.chain[place].module:
            other = next(link.name for link in self.chain if link.module is module)
            raise _Broken(f"it runs {other} where {name} should run")
        h, call = _split(module, args, kwargs)
        if not isinstance(h, Tensor):
            raise _Broken(f"it gives {name} a {type(h).__name__} instead of a hidden state")
        if self._sent is not None and not _same(h, *self._sent):
            raise _Broken(f"{name} is not given what {self.chain[place - 1].name} returned, unchanged")
        if place >= self.layers and (call.args or call.kwargs):
            raise _Broken(f"it gives {name} more than the hidden state")
        self.x0 = h if self.x0 is None else self.x0
        self.calls.append(call)
        if place == len(self.chain) - 1:
            raise _Stop
        self._sent = h, _version(h)
        return (h, None) if self.pairs and place < self.layers else h


def _split(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, _Call]:
    """The hidden state, which is the first parameter of `module`'s forward, and everything else."""
    if args:
        return args[0], _Call(args[1:], kwargs)
    first = list(inspect.signature(type(module).forward).parameters)[1]
    rest = dict(kwargs)
    return rest.pop(first, None), _Call((), rest)


def _version(h: Tensor) -> int:
    return 0 if h.is_inference() else h._version


def _same(h: Tensor, sent: Tensor, version: int) -> bool:
    """Whether h is what was sent, or a view of all of it, with no write in between."""
    layout = h.data_ptr() == sent.data_ptr() and h.shape == sent.shape and h.stride() == sent.stride()
    return layout and h.dtype == sent.dtype and _version(h) == version


class _RngState:
    """The state of the random generators, to be restored."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


class _Layer(nn.Module):
    """A layer of the model, called as the model would call it."""

    def __init__(self, inner: nn.Module, index: int) -> None:
        super().__init__()
        self.inner, self.index = inner, index

    def forward(self, h: Tensor, ctx: LayerContext) -> Tensor:
        call: _Call = ctx.calls[self.index]
        output = self.inner(h, *call.args, **call.kwargs)
        return output[0] if isinstance(output, tuple) else output


class Adapted(HeadedStack):
    """The stack that `adapt` makes. Its parameters are the model's own, and per-stage heads if added."""

    chain: tuple[_Link, ...]
    norm: nn.Module

    def __init__(self, model: nn.Module, chain: Sequence[_Link], layers: int, head_rank: int | None) -> None:
        super().__init__()
        self.model = model
        # Not registered: the model already has these modules, under their own names.
        self.__dict__["layers"] = nn.ModuleList(
            _Layer(link.module, i) for i, link in enumerate(chain[:layers])
        )
        self.chain = tuple(chain)
        self.__dict__["norm"] = chain[layers].module if len(chain) - layers == 2 else nn.Identity()
        head = chain[-1].module
        self.linear = type(head) is nn.Linear  # a subclass may compute something else
        if head_rank is not None and not self.linear:
            allowed = "left out, unless the head is an nn.Linear"
            raise StackError(setting="head_rank", given=head_rank, allowed=allowed)
        # A head that is no plain matrix is called as it is, and there are no per-stage heads.
        self.head = Head(head.weight, head.bias, rank=head_rank) if self.linear else head  # type: ignore
        named = inspect.signature(model.forward).parameters
        self.settings = {"use_cache": False} if "use_cache" in named else {}

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        x0 = self._trace(inputs).x0
        assert x0 is not None, "a finished trace has passed the first layer"
        return x0

    def layer_context(self, x0: Tensor, inputs: Tensor, offset: int | Tensor = 0) -> LayerContext:
        if isinstance(offset, Tensor) or offset:
            allowed = "0: an adapted model needs the whole prefix"
            raise StackError(setting="offset", given=offset, allowed=allowed)
        rng = _RngState(x0.device)
        calls = self._trace(inputs).calls[: len(self.layers)]
        rng.restore()
        for link, call in zip(self.chain, calls, strict=False):
            for place, value in enumerate(call.args, start=1):
                _check_argument(link.name, f"argument {place}", value)
            for name, value in call.kwargs.items():
                _check_argument(link.name, name, value)
        return replace(super().layer_context(x0, inputs), calls=calls)

    def _trace(self, inputs: Tensor) -> _Trace:
        """Run the model up to its head; the random generators move on by one embedding."""
        rng = _RngState(inputs.device)
        failures: list[tuple[int, str]] = []
        for pairs in (False, True):
            rng.restore()
            trace = _Trace(self.chain, len(self.layers), pairs)
            try:
                with trace.stand_ins():
                    self.model(inputs, **self.settings)
                problem = f"its forward ends without running {self.chain[len(trace.calls)].name}"
            except _Stop:
                return trace
            except _Broken as broken:
                problem = str(broken)
            except Exception as error:
                if not trace.calls:
                    raise
                problem = f"after {self.chain[len(trace.calls) - 1].name} its forward fails ({error})"
            failures.append((len(trace.calls), problem))
        farthest = max(failures, key=lambda failure: failure[0])[1]
        kind = type(self.model).__name__
        problem = f"{kind} cannot be adapted: {' '.join(farthest.split())}"
        raise StackError(problem, setting="model", given=kind)

    def normalize(self, h: Tensor) -> Tensor:
        return self.norm(h)

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        if self.shared_head is not None:
            return super().readout(h, stage, rows)
        logits: Tensor = self.head(self.norm(h))
        return logits if rows is None else logits[..., rows]

    @property
    def shared_head(self) -> Head | None:
        return self.head if self.linear else None

    def projection(self, stage: int) -> Projection | None:
        return super().projection(stage) if self.linear else None

    def add_heads(self, stages: Iterable[int], rank: int | None = None) -> bool:
        return super().add_heads(stages, rank) if self.linear else Stack.add_heads(self, stages, rank)

    def has_head(self, stage: int) -> bool:
        return self.linear and super().has_head(stage)

    def head_parameters(self, stage: int) -> list[nn.Parameter]:
        return super().head_parameters(stage) if self.linear else []

    @property
    def width(self) -> int:
        return self.head.weight.shape[1] if self.linear else super().width

    @property
    def last_stage(self) -> int:
        return self.head.last_stage if self.linear else 0

    @torch.no_grad()
    def verify(self, inputs: Tensor) -> None:
        """Raise StackError unless the stack, with the shared head, gives the model's logits bit for bit."""
        rng = _RngState(inputs.device)
        theirs = self._hidden_by_model(inputs)
        rng.restore()
        h = self.embed(inputs)
        ctx = self.layer_context(h, inputs)
        ours = [h]
        for layer in self.layers:
            ours.append(layer(ours[-1], ctx))
        if len(self.chain) - len(self.layers) == 2:
            ours.append(self.norm(ours[-1]))
        shared = self.last_stage + 1  # a stage without a head of its own
        ours.append(self.head(ours[-1], shared) if self.linear else self.head(ours[-1]))
        rng.restore()
        places = [
            *(f"what {link.name} is given" for link in self.chain),
            f"the logits, after {self.chain[-1].name}",
        ]
        for place, own, expected in zip(places, ours, theirs, strict=True):
            if not torch.equal(own, expected):
                if own.shape != expected.shape:
                    distance = f"shape ({tuple(own.shape)} instead of {tuple(expected.shape)})"
                else:
                    distance = f"{(own - expected).abs().max().item():.3g}"
                kind = type(self.model).__name__
                problem = f"the stack differs from {kind}, first in {place}, by {distance}"
                remedy = "write a Stack for this model instead"
                raise StackError(problem, setting="model", given=kind, remedy=remedy)

    def _hidden_by_model(self, inputs: Tensor) -> list[Tensor]:
        """The input of each link when the model runs by itself, and the logits."""
        seen: list[Tensor] = []

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append(_split(module, args, kwargs)[0])

        with ExitStack() as hooks:
            for module in dict.fromkeys(link.module for link in self.chain):
                hooks.enter_context(module.register_forward_pre_hook(note, with_kwargs=True))
            output = self.model(inputs, **self.settings)
        logits = getattr(output, "logits", output)
        return [*seen, logits[0] if isinstance(logits, tuple) else logits]


def _check_argument(layer: str, argument: str, value: Any) -> None:
    """Raise StackError for values that could carry gradient or memory across stage boundaries."""
    if isinstance(value, tuple):
        for part in value:
            _check_argument(layer, argument, part)
    elif isinstance(value, Tensor):
        if value.requires_grad:
            problem = f"{layer} is given {argument}, a tensor with gradient, which no stage would send back"
            remedy = "freeze the parameters that make it, or write a Stack for this model"
            raise StackError(problem, setting=argument, given=layer, remedy=remedy)
    elif not isinstance(value, _PLAIN):
        raise StackError(
            f"{layer} is given {argument}, a {type(value).__name__}, which could carry state between layers",
            setting=argument,
            given=layer,
            remedy="only tensors, numbers, strings, None and tuples of these may be given",
        )
