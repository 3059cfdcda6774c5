"""Where in a network a symmetry may sit: the candidates that `discovery.py` then tests.

Candidates are cheap and many, since each is tested with numbers before anyone relies on it. They come from
what modules are called and from what happens in one run:

    map       a module with a matrix: nn.Linear, GPT-2's Conv1D, or a matrix that a module owns itself
    norm      a module whose parameters are a gain, and perhaps a bias, as wide as its output
    reader    a map whose input is a norm's output, seen by its storage while the model runs; modules without
              parameters in between (activations, dropout, reshapes) are looked through
    pair      two maps of which the first's outputs may be the second's inputs: seen in the run as readers
              are, or brothers in one module, where the function between them is not a module
    attention a module with queries, keys, values and outputs by the usual names: values pair with outputs,
              queries with keys
    head      the last map with as many outputs as the model, with the per-stage deltas that it owns

Symbols. Names are those of `model.named_parameters()`: a tensor that two modules share has one name.

Cost: one run of the model. Limits: convolutions are not looked at. Weights that are computed from others
(parametrizations) are not parameters, and not found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from torch import Tensor, nn

from topograd.optim.gauges import CEShiftBias, CEShiftRowShift, Gauge, HeadShift, LNScale, ReLURescale
from topograd.optim.gauges.base import Example, floating_tensors, run

ROLES = {
    "query": ("query", "q_proj", "q", "wq", "q_lin", "to_q"),
    "key": ("key", "k_proj", "k", "wk", "k_lin", "to_k"),
    "value": ("value", "v_proj", "v", "wv", "v_lin", "to_v"),
    "output": ("output", "o_proj", "out_proj", "o", "wo", "out_lin", "to_out", "c_proj", "dense"),
}
"""What the maps of attention are called."""
FUSED = ("c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv", "in_proj_weight")
"""What queries, keys and values in one matrix are called."""


@dataclass(frozen=True)
class Map:
    """A matrix, by the name of its parameter."""

    weight: str
    bias: str | None
    inputs: int
    outputs: int
    dim: int
    """The dimension of the matrix that counts inputs: 1, or 0 for Conv1D."""


@dataclass(frozen=True)
class Candidates:
    """What may hold; `pairs` may be of any degree, and join to chains."""

    gauges: tuple[Gauge, ...]
    pairs: tuple[ReLURescale, ...]
    attentions: tuple[ReLURescale, ...]
    remarks: tuple[tuple[str, str], ...]
    """What is there and no gauge covers: where, and why."""


def candidates(model: nn.Module, example: Example) -> Candidates:
    """Everything in a model that looks like a symmetry."""
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    maps = {path: found for path, module in model.named_modules() if (found := _map(module, names))}
    flow = _Flow(model, example, maps)
    pairs = [ReLURescale(maps[a].weight, maps[b].weight, bias=maps[a].bias) for a, b in flow.links]
    attentions: list[ReLURescale] = []
    gauges: list[Gauge] = [*_norm_gauges(model, names, maps, flow.readers)]
    for module in model.modules():
        family = _family(module, names, maps)
        roles = _roles(family)
        attentions += _attention_pairs(roles)
        ordered = [found for found in family.values() if found not in roles.values()]
        pairs += _brothers(ordered, in_a_row=isinstance(module, (nn.Sequential, nn.ModuleList)))
    gauges += _head_gauges(model, names, maps, flow)
    once = {frozenset((pair.up, pair.down)): pair for pair in reversed(pairs) if pair not in attentions}
    remarks = tuple(_remarks(model, maps, attentions))
    first = tuple(dict.fromkeys(gauges))  # layers that share tensors give one gauge twice
    return Candidates(first, tuple(reversed(once.values())), tuple(dict.fromkeys(attentions)), remarks)


def _map(module: nn.Module, names: Mapping[int, str]) -> Map | None:
    """The matrix of a module, if its parameters are a matrix and perhaps a bias."""
    own = dict(module.named_parameters(recurse=False))
    weight = own.get("weight")
    if weight is None or weight.dim() != 2 or own.keys() - {"weight", "bias"}:
        return None
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return None
    bias = names[id(own["bias"])] if "bias" in own else None
    dim = 0 if type(module).__name__ == "Conv1D" else 1
    return Map(names[id(weight)], bias, weight.shape[dim], weight.shape[1 - dim], dim)


class _Flow:
    """Who reads whom, in one run: the `readers` of each module that was read, and the `order` of the maps."""

    def __init__(self, model: nn.Module, example: Example, maps: Mapping[str, Map]) -> None:
        self.readers: dict[str, list[str]] = {}
        self.order: list[str] = []
        self._maps = maps
        self._source: dict[int, str] = {}
        self._alive: list[Tensor] = []  # so that no storage is used twice
        watched = [(path, m) for path, m in model.named_modules() if path in maps or not list(m.children())]
        handles = [module.register_forward_hook(self._hook(path, module)) for path, module in watched]
        try:
            self.output = run(model, example)
        finally:
            for handle in handles:
                handle.remove()

    @property
    def links(self) -> Iterator[tuple[str, str]]:
        """The maps that read a map."""
        for source, readers in self.readers.items():
            if source in self._maps:
                yield from ((source, reader) for reader in readers if reader != source)

    def _hook(self, path: str, module: nn.Module) -> Any:
        silent = next(module.parameters(), None) is None

        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if not isinstance(output, Tensor):
                return
            given = inputs[0] if inputs else None
            source = self._source.get(_storage(given)) if isinstance(given, Tensor) else None
            if path in self._maps:
                self.order.append(path)
                if source is not None:
                    self.readers.setdefault(source, []).append(path)
            self._alive.append(output)
            if not silent:
                self._source[_storage(output)] = path
            elif source is not None:
                self._source[_storage(output)] = source

        return hook


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _norm_gauges(
    model: nn.Module, names: Mapping[int, str], maps: Mapping[str, Map], readers: Mapping[str, Sequence[str]]
) -> Iterator[LNScale]:
    """Every module with a gain and nothing else, with the maps that were seen to read it."""
    for path, paths in readers.items():
        own = dict(model.get_submodule(path).named_parameters(recurse=False))
        gain = own.get("weight")
        if gain is None or gain.dim() != 1 or own.keys() - {"weight", "bias"}:
            continue
        found = list(dict.fromkeys(maps[reader] for reader in paths))
        fit = all(reader.inputs == len(gain) and reader.dim == found[0].dim for reader in found)
        if fit and all(tensor.shape == gain.shape for tensor in own.values()):
            bias = names[id(own["bias"])] if "bias" in own else None
            matrices = dict.fromkeys(reader.weight for reader in found)
            yield LNScale(names[id(gain)], list(matrices), bias=bias, dim=found[0].dim)


def _family(module: nn.Module, names: Mapping[int, str], maps: Mapping[str, Map]) -> dict[str, Map]:
    """The maps that a module has: those of its children, and matrices that it owns itself."""
    weights = {found.weight: found for found in maps.values()}
    family = {}
    for name, child in module.named_children():
        tensor = child._parameters.get("weight")
        if tensor is not None and (found := weights.get(names.get(id(tensor), ""))):
            family[name] = found
    own = dict(module.named_parameters(recurse=False))
    for name, tensor in own.items():
        if tensor.dim() == 2 and name not in ("weight", *FUSED):
            bias = own.get(f"{name}_bias")
            label = None if bias is None else names[id(bias)]
            family[name] = Map(names[id(tensor)], label, tensor.shape[1], tensor.shape[0], 1)
    return family


def _roles(family: Mapping[str, Map]) -> dict[str, Map]:
    """Queries, keys, values and outputs, where all four are there."""
    found = {
        role: family[name] for role, usual in ROLES.items() for name in reversed(usual) if name in family
    }
    return found if len(found) == len(ROLES) else {}


def _attention_pairs(roles: Mapping[str, Map]) -> Iterator[ReLURescale]:
    for one, other in (("value", "output"), ("query", "key")) if roles else ():
        if roles[one].weight != roles[other].weight:
            yield ReLURescale(roles[one].weight, roles[other].weight, bias=roles[one].bias)


def _brothers(ordered: Sequence[Map], in_a_row: bool) -> Iterator[ReLURescale]:
    """Maps of one module, in the order of their definition, of which one may feed a later one."""
    for one, other in pairwise(ordered) if in_a_row else combinations(ordered, 2):
        if one.outputs == other.inputs and one.weight != other.weight:
            yield ReLURescale(one.weight, other.weight, bias=one.bias)


def _head_gauges(
    model: nn.Module, names: Mapping[int, str], maps: Mapping[str, Map], flow: _Flow
) -> Iterator[Gauge]:
    """The shifts of the last map that has as many outputs as the model, and of its stages."""
    outputs = floating_tensors(flow.output)
    classes = outputs[0].shape[-1] if outputs and outputs[0].dim() else 0
    heads = [path for path in flow.order if maps[path].outputs == classes]
    if not heads or classes < 2:
        return
    head = maps[heads[-1]]
    deltas = getattr(model.get_submodule(heads[-1]), "deltas", None)
    stages = [
        names[id(delta.weight)]
        for delta in (deltas.children() if isinstance(deltas, nn.Module) else ())
        if isinstance(getattr(delta, "weight", None), nn.Parameter)
    ]
    gain = getattr(model._modules.get("norm"), "weight", None)  # of a stack of ours, before its head
    if stages and isinstance(gain, nn.Parameter):
        yield LNScale(names[id(gain)], [head.weight, *stages])
    if stages:
        yield HeadShift(head.weight, stages, rows=True)
        yield HeadShift(head.weight, stages)
    elif head.dim == 1:
        yield CEShiftRowShift(head.weight)
    if head.bias is not None:
        yield CEShiftBias(head.bias)


def _remarks(
    model: nn.Module, maps: Mapping[str, Map], attentions: Sequence[ReLURescale]
) -> Iterator[tuple[str, str]]:
    """What is there and no gauge covers."""
    fused = [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name in (*dict(module.named_children()), *dict(module.named_parameters(recurse=False)))
        if name in FUSED
    ]
    if fused:
        yield fused[0], "queries, keys and values are one matrix; a gauge moves whole tensors: split it"
    if attentions or fused:
        yield (
            "attention",
            "a factor for each head, and an invertible matrix for each head's values and outputs (queries "
            "and keys, if no rotation is between them), may hold too; gauges here scale whole tensors",
        )
    if any(found.dim == 0 for found in maps.values()):
        yield "Conv1D", "its matrices are (inputs, outputs); a ReLURescale with a bias is refused on them"
    modules = list(model.modules())
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in modules):
        yield "dropout", "it was off; a mask multiplies, so that a rescaling holds for each mask as well"
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in modules):
        yield "batch norm", "it used running statistics; with a batch's own, maps before it lose their size"
    if any(hasattr(module, "deltas") and getattr(module, "rank", None) for module in modules):
        yield "per-stage heads", "they are of low rank, which cannot take every shift of the shared head"
