"""GGUF files: reading what gguf's own writer wrote, and refusing what is damaged or hostile."""

import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from topograd.convert import gguf_file
from topograd.convert.gguf_config import config_dict
from topograd.convert.gguf_file import KINDS, GGUFFile, write_gguf
from topograd.convert.gguf_tokenizer import tokenizer_json
from topograd.errors import CheckpointError, ConfigError

METADATA: dict[str, Any] = {"general.architecture": "llama", "llama.block_count": 2, "llama.epsilon": 1e-5}


def _bytes_of(kind: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Content of a tensor: real quantised numbers where gguf can quantise, else any bytes."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape).astype(np.float32)
    number = GGMLQuantizationType[kind]
    try:
        return gguf.quants.quantize(values, number)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[number]
        return random.integers(0, 256, (*shape[:-1], shape[-1] // block * size), dtype=np.uint8)


def _write(path: Path, kinds: tuple[str, ...] = KINDS, **metadata: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("text", "é\n")
    writer.add_array("words", ["a", "", "ü"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_float32("float", 0.5)
    writer.add_bool("true", True)
    for key, value in metadata.items():
        writer.add_uint32(key, value)
    for index, kind in enumerate(kinds):
        content = _bytes_of(kind, (3, 512), seed=index)
        writer.add_tensor(f"{kind}.weight", content, raw_dtype=GGMLQuantizationType[kind])
    writer.add_tensor("vector", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("gguf") / "all.gguf")


@pytest.mark.parametrize("kind", KINDS)
def test_dequantises_as_gguf_does(kind: str, written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "_CHUNK_ELEMENTS", 600)  # several parts, the last one smaller
    file = GGUFFile(written)
    found = next(t for t in gguf.GGUFReader(written).tensors if t.name == f"{kind}.weight")
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(found.data, found.tensor_type).reshape(3, 512)
    entry, tensor = file.tensors[f"{kind}.weight"], file.tensor(f"{kind}.weight")
    assert (entry.shape, entry.kind) == ((3, 512), kind)
    assert tensor.dtype == torch.float32
    np.testing.assert_array_equal(tensor.numpy(), wanted)


def test_metadata_and_views(written: Path) -> None:
    before = written.read_bytes()
    file = GGUFFile(written)
    wanted = {"general.architecture": "llama", "text": "é\n", "words": ["a", "", "ü"], "float": 0.5}
    assert {key: file.metadata[key] for key in wanted} == wanted
    assert file.metadata["true"] is True
    assert file.metadata["numbers"].tolist() == [1, -2, 3]
    vector = file.tensor("vector")
    vector += 1
    assert vector.tolist() == [1, 2, 3, 4, 5]
    assert written.read_bytes() == before, "a tensor is this process's own"
    with pytest.raises(CheckpointError, match="no tensor 'other'"):
        file.tensor("other")


@pytest.mark.parametrize("kind", gguf_file.WRITTEN_KINDS)
def test_what_is_written_is_read_by_gguf_and_by_us(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {"a.weight": torch.randn(4, 64), "b.weight": torch.randn(3, 5), "norm": torch.randn(64)}
    more = {"flag": False, "below": -3, "large": 2**40, "words": ["x", "y"], "ints": [1, 2], "floats": [0.5]}
    more |= {"array": np.array([1, 2], dtype=np.uint8), "general.alignment": 64}
    path = tmp_path / "out.gguf"
    write_gguf(path, METADATA | more, tensors, kind)
    file = GGUFFile(path)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, tensor in tensors.items():
        found = file.tensor(name)
        wanted = gguf.quants.dequantize(theirs[name].data, theirs[name].tensor_type).reshape(tensor.shape)
        np.testing.assert_array_equal(found.numpy(), wanted)
        # half a step of a block of 32 normal numbers, or for Q4_0, whose codes end at 7, a whole one
        near = {"F32": 0.0, "Q4_1": 0.2, "Q4_0": 0.5}.get(file.tensors[name].kind, 0.03)
        torch.testing.assert_close(found, tensor, rtol=1e-3 if near else 0, atol=near)
    odd = "F16" if kind.startswith("Q") else kind  # its rows of 5 are no blocks of 32
    assert [entry.kind for entry in file.tensors.values()] == [kind, odd, "F32"]
    for key, value in (METADATA | more).items():
        if key != "general.alignment":  # the writer's own affair
            np.testing.assert_array_equal(
                file.metadata[key], np.float32(value) if key.endswith("epsilon") else value
            )
    assert type(file.metadata["flag"]) is bool
    assert file.metadata["array"].dtype == np.uint8
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.gguf"]
    with pytest.raises(ConfigError, match="cannot be written as 'Q2_K'"):
        write_gguf(path, METADATA, tensors, "Q2_K")


@contextmanager
def _memory_below(limit: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < limit


def _string(text: str | bytes) -> bytes:
    content = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(content)) + content


def _file(entries: tuple[bytes, ...] = (), infos: tuple[bytes, ...] = (), **head: Any) -> bytes:
    counts = head.get("tensors", len(infos)), head.get("count", len(entries))
    begin = head.get("magic", b"GGUF") + struct.pack("<IQQ", head.get("version", 3), *counts)
    content = begin + b"".join(entries) + b"".join(infos)
    return content + bytes(-len(content) % 32 + 256)


def _info(name: str = "t", sizes: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return _string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


GIANT = 2**63 + 5
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "magic": (_file(magic=b"GGML"), 'does not begin with "GGUF"'),
    "version": (_file(version=1), "has version 1, not 2 or 3"),
    "big-endian": (_file(version=0x03000000), "big-endian"),
    "many tensors": (_file(tensors=GIANT), "tensors of"),
    "many entries": (_file(count=GIANT), "entries of"),
    "more tensors than there are": (_file(tensors=999), "is cut or damaged"),
    "long key": (_file((struct.pack("<Q", GIANT) + b"key",)), "is cut or damaged: the key of entry 0"),
    "long string": (_file((_string("k") + struct.pack("<IQ", 8, GIANT),)), "needs 9223372036854775813 bytes"),
    "long array": (_file((_string("k") + struct.pack("<IIQ", 9, 4, 2**61),)), "is cut or damaged: 'k'"),
    "long array of strings": (_file((_string("k") + struct.pack("<IIQ", 9, 8, 2**60),)), "is cut or damaged"),
    "array of arrays": (_file((_string("k") + struct.pack("<IIQIQ", 9, 9, 1, 4, 0),)), "an array of type 9"),
    "type": (_file((_string("k") + struct.pack("<II", 13, 1),)), "unknown type 13"),
    "truth": (_file((_string("k") + struct.pack("<IB", 7, 2),)), "neither 0 nor 1"),
    "not UTF-8": (_file((_string("k") + struct.pack("<I", 8) + _string(b"\xff"),)), "not UTF-8"),
    "name not UTF-8": (_file((_string(b"\xff") + struct.pack("<IB", 7, 1),)), "not UTF-8"),
    "entry twice": (_file((_string("k") + struct.pack("<II", 4, 1),) * 2), "the entry 'k' twice"),
    "alignment": (_file((_string("general.alignment") + struct.pack("<II", 4, 24),)), "alignment 24"),
    "no alignment": (_file((_string("general.alignment") + struct.pack("<II", 4, 0),)), "alignment 0"),
    "odd alignment": (
        _file((_string("general.alignment") + struct.pack("<I", 8) + _string("\n"),)),
        "alignment",
    ),
    "tensor twice": (
        _file(
            infos=(
                _info(),
                _info(offset=32),
            )
        ),
        "tensor 't' twice",
    ),
    "dimensions": (_file(infos=(_info(sizes=(1,) * 5),)), "5 dimensions of 4"),
    "size 0": (_file(infos=(_info(sizes=(0, 4)),)), "a size of 0"),
    "giant sizes": (_file(infos=(_info(sizes=(2**62, 2**62, 2**62, 4)),)), "ends at byte"),
    "sizes that wrap around": (_file(infos=(_info(sizes=(2**32, 2**32)),)), "ends at byte"),
    "offset beyond": (_file(infos=(_info(offset=2**40),)), "ends at byte"),
    "giant offset": (_file(infos=(_info(offset=2**64 - 32),)), "ends at byte"),
    "odd offset": (_file(infos=(_info(offset=4),)), "no multiple of the alignment 32"),
    "kind": (_file(infos=(_info(kind=99),)), "of kind 99"),
    "kind that is not read": (_file(infos=(_info(sizes=(256,), kind=16),)), "of kind IQ2_XXS"),
    "rows": (_file(infos=(_info(sizes=(33,), kind=8),)), "rows of 33, no multiple of 32"),
    "overlap": (
        _file(
            infos=(
                _info(sizes=(16,)),
                _info("u", offset=32),
            )
        ),
        "on the bytes of another",
    ),
    "a kind with fewer bytes": (
        _file(infos=(_info(sizes=(32,), kind=1), _info("u", offset=128))),
        "tensor 'u' at byte",
    ),
    "hostile name": (_file(infos=(_info("\n\x1b[2J" * 100, offset=4),)), "no multiple"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_damaged_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    content, message = HOSTILE[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught, _memory_below(2**20):
        GGUFFile(path)
    assert len(str(caught.value)) < 500 + len(str(path))
    assert str(caught.value).isprintable()


def test_the_header_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "big.gguf"
    path.write_bytes(_file((_string("k") + struct.pack("<IIQ", 9, 0, 5000) + bytes(5000),)))
    GGUFFile(path)
    monkeypatch.setattr(gguf_file, "_MAX_HEADER_BYTES", 4096)
    with pytest.raises(CheckpointError, match="a header of more than 4096 bytes"):
        GGUFFile(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.gguf", tmp_path):
        with pytest.raises(CheckpointError, match="cannot be read"):
            GGUFFile(path)


NUMBERS = st.sampled_from([0, 1, 7, 2**31, 2**32 - 1, 2**32, 2**40, 2**61, 2**63 - 1, 2**63, 2**64 - 1])


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_flips_cuts_and_giant_numbers_never_crash(data: st.DataObject, written: Path) -> None:
    content = bytearray(written.read_bytes())
    header = 1500  # where the header ends, about; behind it are values, which may be anything
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header))
        how = data.draw(st.sampled_from(["flip", "cut", "number", "insert"]))
        if how == "flip" and at < len(content):
            content[at] ^= data.draw(st.integers(1, 255))
        elif how == "cut":
            del content[data.draw(st.integers(0, len(content))) :]
        elif how == "number":
            content[at : at + 8] = struct.pack("<Q", data.draw(NUMBERS))
        else:
            content[at:at] = data.draw(st.binary(max_size=9))
    path = written.with_name("fuzzed.gguf")
    path.unlink(missing_ok=True)  # a new file: the last one is mapped still
    path.write_bytes(content)
    with _memory_below(2**22 + 20 * len(content)):
        lines = _refusals(path)
    assert all(line.isprintable() and len(line) < 600 + len(str(path)) for line in lines)


def _refusals(path: Path) -> list[str]:
    """The lines by which a file, or what is read of its metadata, is refused."""
    lines = []
    try:
        file = GGUFFile(path)
        for name in file.tensors:
            file.tensor(name)
    except CheckpointError as error:
        return [str(error)]
    for read in (config_dict, lambda file: tokenizer_json(file.metadata)):
        try:
            read(file)
        except CheckpointError as error:
            lines.append(str(error))
    return lines
