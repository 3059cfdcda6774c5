"""What a user installs: the source distribution, the wheel that is built from it, and the wheel at work.

Everything happens in temporary folders, in processes whose only way to `topograd` is the installed wheel, and
without a network: the build uses the setuptools that is installed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NOT_SOURCE = ("runs", "shared", "build", "dist")
"""Folders that may lie at the root of a work tree and belong to no distribution, as those with a dot."""
SITE = (
    *("docs/_build", "docs/reference/api", "docs/reference/commands"),
    *("docs/reference/config.md", "docs/llms.txt"),
)
"""What `make docs` makes: three folders, then files."""


@dataclass(frozen=True)
class Built:
    """A copy of the project and what was built from it; the names in the sdist are without its top folder."""

    tree: Path
    wheel: Path
    in_sdist: set[str]
    in_wheel: set[str]


@dataclass(frozen=True)
class Installed:
    """The wheel in a folder of its own, and an empty folder to work in."""

    target: Path
    work: Path

    def python(self, *words: str) -> str:
        """What Python prints, run so that it finds `topograd` in the target first."""
        environment = {**os.environ, "PYTHONPATH": str(self.target)}
        return _run([sys.executable, *words], self.work, environment)

    def topograd(self, *words: str) -> Any:
        """The JSON object that the command prints."""
        return json.loads(self.python("-m", "topograd", *words, "--json"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("packaging")
    tree, out = folder / "tree", folder / "out"
    shutil.copytree(ROOT, tree, ignore=_not_source)
    for name in (*NOT_SOURCE, ".venv", *SITE[:3]):
        (tree / name).mkdir()
        (tree / name / "left_behind.py").write_text("")
    # The wheel is built from the unpacked source distribution, so a file that this lacks is missed in both.
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)], folder)
    (wheel,) = out.glob("*.whl")
    (sdist,) = out.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    with tarfile.open(sdist) as archive:
        members = [member.name for member in archive if member.isfile()]
    return Built(tree, wheel, {name.partition("/")[2] for name in members}, in_wheel)


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    target, work = folder / "target", folder / "work"
    work.mkdir()
    install = ["pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(target)]
    _run([sys.executable, "-m", *install, str(built.wheel)], folder)
    return Installed(target, work)


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(built: Built) -> None:
    package = built.tree / "src"
    wanted = {
        file.relative_to(package).as_posix() for file in (package / "topograd").rglob("*") if file.is_file()
    }
    info = f"topograd-{PROJECT['version']}.dist-info/"
    kernels = {name for name in built.in_wheel if Path(name).match("topograd/runtime/native/_kernels*.so")}
    assert len(kernels) == (shutil.which("g++") is not None), "compiled where there is a compiler"
    assert {name for name in built.in_wheel if not name.startswith(info)} == wanted | kernels
    assert {f"{info}METADATA", f"{info}entry_points.txt", f"{info}licenses/LICENSE"} <= built.in_wheel
    reference = "topograd/pretrained/reference/"
    weights = [name for name in wanted if name.startswith(reference) and name.endswith("/model.safetensors")]
    assert len(weights) == 1
    tops = {name.partition("/")[0] for name in built.in_wheel}
    assert tops == {"topograd", info.rstrip("/")}, "papers and benchmarks run from a clone"
    assert {"topograd/py.typed", f"{reference}config.toml", f"{reference}tokenizer.json"} <= wanted


def test_the_wheel_is_small(built: Built) -> None:
    assert built.wheel.stat().st_size <= 10_200_000  # of which the kernels of two instruction sets are 0.1 MB
    reference = "topograd/pretrained/reference/"
    assert not [name for name in built.in_wheel if name.startswith(reference) and name.endswith(".jsonl")]


def test_the_source_distribution_is_the_project_without_what_lies_around_in_it(built: Built) -> None:
    sources = {name for name in built.in_wheel if name.startswith("topograd/") and not name.endswith(".so")}
    assert {f"src/{name}" for name in sources} | {"setup.py"} <= built.in_sdist
    assert not [name for name in built.in_sdist if name.endswith(".so")]
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "constraints.txt"} <= built.in_sdist
    assert {"CODE_OF_CONDUCT.md", "Dockerfile", "SECURITY.md"} <= built.in_sdist
    for folder in ("benchmarks", "docs", "examples", "notebooks", "papers", "tests"):
        files = [
            file
            for file in (built.tree / folder).rglob("*")
            if file.is_file() and file.name != "left_behind.py"
        ]
        assert {file.relative_to(built.tree).as_posix() for file in files} <= built.in_sdist
    tops = {name.partition("/")[0] for name in built.in_sdist}
    assert not tops & {*NOT_SOURCE, ".venv", ".git"}
    assert not [name for name in built.in_sdist if name.endswith(("left_behind.py", ".pyc"))]


def test_the_wheel_says_what_it_is(installed: Installed) -> None:
    script = "import topograd; print(topograd.__file__); print(topograd.__version__)"
    file, version = installed.python("-c", script).splitlines()
    assert Path(file) == installed.target / "topograd" / "__init__.py"
    assert version == PROJECT["version"]
    assert installed.python("-m", "topograd", "--version") == f"topograd {PROJECT['version']}\n"


def test_the_installed_command_works_outside_the_tree(installed: Installed) -> None:
    shown = installed.topograd("space", "show", "4,4")
    script = installed.target / "bin" / "topograd"
    assert json.loads(installed.python(str(script), "space", "show", "4,4", "--json")) == shown
    assert shown["composition"] == [4, 4]


def test_the_reference_model_that_comes_with_the_wheel_writes(installed: Installed) -> None:
    written = installed.topograd("generate", "--prompt", "def ", "--tokens", "4")
    assert written["tokens"] == 4
    assert Path(written["run"]).is_relative_to(installed.target)
    assert list(installed.work.iterdir()) == []


def test_without_a_compiler_it_installs_without_kernels(built: Built, tmp_path: Path) -> None:
    environment = {**os.environ, "CC": "/bin/false", "CXX": "/bin/false"}
    command = ["build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(built.tree)]
    _run([sys.executable, "-m", *command], tmp_path, environment)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert not [name for name in names if name.endswith(".so")]
    assert "topograd/runtime/native/library.py" in names


def test_the_citation_has_the_version_of_the_package() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {PROJECT['version']}\n" in citation


def test_the_image_copies_files_that_exist_and_starts_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    """Read, not built: flags of the entry point exist, and the packages of its extras are declared."""
    from topograd.cli.main import main

    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split())
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", text)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    program, command, *words = json.loads(entry)
    assert program in PROJECT["scripts"]
    assert main([command, "--help"]) == 0
    options = capsys.readouterr().out
    assert all(re.search(rf"{word}\b", options) for word in words if word.startswith("--"))


def _not_source(folder: str, names: list[str]) -> set[str]:
    """What `copytree` leaves out: caches, and at the root whatever is no part of the project."""
    at_root = Path(folder) == ROOT
    return {
        name
        for name in names
        if name == "__pycache__"
        or name.endswith(".so")
        or name.endswith(".egg-info")
        or (at_root and (name in NOT_SOURCE or name.startswith(".")))
        or (Path(folder) / name).relative_to(ROOT).as_posix() in SITE
    }


def _run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    """What a process prints; a failure shows all that it said."""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout
