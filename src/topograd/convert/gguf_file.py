"""GGUF files, llama.cpp's format of a model in one file: read with every number checked, and written.

    magic "GGUF", version u32, number of tensors u64, number of metadata entries u64
    entries:  key, type u32, value          a string is its length u64 and its bytes;
                                            an array is its type u32, its length u64 and its items
    tensors:  name, dimensions u32, sizes u64 (the fastest first), kind u32, offset u64
    padding to the alignment (`general.alignment`, 32 unless given), then the tensors at their offsets

The file is mapped, not read. Nothing is allocated for a number that it states before the number was held
against the bytes that are there: opening takes memory in proportion to the header, which may have 64 MiB at
most, and `tensor` in proportion to the tensor's bytes. Tensors must not overlap, so all of them together
take at most 13 times the file (Q2_K as float32). A file that is cut while it is mapped is not covered.

Dequantising is that of the `gguf` package, some rows at a time; F32 tensors are views of the map.
"""

import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topograd.errors import CheckpointError, ConfigError
from topograd.files import replacing

KINDS = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
)  # fmt: skip
"""The kinds of tensor that are read."""
WRITTEN_KINDS = ("F32", "F16", "Q8_0", "Q4_1", "Q4_0")
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 2**26
_MAX_ENTRIES = 2**16
_MAX_TENSORS = 2**17
_MAX_DIMENSIONS = 4
_CHUNK_ELEMENTS = 2**17  # what is in work then stays in the cache
_SCALARS = {  # GGUF's number of a type: its letter for `struct`, which is numpy's too
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: rows first, as torch writes a shape."""

    shape: tuple[int, ...]
    kind: str
    offset: int
    nbytes: int


class GGUFFile:
    """An open GGUF file.

    `metadata` holds numbers, strings, lists of strings and numpy arrays; `tensors` what there is to read.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._gguf = _gguf()
        self._map = _map(self.path)
        header = _Header(self._map, self.path)
        tensors = header.begin()
        self.metadata = dict(header.entries())
        infos = [header.tensor_info() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 2**20 or alignment & (alignment - 1):
            problem = f"has the alignment {_short(alignment)}, not a power of two from 8 to {2**20}"
            raise _refused(self.path, problem)
        self.tensors = _placed(infos, header, alignment, self._gguf)

    def tensor(self, name: str) -> Tensor:
        """A tensor as float32. One that the file holds as F32 is a view of the file, never written back."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {_short(name)}")
        entry = self.tensors[name]
        raw = np.frombuffer(self._map, dtype=np.uint8, count=entry.nbytes, offset=entry.offset)
        if entry.kind == "F32":
            return torch.from_numpy(raw.view("<f4")).view(entry.shape)
        kind = self._gguf.GGMLQuantizationType[entry.kind]
        block, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
        result = np.empty(math.prod(entry.shape), dtype=np.float32)
        step = _CHUNK_ELEMENTS // block * block
        with np.errstate(all="ignore"):  # damaged scales give infinities, which show when the model runs
            for start in range(0, len(result), step):
                end = min(start + step, len(result))
                part = raw[start // block * block_bytes : end // block * block_bytes]
                result[start:end] = self._gguf.quants.dequantize(part, kind)
        return torch.from_numpy(result).view(entry.shape)


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], kind: str = "F32"
) -> None:
    """Write a GGUF file, whole or not at all: matrices as `kind`, vectors as F32.

    A matrix whose rows do not fit a quantised kind's blocks of 32 is written as F16. Whole numbers become
    u32 (or i32, u64, i64 where they must), other numbers f32, lists of whole numbers i32 and of others f32;
    numpy values and arrays keep their type. `metadata` must name `general.architecture`.
    """
    if kind not in WRITTEN_KINDS:
        problem = f"GGUF tensors cannot be written as {kind!r}"
        raise ConfigError(problem, remedy=f"give {', '.join(WRITTEN_KINDS)}")
    gguf = _gguf()
    kinds = {}
    for name, tensor in tensors.items():
        whole = tensor.dim() < 2 or not kind.startswith("Q") or not tensor.shape[-1] % 32
        written = "F32" if tensor.dim() < 2 else kind if whole else "F16"
        kinds[name] = gguf.GGMLQuantizationType[written]
    with replacing(path) as temporary:
        writer = gguf.GGUFWriter(temporary, metadata["general.architecture"])
        for key, value in metadata.items():
            if key not in ("general.architecture", "general.alignment"):  # the writer's own affair
                writer.add_key_value(key, *_typed(value, gguf.GGUFValueType))
        for name, tensor in tensors.items():
            block, block_bytes = gguf.GGML_QUANT_SIZES[kinds[name]]
            nbytes, shape = tensor.numel() // block * block_bytes, tuple(tensor.shape)
            writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, raw_dtype=kinds[name])
        with closing(writer):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, tensor in tensors.items():
                values = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
                writer.write_tensor_data(gguf.quants.quantize(values, kinds[name]))


class _Header:
    """Reads a file's header from front to back, never beyond what is there."""

    def __init__(self, content: mmap.mmap, path: Path) -> None:
        self.path, self.position, self.size = path, 0, len(content)
        self._content = content
        self._end = min(self.size, _MAX_HEADER_BYTES)

    def begin(self) -> int:
        """Read up to the entries; the number of tensors."""
        if self._take(4, "its first bytes") != _MAGIC:
            raise _refused(self.path, 'does not begin with "GGUF"')
        version = self._number("I", "its version")
        if version not in _VERSIONS:
            hint = " (big-endian files are not read)" if version and not version & 0xFFFF else ""
            raise _refused(self.path, f"has version {version}, not 2 or 3{hint}")
        tensors, self._entries = self._number("Q", "its counts"), self._number("Q", "its counts")
        for count, most, what in (
            (tensors, _MAX_TENSORS, "tensors"),
            (self._entries, _MAX_ENTRIES, "entries"),
        ):
            if count > most:
                raise _refused(self.path, f"states {count} {what} of {most} that are allowed")
        return int(tensors)

    def entries(self) -> Iterator[tuple[str, Any]]:
        seen = set()
        for number in range(self._entries):
            key = self._string(f"the key of entry {number}")
            if key in seen:
                raise _refused(self.path, f"has the entry {_short(key)} twice")
            seen.add(key)
            yield key, self._value(_short(key))

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, shape with rows first, GGUF's number of the kind, offset behind the header)."""
        name = self._string("the name of a tensor")
        what = f"tensor {_short(name)}"
        dimensions = self._number("I", what)
        if dimensions > _MAX_DIMENSIONS:
            raise _refused(self.path, f"has {what} with {dimensions} dimensions of {_MAX_DIMENSIONS} at most")
        sizes = [self._number("Q", what) for _ in range(dimensions)]
        if 0 in sizes:
            raise _refused(self.path, f"has {what} with a size of 0")
        return name, tuple(reversed(sizes)), self._number("I", what), self._number("Q", what)

    def _value(self, what: str) -> Any:
        kind = self._number("I", what)
        if kind == _STRING:
            return self._string(what)
        if kind in _SCALARS:
            return self._scalars(_SCALARS[kind], 1, what)[0].item()
        if kind != _ARRAY:
            raise _refused(self.path, f"has {what} with the unknown type {kind}")
        items, length = self._number("I", what), self._number("Q", what)
        if items in _SCALARS:
            return self._scalars(_SCALARS[items], length, what)
        if items != _STRING:
            raise _refused(
                self.path, f"has {what}, an array of type {items}; only strings and numbers are read"
            )
        if length > (self._end - self.position) // 8:
            raise self._beyond(what, 8 * length)
        return [self._string(what) for _ in range(length)]

    def _scalars(self, letter: str, length: int, what: str) -> np.ndarray:
        dtype = np.dtype(letter).newbyteorder("<")
        raw = np.frombuffer(self._take(length * dtype.itemsize, what), dtype=np.uint8)
        if letter == "?" and (raw > 1).any():
            raise _refused(self.path, f"has {what} with a truth value that is neither 0 nor 1")
        return raw.view(dtype)

    def _string(self, what: str) -> str:
        try:
            return self._take(self._number("Q", what), what).decode()
        except UnicodeDecodeError:
            raise _refused(self.path, f"has {what}, which is not UTF-8") from None

    def _number(self, letter: str, what: str) -> Any:
        layout = "<" + letter
        return struct.unpack(layout, self._take(struct.calcsize(layout), what))[0]

    def _take(self, length: int, what: str) -> bytes:
        if length > self._end - self.position:
            raise self._beyond(what, length)
        self.position += length
        return self._content[self.position - length : self.position]

    def _beyond(self, what: str, length: int) -> CheckpointError:
        if self._end < self.size:
            reason = f"has a header of more than {_MAX_HEADER_BYTES} bytes"
        else:
            reason = f"is cut or damaged: {what} at byte {self.position} needs {length} bytes"
            reason += f", and {self._end - self.position} are left"
        return _refused(self.path, reason)


def _placed(
    infos: list[tuple[str, tuple[int, ...], int, int]], header: _Header, alignment: int, gguf: ModuleType
) -> dict[str, TensorEntry]:
    """Where each tensor lies in the file, once they fit into it one beside the other."""
    path, begin = header.path, -(-header.position // alignment) * alignment
    numbers = {gguf.GGMLQuantizationType[kind].value: kind for kind in KINDS}
    found: dict[str, TensorEntry] = {}
    for name, shape, number, offset in infos:
        what = f"tensor {_short(name)}"
        if name in found:
            raise _refused(path, f"has {what} twice")
        if number not in numbers:
            kind = next((k.name for k in gguf.GGMLQuantizationType if k.value == number), number)
            raise _refused(path, f"has {what} of kind {kind}; read are {', '.join(KINDS)}")
        kind = numbers[number]
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        if (shape[-1] if shape else 1) % block:
            raise _refused(
                path, f"has {what} of kind {kind} with rows of {shape[-1]}, no multiple of {block}"
            )
        nbytes = math.prod(shape) // block * block_bytes
        if offset % alignment:
            raise _refused(path, f"has {what} at offset {offset}, no multiple of the alignment {alignment}")
        if begin + offset + nbytes > header.size:
            end = begin + offset + nbytes
            raise _refused(path, f"is cut or damaged: {what} ends at byte {end} of {header.size}")
        found[name] = TensorEntry(shape, kind, begin + offset, nbytes)
    end = 0
    for name, entry in sorted(found.items(), key=lambda item: item[1].offset):
        if entry.offset < end:
            raise _refused(path, f"has tensor {_short(name)} on the bytes of another one")
        if entry.offset > (
            expected := max(begin, -(-end // alignment) * alignment)
        ):  # a changed kind or shape
            raise _refused(
                path, f"has tensor {_short(name)} at byte {entry.offset}, and {expected} is expected"
            )
        end = entry.offset + entry.nbytes
    return found


def _map(path: Path) -> mmap.mmap:
    """The file's bytes; written pages are this process's own, so that torch may have them as its memory."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise _refused(path, "is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as problem:
        reason = problem.strerror or "it cannot be mapped"
        raise CheckpointError(f"{path} cannot be read ({reason})", remedy="give a GGUF file") from None


def _typed(value: Any, types: Any) -> tuple[Any, Any, Any]:
    """What `GGUFWriter.add_key_value` takes: the value, its type, and the type of its items."""
    if isinstance(value, np.ndarray):
        return value.tolist(), types.ARRAY, _scalar_type(value.dtype, types)
    if isinstance(value, np.generic):
        return value.item(), _scalar_type(value.dtype, types), None
    if isinstance(value, bool):
        return value, types.BOOL, None
    if isinstance(value, int):
        kinds = ((types.UINT32, 0, 2**32), (types.INT32, -(2**31), 0), (types.INT64, -(2**63), 2**63))
        return value, next((kind for kind, low, high in kinds if low <= value < high), types.UINT64), None
    if isinstance(value, float):
        return value, types.FLOAT32, None
    if isinstance(value, str):
        return value, types.STRING, None
    first = value[0]
    names = {bool: types.BOOL, int: types.INT32, float: types.FLOAT32, str: types.STRING}
    return list(value), types.ARRAY, names[type(first)]


def _scalar_type(dtype: np.dtype, types: Any) -> Any:
    return types(next(number for number, letter in _SCALARS.items() if np.dtype(letter) == dtype))


def _gguf() -> ModuleType:
    try:
        import gguf
    except ImportError:
        raise ConfigError("GGUF files need the package gguf: pip install 'topograd[models]'") from None
    return gguf


def _short(name: object) -> str:
    """A name from the file as it may stand in a message: on one line, and not long."""
    shown = ascii(name)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _refused(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} {reason}", remedy="give a whole GGUF file")
