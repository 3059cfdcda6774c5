"""Corpora: training and held-out documents.

A corpus is a list of named documents, read from the disk and never downloaded. It comes from

- nothing: the embedded corpus, which is the standard library of the Python that runs the program
  (its sources, and one document for each topic of the language reference in `pydoc_data`);
- a text file: one document;
- a `.jsonl` file: one document for each line `{"text": ...}`, other keys ignored;
- a directory: every file below it in one of the two forms, sorted by relative name.

The split into training and held-out documents is fixed: a hash of the document's name decides, so it does
not depend on a seed, on the machine, or on which other documents there are.

Limits. A corpus is held in memory whole. The embedded corpus differs from one Python version to the next;
its digest says so.
"""

import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from topograd.errors import DataError
from topograd.files import read_bytes

HELDOUT_SHARE = 0.05
"""The expected share of documents that are held out."""
MIN_BYTES = 256
"""The least text of a corpus: a tenth of it is held out."""
MAX_FILE_BYTES = 2**30
"""The largest file, since a corpus is held in memory whole."""

# Below the standard library: what is not part of it, what tests it, and what a machine wrote.
_FOREIGN = frozenset(
    {"site-packages", "dist-packages", "sitecustomize.py", "usercustomize.py", "__pycache__"}
)
_TESTS = frozenset({"test", "tests", "idle_test"})
_GENERATED_FILES = frozenset({"html/entities.py", "stringprep.py", "pydoc_data/topics.py"})


