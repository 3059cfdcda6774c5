"""Packed weights that are kept: written once for a model and a precision, then mapped.

    CACHE/packed/KEY/weights      what `NativeRuntime` packs, embeddings and rotations, concatenated
    CACHE/packed/KEY/about.json   where each part lies, the SHA-256 of the weights, and one of all this

KEY is a digest of the model's weights and settings, the precision, and the layout: FORMAT, the kernels'
formats and structures. Panels are the same for every instruction set. A file counts if its digest is the
recorded one (`data/digest_cache.py`: hashed once, then its times are looked at); any other is made anew.
MAX_KEPT of MAX_BYTES together are retained, those used last; one that a process has mapped stays.

The mapping is private and read-only, so the pages are those of the page cache: memory once, for all processes
together. They are large where the file system has large folios (ext4 since Linux 6.16); a copy into anonymous
large pages was no faster then, and took twice the memory.

A runtime of kept weights reads no stack. What it does not know (relays, heads of low rank, positions beyond
REACH, some rows of a head) asks for `stack`, which is opened then. Not kept are models whose stages pass on
something else than their hidden states, whose heads have low rank, or whose layers are recurrent.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from topograd.data.cache import InUse, default_cache, prune_entries
from topograd.data.digest_cache import remembered_sha256
from topograd.errors import DataError, RunError
from topograd.files import dump_json, read_json, replacing, write_atomic
from topograd.runtime.native import library
from topograd.runtime.native.library import FORMATS, Layer, Matrix, Norm, default_threads
from topograd.runtime.native.packing import ALIGNED, BEHIND
from topograd.runtime.native.runtime import Head, NativeRuntime
from topograd.runtime.quantize import Precision, Quantized
from topograd.topology.plan import Plan, PlannedStage

if TYPE_CHECKING:
    from topograd.nn.stack import Stack
    from topograd.nn.transformer.stack import Transformer

FORMAT = 1
MAX_KEPT = 16
MAX_BYTES = 2**35
REACH = 8192
"""Positions whose rotations are kept."""
WEIGHTS, ABOUT = "weights", "about.json"
CHUNK = 1 << 26
S = TypeVar("S", bound=ctypes.Structure)
Table = dict[str, Any]


def place_of(content: object, precision: Precision) -> Path | None:
    """Where packed weights of this content are kept; None where there is no cache."""
    layout = [FORMAT, FORMATS, [[name for name, *_ in each._fields_] for each in (Matrix, Norm, Layer)]]
    key = hashlib.sha256(dump_json([layout, precision, content]).encode()).hexdigest()[:24]
    try:
        return default_cache() / "packed" / key
    except DataError:  # there is no home directory
        return None


def open_kept(place: Path, precision: Precision, stack: Callable[[], Stack]) -> KeptRuntime | None:
    """A runtime of what is kept at a place; None where that is nothing, or damaged."""
    if library.missing_reason() is not None or not (place / ABOUT).is_file():
        return None
    held = InUse(place)
    try:
        about = read_json(place / ABOUT)
        own = about.pop("digest")
        weights = place / WEIGHTS
        if own != _digest(about) or remembered_sha256(weights) != about["sha256"]:
            return None
        with weights.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    except (RunError, OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return KeptRuntime(about, mapped, held, precision, stack)


def keep(runtime: NativeRuntime, plan: Plan, place: Path) -> None:
    """Pack all of a model and keep it, where that can be; a full or read-only disk keeps nothing."""
    heads = {planned.head for planned in plan.stages if planned.predicts}
    plain = all(port.relay == "identity" for planned in plan.stages for port, _ in planned.inputs)
    plain = plain and all(len(runtime.shapes(planned)) == len(planned.layers) for planned in plan.stages)
    if not plain or any(runtime.stack.head.low_rank(head) is not None for head in heads):
        return
    parts = _Parts()
    about = _described(runtime, sorted(heads), parts)
    with contextlib.suppress(OSError):
        held = InUse(place)
        about["sha256"] = _write(parts, place / WEIGHTS)
        write_atomic(place / ABOUT, json.dumps(about | {"digest": _digest(about)}))
        prune_entries(place.parent, MAX_KEPT, MAX_BYTES)
        del held


def _digest(about: Table) -> str:
    return hashlib.sha256(dump_json(about).encode()).hexdigest()


def _described(runtime: NativeRuntime, heads: list[int], parts: _Parts) -> Table:
    """All that a runtime has packed: numbers as they are, and where in `parts` everything else lies."""
    stack, traits = runtime.stack, runtime.stack.config.traits
    at = parts.at
    layers = [runtime.layer(index) for index in range(len(stack.layers))]
    read_by = {head: head if stack.has_head(head) else -1 for head in heads}
    packed = {which: runtime.head(which) for which in sorted(set(read_by.values()))}
    blocks = [runtime.memory, *(head.memory for head in packed.values())]
    for array in [*(block.filled() for block in blocks if block is not None), *runtime.kept]:
        parts.add(array)
    turns = {} if traits.learned_positions else runtime.rotations(min(stack.context, REACH))
    made = {name: each for name, each in runtime.made.items() if name.startswith("head")}
    return {
        "layers": [_table(layer, at) for layer in layers],
        "heads": {str(w): [_table(head.matrix, at), _table(head.norm, at)] for w, head in packed.items()},
        "read_by": {str(head): which for head, which in read_by.items()},
        "tables": [parts.array(each) for each in runtime.tables],
        "turns": {name: parts.array(each) for name, each in turns.items()},
        "made": {
            name: [each.bits, *map(parts.array, (each.codes, each.scales, each.offsets))]
            for name, each in made.items()
        },
        "settings": {name: getattr(runtime, name) for name in SETTINGS},
    }


SETTINGS = ("normed", "learned", "scale", "known_positions", "softcap")
"""Of a runtime, what the kept file has as numbers."""


class _Parts:
    """Arrays that are concatenated in the file, each at a multiple of ALIGNED."""

    def __init__(self) -> None:
        self.arrays: list[NDArray[Any]] = []
        self.size = 0
        self._starts: list[tuple[int, int, int]] = []
        """Addresses in memory, in order: start, stop, and the place in the file."""

    def add(self, array: NDArray[Any]) -> int:
        """Its place in the file."""
        array = np.ascontiguousarray(array)
        place, start = self.size, array.ctypes.data
        self.arrays.append(array)
        self.size += -(-array.nbytes // ALIGNED) * ALIGNED
        self._starts.append((start, start + array.nbytes, place))
        self._starts.sort()
        return place

    def at(self, address: int) -> int:
        """The place in the file of an address."""
        start, stop, place = self._starts[bisect_right(self._starts, (address, 2**63, 0)) - 1]
        assert start <= address < stop, "an address that is not kept"
        return place + address - start

    def array(self, array: NDArray[Any] | None) -> list[Any] | None:
        """Place, type and shape."""
        return None if array is None else [self.add(array), array.dtype.str, list(array.shape)]


def _write(parts: _Parts, file: Path) -> str:
    """Write a file whole or not at all, and return its SHA-256. Large writes get large pages."""
    digest = hashlib.sha256()
    with replacing(file) as temporary, temporary.open("xb", buffering=0) as opened:
        for piece in _pieces(parts):
            digest.update(piece)
            while piece:
                piece = piece[opened.write(piece) :]
    return digest.hexdigest()


def _pieces(parts: _Parts) -> Iterable[memoryview]:
    for array in parts.arrays:
        flat = array.reshape(-1).view(np.uint8).data
        yield from (flat[start : start + CHUNK] for start in range(0, len(flat), CHUNK))
        yield memoryview(bytes(-array.nbytes % ALIGNED))
    yield memoryview(bytes(BEHIND))


def _table(structure: ctypes.Structure, at: Callable[[int], int]) -> Table:
    """The fields of a structure, and of those in it, an address as the place in the file."""
    found: Table = {}
    for name, kind in ((field[0], field[1]) for field in structure._fields_):
        value = getattr(structure, name)
        if isinstance(value, ctypes.Structure):
            found[name] = _table(value, at)
        else:
            found[name] = at(value) if kind is ctypes.c_void_p and value is not None else value
    return found


def _structure(kind: type[S], table: Table, base: int) -> S:
    """The structure of a table, whose file lies at an address."""
    made = kind()
    fields: list[tuple[str, Any]] = [(field[0], field[1]) for field in kind._fields_]
    for name, each in fields:
        value = table[name]
        if isinstance(value, dict):
            value = _structure(each, value, base)
        elif each is ctypes.c_void_p and value is not None:
            value += base
        setattr(made, name, value)
    return made


class KeptRuntime(NativeRuntime):
    """A runtime of mapped weights."""

    ready, relays = True, False

    def __init__(
        self,
        about: Table,
        mapped: mmap.mmap,
        held: InUse,
        precision: Precision,
        stack: Callable[[], Stack],
    ) -> None:
        self._bytes, self._held, self._read_stack = np.frombuffer(mapped, np.uint8), held, stack
        self.precision, self.threads = precision, default_threads()
        base = int(self._bytes.ctypes.data)
        for name, value in about["settings"].items():
            setattr(self, name, value)
        self.tables = [self._array(each) for each in about["tables"]]
        self.made = {name: self._quantized(*each) for name, each in about["made"].items()}
        made = partial(_structure, base=base)
        self._layers = {index: made(Layer, table) for index, table in enumerate(about["layers"])}
        self._heads = {
            int(which): Head(made(Matrix, matrix), made(Norm, norm), None, self.softcap, self.threads)
            for which, (matrix, norm) in about["heads"].items()
        }
        self._read = {int(head): (which, None) for head, which in about["read_by"].items()}
        self._kept_turns = {name: self._array(each) for name, each in about["turns"].items()}
        self.start()

    def _array(self, part: list[Any]) -> NDArray[Any]:
        place, kind, shape = part
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        return self._bytes[place : place + size].view(kind).reshape(shape)

    def _quantized(self, bits: int, codes: Any, scales: Any, offsets: Any) -> Quantized:
        each = (self._array(codes), self._array(scales), None if offsets is None else self._array(offsets))
        return Quantized(bits, *each)

    @cached_property
    def stack(self) -> Transformer:  # type: ignore[override]
        """The model, opened when something asks for it."""
        return self._read_stack()  # type: ignore[return-value]

    def shapes(self, planned: PlannedStage) -> dict[int, tuple[int, int]]:
        return {i: (self._layers[i].kv_heads, self._layers[i].head_width) for i in planned.layers}

    def rotations(self, reach: int) -> dict[str, NDArray[np.float32]]:
        if all(len(table) >= reach for table in self._kept_turns.values()):
            return self._kept_turns
        return super().rotations(reach)
