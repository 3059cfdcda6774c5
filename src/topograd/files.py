"""Atomic file operations: a file is the old one or the new one, even after a kill.

JSON here is Python's dialect: NaN and Infinity are written as such and read back, since a diverged run's
numbers are worth keeping. TOML is written by `dump_toml` and read by `read_toml`.

Windows differs in three places, all here: a folder cannot be synced, a file is synced by a handle that may
write, and locks are of the first byte, never shared. Tests run on Linux, with Windows imitated.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import stat
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from topograd.errors import ConfigError, RunError, TopogradError

MAX_BYTES = 2**30
"""What one file that is read whole may have."""
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk. Windows cannot sync a folder."""
    windows = sys.platform == "win32"
    if windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Add the file's name to an OSError from inside that has none, as that of a full disk."""
    try:
        yield
    except OSError as problem:
        if problem.filename is None and problem.errno is not None:
            problem.filename = str(path)
        raise


@contextlib.contextmanager
def saving_tensors(path: Path) -> Iterator[None]:
    """A full disk under safetensors is an OSError like any other."""
    from safetensors import SafetensorError  # here: help and flags are answered without it

    try:
        yield
    except SafetensorError as problem:
        raise OSError(errno.EIO, str(problem), str(path)) from None


class DamagedFileError(Exception):
    """What is wrong with a file that could be read; `reading_tensors` adds its name and a remedy."""


@contextlib.contextmanager
def reading_tensors(path: Path, error: type[TopogradError], remedy: str = "restore it") -> Iterator[None]:
    """A safetensors file that is missing, damaged or no regular file raises `error`."""
    from safetensors import SafetensorError

    try:
        if path.exists() and not path.is_file():  # of a pipe, opening would wait for a writer
            raise DamagedFileError("it is not a regular file")
        yield
    except (SafetensorError, OSError, DamagedFileError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"{path} cannot be read ({reason})", setting="path", given=path, remedy=remedy) from None