@dataclass(frozen=True, slots=True)
class Document:
    """One text. Its name is relative to the corpus and decides on which side of the split it falls."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """A corpus, split. `digest` is the SHA-256 over all names and texts; `skipped` names unread files."""

    name: str
    train: list[Document]
    heldout: list[Document]
    digest: str
    skipped: tuple[str, ...] = ()


def read_corpus(path: Path | str | None) -> Corpus:
    """Read the corpus at `path`: a text file, a `.jsonl` file or a directory. None is the embedded corpus.

    Pass on the text that a user gave, not a Path of it: `Path("")` is the current folder, and a variable that
    is not set must not mean whatever lies there.
    """
    if path is not None and not str(path).strip():
        raise DataError(
            f"the data path is empty ({str(path)!r}): give a file or a directory, or leave it out for the "
            "embedded corpus",
            setting="path",
            given=path,
        )
    skipped: list[str] = []
    if path is None:
        name, documents = f"python-{platform.python_version()}-stdlib", embedded_documents()
    else:
        name, documents, skipped = _read_path(Path(path))
    size = sum(len(document.text.encode()) for document in documents)
    if size < MIN_BYTES:
        what = "is empty" if size == 0 else f"is too short: it holds {size} bytes of text"
        remedy = f"give a text of at least {MIN_BYTES} bytes"
        raise DataError(f"corpus {name!r} {what}", setting="path", given=path, remedy=remedy)
    train, heldout = split_documents(documents)
    return Corpus(name, train, heldout, digest_documents(documents), tuple(skipped))


def split_documents(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Split into (train, held out), both non-empty and in the given order.

    Held out are the documents whose hash falls in the lowest 5% of its range. If that is none of them, or
    more than half of the text, it is instead the one document of lowest hash among those that leave at
    least half of the text for training (there is always one). A single document gives its last tenth, cut
    at a line break where there is one among the tenth before it.
    """
    if len(documents) == 1:
        name, text = documents[0].name, documents[0].text
        tenth = len(text) * 9 // 10
        cut = text.rfind("\n", len(text) * 8 // 10, tenth) + 1 or tenth
        return [Document(name, text[:cut])], [Document(name, text[cut:])]
    half = sum(len(document.text) for document in documents) / 2
    hashes = [_hash(document.name) for document in documents]
    chosen = {i for i, value in enumerate(hashes) if value < HELDOUT_SHARE}
    if not chosen or sum(len(documents[i].text) for i in chosen) > half:
        small = [i for i, document in enumerate(documents) if len(document.text) <= half]
        chosen = {min(small, key=lambda i: (hashes[i], i))}
    train = [document for i, document in enumerate(documents) if i not in chosen]
    return train, [documents[i] for i in sorted(chosen)]


def digest_documents(documents: Iterable[Document]) -> str:
    """The SHA-256 (hex) over names and texts, each preceded by its length, so that nothing can shift."""
    digest = hashlib.sha256()
    for document in documents:
        for part in (_name_bytes(document.name), document.text.encode()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def embedded_documents() -> list[Document]:
    """The standard library of the running Python: its sources and its language reference, sorted by name.

    Left out are tests, installed packages, and tables that a machine wrote (character maps, HTML entities,
    the build's configuration). A file that is not UTF-8 is left out too.
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents = list(_reference_topics())

    def skipped(name: str) -> bool:
        return name in _FOREIGN or name in _TESTS or name.startswith(("config-", "_sysconfigdata"))

    for file in _files_below(root, skipped) if root.is_dir() else []:
        name = file.relative_to(root).as_posix()
        if file.suffix == ".py" and name not in _GENERATED_FILES:
            text, _ = _decode(_read_bytes(file))
            is_character_map = name.startswith("encodings/") and (
                "decoding_table" in text or "decoding_map" in text
            )
            if text and not is_character_map:
                documents.append(Document(name, text))
    if not documents:
        problem = f"this Python has no library sources in {str(root)!r}"
        raise DataError(problem, setting="path", remedy="give a data path instead")
    return sorted(documents, key=lambda document: document.name)


def _reference_topics() -> Iterator[Document]:
    """The language reference; some distributions strip it, and then the corpus is the sources alone."""
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:
        return
    for topic, text in topics.items():
        yield Document(f"pydoc_data/topics/{topic}", text)


def _read_path(path: Path) -> tuple[str, list[Document], list[str]]:
    """(corpus name, documents, skipped files with the reason) of a file or a directory."""
    try:
        name = path.resolve().name or "corpus"
        is_file, is_directory = path.is_file(), path.is_dir()
        exists = path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise _unreadable(path, error) from error
    if is_file:
        text, reason = _decode(_read_bytes(path))
        if reason:
            problem, remedy = f"{str(path)!r} is {reason}", "give a UTF-8 text or .jsonl file"
            raise DataError(problem, setting="path", given=path, remedy=remedy)
        return name, _documents_of(name, text, path), []
    if is_directory:
        documents, skipped = _read_directory(path)
        return name, documents, skipped
    what = "is neither a file nor a directory" if exists else "does not exist"
    remedy = "give a text file, a .jsonl file or a directory of them"
    raise DataError(f"data path {str(path)!r} {what}", setting="path", given=path, remedy=remedy)


def _read_directory(root: Path) -> tuple[list[Document], list[str]]:
    documents: list[Document] = []
    skipped: list[str] = []
    for file in _files_below(root, lambda name: name.startswith(".")):
        name = file.relative_to(root).as_posix()
        text, reason = _decode(_read_bytes(file))
        if reason or not text:
            skipped.append(f"{name!r}: {reason or 'empty'}")
        else:
            documents.extend(_documents_of(name, text, file))
    return documents, skipped


def _files_below(root: Path, skip: Callable[[str], bool]) -> list[Path]:
    """The regular files below `root`, sorted by relative name, each once; `skip` prunes files and folders.

    A link to a file is followed only if it ends below `root` at a file that is not listed itself; a link to
    a directory is never followed.
    """

    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename or root), error) from error

    every: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not skip(name)]
        files = (Path(folder, name) for name in names if not skip(name))
        every.extend(file for file in files if file.is_file())
    base = root.resolve()
    seen: set[Path] = set()
    unique = []
    for file in sorted(every, key=lambda f: (f.is_symlink(), f.as_posix())):
        target = file.resolve()
        if target not in seen and (not file.is_symlink() or target.is_relative_to(base)):
            seen.add(target)
            unique.append(file)
    return sorted(unique, key=lambda file: file.relative_to(root).as_posix())


def _documents_of(name: str, text: str, path: Path) -> list[Document]:
    if path.suffix.lower() != ".jsonl":
        return [Document(name, text)] if text else []
    documents = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            document = Document(f"{name}:{number}", _text_of_line(line, number, path))
            if document.text:
                documents.append(document)
    return documents


def _text_of_line(line: str, number: int, path: Path) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _bad_line(path, number, f"is not JSON ({error})") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise _bad_line(path, number, "has no text", 'each line is an object {"text": "..."}')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _bad_line(path, number, "has half a surrogate pair") from error
    return text


def _bad_line(path: Path, number: int, problem: str, remedy: str = "correct or remove it") -> DataError:
    return DataError(f"{str(path)!r}, line {number} {problem}", setting="path", given=path, remedy=remedy)


def _read_bytes(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            gib = size / 2**30
            problem = f"{str(path)!r} has {gib:.1f} GiB, at most 1 is read from one file"
            raise DataError(problem, setting="path", given=path, remedy="split it into parts")
        return read_bytes(path, MAX_FILE_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from error


def _decode(content: bytes) -> tuple[str, str]:
    """(text, "") or ("", what is wrong). A byte order mark is dropped; line ends stay as they are."""
    if b"\0" in content:
        return "", f"not text (a zero byte at {content.index(0)})"
    try:
        return content.decode("utf-8-sig"), ""
    except UnicodeDecodeError as error:
        return "", f"not UTF-8 (a bad byte at {error.start})"


def _unreadable(path: Path, error: Exception) -> DataError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    remedy = "give a readable file or directory"
    return DataError(f"cannot read {str(path)!r} ({reason})", setting="path", given=path, remedy=remedy)


def _name_bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _hash(name: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(_name_bytes(name)).digest()[:8], "big") / 2**64
