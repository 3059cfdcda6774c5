"""Candidate symmetries of a network: the pairs of maps that `symmetry_search.py` tests.

    map       a module with a matrix: nn.Linear, GPT-2's Conv1D, or a matrix that a module owns itself
    family    the maps below one module, if they are few; else its own children. Modules of one class whose
              maps have the same shapes are listed together.
    pair      two maps of a family of which the first's outputs may be the second's inputs, or that read the
              same inputs (`by_rows`: queries and keys). Likely are neighbours of one module, and values with
              outputs, queries with keys, by their usual names.
    reader    a map whose input is a module's output, seen by its storage in one run; modules without
              parameters between them (activations, dropout, reshapes) are looked through

Symbols. Names are those of `model.named_parameters()`: a tensor that two modules share has one name.
Cost: one run of the model. Limits: convolutions are not looked at. Weights that are computed from others
(parametrizations) are not parameters, and not found.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, permutations
from typing import Any

from torch import Tensor, nn

from topograd.geometry.symmetries import Mixing

MAX_MAPS = 4
"""Below one module; in larger ones only its own children are paired."""
MAX_SHARED = 64
"""Heads that may share one."""
ROLES = {
    "query": ("query", "q_proj", "q", "wq", "q_lin", "to_q"),
    "key": ("key", "k_proj", "k", "wk", "k_lin", "to_k"),
    "value": ("value", "v_proj", "v", "wv", "v_lin", "to_v"),
    "output": ("output", "o_proj", "out_proj", "o", "wo", "out_lin", "to_out", "c_proj", "dense"),
}
"""Names of attention's maps."""
FUSED = ("c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv", "in_proj_weight")
"""Names of queries, keys and values in one matrix."""
ROUTERS = ("gate", "router", "gating", "wg")
"""Names of maps whose outputs are the logits of experts."""
Maps = Mapping[str, "Map"]
Pair = tuple[str, str, bool]
"""Producer and consumer by their paths, and whether their rows meet."""


@dataclass(frozen=True)
class Map:
    """A matrix, by the names of its parameters."""

    weight: str
    bias: str | None
    outputs: int
    inputs: int
    turned: bool = False
    """Whether it is (inputs, outputs), as GPT-2's Conv1D."""


def find_maps(model: nn.Module, names: Mapping[int, str]) -> Iterator[tuple[str, Map]]:
    """Every module whose parameters are a matrix and perhaps a bias, and matrices that modules own beside."""
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        embeds = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for name, matrix in own.items():
            if matrix.dim() != 2 or embeds or name in FUSED:
                continue
            alone = name == "weight" and not own.keys() - {"weight", "bias"}
            bias = own.get("bias" if alone else f"{name}_bias")
            label = None if bias is None else names[id(bias)]
            turned = type(module).__name__ == "Conv1D"
            outputs, inputs = matrix.mT.shape if turned else matrix.shape
            if alone or name != "weight":
                place = path if alone else f"{path}.{name}".lstrip(".")
                yield place, Map(names[id(matrix)], label, outputs, inputs, turned)


def families(maps: Maps, model: nn.Module) -> Iterator[list[dict[str, Map]]]:
    """Modules with some maps below them, small ones first, those of one class and shape together."""
    groups: dict[Any, list[dict[str, Map]]] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        below = {name.removeprefix(prefix): one for name, one in maps.items() if name.startswith(prefix)}
        listed = isinstance(module, nn.Sequential | nn.ModuleList)
        if listed or len(below) > MAX_MAPS:
            below = {name: one for name, one in below.items() if "." not in name}
        if len(below) > 1:
            shapes = tuple((name, m.outputs, m.inputs, m.bias is None) for name, m in below.items())
            groups.setdefault((type(module), listed, shapes), []).append(below)
    return iter(sorted(groups.values(), key=lambda group: len(group[0])))


def likely_pairs(maps: Maps) -> Iterator[Pair]:
    """Values with outputs and queries with keys, where all four are there; else neighbours of one module."""
    roles = {}
    for role, usual in ROLES.items():
        called = [path for path in maps if path.rpartition(".")[2] in usual]
        if len(called) == 1:
            roles[role] = called[0]
    roles = roles if len(roles) == len(ROLES) else {}
    if roles:
        yield roles["value"], roles["output"], False
        fewer, more = sorted((roles["query"], roles["key"]), key=lambda path: maps[path].outputs)
        yield fewer, more, True
    rest = [path for path in maps if "." not in path and path not in roles.values()]
    in_a_row = all(path.isdecimal() for path in rest)
    for one, other in pairwise(rest) if in_a_row else combinations(rest, 2):
        if maps[one].outputs == maps[other].inputs:
            yield one, other, False