def lock_file(descriptor: int, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file until it is closed or the process ends; False if another process has it.

    Shared locks exclude exclusive ones only. Windows has none: there a file that is mapped or open cannot be
    removed anyway, so a shared lock does nothing.
    """
    if sys.platform == "win32":
        return shared or _lock_on_windows(descriptor, wait)
    import fcntl

    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, how if wait else how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_on_windows(descriptor: int, wait: bool) -> bool:
    import msvcrt

    os.lseek(descriptor, 0, os.SEEK_SET)
    while True:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
            return True
        except OSError:  # LK_LOCK gives up after ten seconds
            if not wait:
                return False


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold the folder of this lock file for this process; a second holder gets a RunError.

    The file remains; only the system's lock on it counts, and that ends with its process.
    """
    folder = path.parent
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as problem:
        message = f"cannot lock {folder} ({problem.strerror})"
        remedy = "pass a folder you can write"
        raise RunError(message, setting="folder", given=folder, remedy=remedy) from None
    try:
        if not lock_file(descriptor):
            message = f"{folder} is in use by another process"
            remedy = "wait for its end or pass another folder"
            raise RunError(message, setting="folder", given=folder, remedy=remedy)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file that the block writes, and that is `path` at its end; after an error there is none.

    A kill may leave the temporary file `.<name>.<random>.tmp` beside it, which nothing reads.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with naming(path):
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync(path.parent)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a file whole or not at all. Text is UTF-8."""
    with replacing(path) as temporary, open(temporary, "xb") as file:
        file.write(data.encode() if isinstance(data, str) else data)


def dump_json(value: Any, *, indent: int | None = None, error: type[TopogradError] = RunError) -> str:
    """The JSON text of a value; on one line unless `indent` is given."""
    try:
        return json.dumps(value, indent=indent)
    except (TypeError, ValueError, RecursionError) as problem:
        text = f"this value cannot be written as JSON: {problem}"
        raise error(text, setting="value", remedy="convert it to plain numbers") from None


def write_json(path: Path, value: Any) -> None:
    """Write a value as an indented JSON file, atomically."""
    write_atomic(path, dump_json(value, indent=2) + "\n")


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """The content of a regular file of at most `most` bytes; OSError for a device, a pipe or a larger one."""
    # Without blocking: a pipe that nothing writes to must not be waited for.
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if status.st_size > most:
            reason = f"it has {status.st_size} bytes, and at most {most} are read"
            raise OSError(errno.EFBIG, reason, str(path))
        return file.read(most)


def read_json(path: Path, error: type[TopogradError] = RunError) -> Any:
    """Read a JSON file. One that is missing or damaged raises `error`."""
    try:
        return json.loads(read_bytes(path))
    except OSError as problem:
        text, remedy = f"{path} cannot be read ({problem.strerror})", "restore it or make it again"
        raise error(text, setting="path", given=path, remedy=remedy) from None
    except (ValueError, RecursionError) as problem:
        text, remedy = f"{path} is damaged, it is not JSON ({problem})", "restore it or make it again"
        raise error(text, setting="path", given=path, remedy=remedy) from None


def read_toml(
    path: Path, error: type[TopogradError] = RunError, remedy: str = "restore it"
) -> dict[str, Any]:
    """The tables of a TOML file. One that is missing or damaged raises `error`."""
    try:
        return tomllib.loads(read_bytes(path).decode())
    except OSError as problem:
        text = f"{path} cannot be read ({problem.strerror})"
    except ValueError as problem:  # of TOML or of UTF-8
        text = f"{path} is damaged, it is not TOML ({problem})"
    raise error(text, setting="path", given=path, remedy=remedy)


def read_table(
    path: Path, form: str, version: int, keys: Collection[str], error: type[TopogradError], remedy: str
) -> dict[str, Any]:
    """A JSON file of ours: an object of this format and version that has these keys."""
    table = read_json(path, error)
    if not isinstance(table, dict) or table.get("format") != form or not set(keys) <= table.keys():
        raise error(f"{path} is damaged or foreign", setting="path", given=path, remedy=remedy)
    if table.get("version") != version:
        given = table.get("version")
        problem = f"{path} has version {given!r}"
        raise error(problem, setting="version", given=given, allowed=f"{version}", remedy=remedy)
    return table


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal. Reads in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def dump_toml(mapping: Mapping[str, Any]) -> str:
    """The TOML text of nested mappings of str, int, float, bool and lists.

    A key whose value is None is left out, because TOML has no null. A tuple is written as a list. A mapping
    in a list becomes an inline table.

    >>> print(dump_toml({"steps": 80, "data": {"path": None, "mix": [0.5, 1e-05]}}), end="")
    steps = 80
    <BLANKLINE>
    [data]
    mix = [0.5, 1e-05]
    """
    return "\n".join(_toml_lines(mapping, ())).lstrip("\n") + "\n"


def _toml_lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """The table's own values first, then each nested table under its header."""
    for key, value in table.items():
        if not isinstance(value, Mapping) and value is not None:
            yield f"{_toml_key(key)} = {_toml_value(value, key)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            header = (*path, _toml_key(key))
            yield from ("", f"[{'.'.join(header)}]")
            yield from _toml_lines(value, header)


def _toml_key(key: object) -> str:
    if not isinstance(key, str):
        raise ConfigError(setting="name", given=key, allowed="text, as the name of a setting")
    return key if _BARE_KEY.fullmatch(key) else _toml_value(key, key)


def _toml_value(value: object, key: str) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return int.__repr__(value)
        case float():
            return float.__repr__(value)  # the shortest text that reads back to the same bits
        case str() if value.isascii() or not re.search("[\ud800-\udfff]", value):
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(_toml_value(item, key) for item in value)}]"
        case Mapping():
            pairs = ((name, item) for name, item in value.items() if item is not None)
            return (
                f"{{{', '.join(f'{_toml_key(name)} = {_toml_value(item, name)}' for name, item in pairs)}}}"
            )
    allowed = "text, whole numbers, decimal numbers, booleans, lists and tables of these"
    problem = f"setting {key!r} holds {value!r} ({type(value).__name__})"
    raise ConfigError(problem, setting=key, given=value, remedy=f"TOML can hold {allowed}")