def any_pairs(maps: Maps) -> Iterator[Pair]:
    """Any two of a few maps, neighbours of many."""
    for one, other in pairwise(maps) if len(maps) > MAX_MAPS else permutations(maps, 2):
        yield from ((one, other, by_rows) for by_rows in (False, True))


def candidate(one: Map, other: Map, by_rows: bool) -> Mixing | None:
    """With blocks of one unit; None where the shapes do not meet or a tensor is shared."""
    units = other.outputs if by_rows else other.inputs
    fits = units % one.outputs == 0 and units // one.outputs <= MAX_SHARED and one.turned == other.turned
    if one.weight == other.weight or not fits or (by_rows and one.inputs != other.inputs):
        return None
    return like(Mixing("", "", by_rows=by_rows, turned=one.turned), one, other)


def like(pair: Mixing, one: Map, other: Map) -> Mixing:
    """The same for other maps."""
    last = other.bias if pair.by_rows else None
    return replace(pair, producer=one.weight, consumer=other.weight, bias=one.bias, consumer_bias=last)


class Calls:
    """The calls of one run: maps, their input tensors, their order, and the modules that made the inputs."""

    def __init__(self, maps: Maps) -> None:
        self.order: list[str] = []
        """The paths of the maps that were called."""
        self.readers: dict[str, list[str]] = {}
        """For each module whose output went into maps, their paths."""
        self.attentions: dict[str, str] = {}
        """For each nn.MultiheadAttention whose queries, keys and values are of one tensor, what made it."""
        self._maps = maps
        self._places: dict[str, list[tuple[int, int]]] = {}  # weight -> when it was called, since when its
        self._since: dict[tuple[int, int], int] = {}  # input had been there
        self._sources: dict[int, str] = {}
        self._alive: list[Tensor] = []  # so that no address is used twice

    def may_read(self, reader: str, source: str) -> bool:
        """Whether a call of one weight has an input that came after the first call of the other."""
        if reader not in self._places or source not in self._places:
            return True  # used without its module: unknown
        first = self._places[source][0][0]
        return any(since > first for _, since in self._places[reader])

    def links(self) -> Iterator[tuple[str, str]]:
        """The maps that read a map."""
        for source, readers in self.readers.items():
            if source in self._maps:
                yield from ((source, reader) for reader in readers if reader != source)

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """While this is open, calls of the model are recorded."""
        with ExitStack() as hooks:
            hooks.callback(self._alive.clear)
            for path, module in model.named_modules():
                leaf = path in self._maps or not list(module.children())
                if leaf or isinstance(module, nn.MultiheadAttention):
                    hooks.enter_context(module.register_forward_hook(self._hook(path, module)))
            yield

    def _hook(self, path: str, module: nn.Module) -> Callable[..., None]:
        silent = next(module.parameters(), None) is None

        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            x = inputs[0] if inputs else None
            if isinstance(module, nn.MultiheadAttention) and all(one is x for one in inputs[1:3]):
                if (made := self._sources.get(x.untyped_storage().data_ptr())) is not None:  # type: ignore[union-attr]
                    self.attentions[path] = made
                return
            if not isinstance(x, Tensor) or not isinstance(output, Tensor):
                return
            self._alive += [x, output]
            read, place = x.untyped_storage().data_ptr(), output.untyped_storage().data_ptr()
            source = self._sources.get(read)
            if path in self._maps:
                self.order.append(path)
                now = len(self.order)
                since = self._since.setdefault((x.data_ptr(), x._version), now)
                self._places.setdefault(self._maps[path].weight, []).append((now, since))
                if source is not None:
                    self.readers.setdefault(source, []).append(path)
            if not silent:
                self._sources[place] = path
            elif source is not None:
                self._sources[place] = source

        return hook


def fused_maps(model: nn.Module) -> Iterator[str]:
    """Queries, keys and values in one matrix, by their paths."""
    for path, module in model.named_modules():
        names = [*dict(module.named_children()), *dict(module.named_parameters(recurse=False))]
        yield from (f"{path}.{name}".lstrip(".") for name in names if name in FUSED)
