"""README, documentation and examples: Python runs, commands name flags that exist, links resolve."""

from __future__ import annotations

import doctest
import importlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import site_commands
import site_llms
import topograd as tg

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MADE = ("_build", "_ext", "reference/api", "reference/commands", "reference/config.md")
"""What `make docs` makes from the code, and what makes it."""
SITE = [p for p in sorted(DOCS.rglob("*.md")) if not p.relative_to(DOCS).as_posix().startswith(MADE)]
PAGES = [ROOT / "README.md", *SITE, *sorted((ROOT / "papers").rglob("*.md"))]
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md"]
EXAMPLES = ROOT / "examples"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return [code for kind, code in _BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


def given(folder: Path) -> dict[str, Any]:
    """What a page may take for granted: tokens of a small vocabulary, a folder, models of transformers."""
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "folder": folder}


def hugging_face() -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    llama = transformers.LlamaConfig(hidden_size=16, intermediate_size=32, num_key_value_heads=1, **sizes)
    gpt2 = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32)
    return {
        "llama": transformers.LlamaForCausalLM(llama).eval(),
        "gpt2": transformers.GPT2LMHeadModel(gpt2).eval(),
    }


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_python_of_a_page_runs_and_uses_the_surface_alone(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for registry in (
        tg.MIXERS,
        tg.MODELS,
        tg.OBJECTIVES,
        tg.OPTIMIZERS,
        tg.PROPERTIES,
    ):  # what a page registers goes
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    code = blocks(page, "python")
    if not code:
        pytest.skip("no Python on this page")
    torch.manual_seed(0)
    names = given(tmp_path) | (hugging_face() if any("gpt2" in block for block in code) else {})
    names["__name__"] = page.stem
    monkeypatch.chdir(tmp_path)  # for what a page saves
    monkeypatch.setitem(sys.modules, page.stem, ModuleType(page.stem))  # where dataclasses look up names
    for block in code:
        assert not re.search(r"^(from|import) topograd\.|^from topograd import", block, re.MULTILINE), block
        exec(compile(block, name_of(page), "exec"), names)


def with_examples() -> dict[str, str]:
    """The modules whose docstrings have examples, by path."""
    roots = {"src": ROOT / "src", "papers": ROOT, "benchmarks": ROOT / "benchmarks", "tests/oracles": ROOT}
    found = {}
    for folder, root in roots.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            if ">>> " in path.read_text(encoding="utf-8"):
                found[str(path.relative_to(ROOT))] = ".".join(path.relative_to(root).with_suffix("").parts)
    return found


@pytest.mark.parametrize("module", with_examples().values(), ids=with_examples())
def test_the_examples_of_docstrings_are_right(module: str) -> None:
    found = doctest.testmod(
        importlib.import_module(module.removesuffix(".__init__")), optionflags=doctest.ELLIPSIS
    )
    assert found.attempted > 0
    assert found.failed == 0


def test_the_page_on_stacks_shows_the_example_whole() -> None:
    assert (EXAMPLES / "own_stack.py").read_text(encoding="utf-8") in blocks(
        ROOT / "docs/how-to/own-stack.md", "python"
    )


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda example: example.stem)
def test_examples_import_topograd_once(example: Path) -> None:
    text = example.read_text(encoding="utf-8")
    assert "import topograd as tg" in text
    assert not re.search(r"^\s*from topograd", text, re.MULTILINE)


def test_an_example_of_every_seam_trains_decodes_and_speculates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    main = runpy.run_path(str(EXAMPLES / "own_parts.py"))["main"]
    full, drafted = main(tmp_path / "run", steps=6)
    assert full == drafted
    assert drafted.drafted > 0
    from topograd.cli.main import main as topograd

    asked = ["--deployment", "serving", "--properties", "own_parts:width_used", "--json"]
    assert topograd(["search", "choose", str(tmp_path / "run"), *asked]) == 0
    assert "own_parts:width_used" in capsys.readouterr().out
    assert sys.modules.pop("own_parts").Shift.__name__ == "Shift", "the run's settings imported it by name"


def test_an_example_of_safe_directions_forgets_less_for_as_much() -> None:
    found = runpy.run_path(str(EXAMPLES / "safe_adapters.py"))["main"]()
    (learned, forgotten), (safely, kept) = found["plain LoRA"], found["safe directions"]
    assert safely > 0.8 * learned > 1
    assert kept < 0.25 * forgotten


_CALL = re.compile(r"\s*(?:\S*/)?(topograd|python -m papers|python(?= benchmarks/\S+\.py)) (\S.*)")


def commands() -> list[tuple[str, str, list[str]]]:
    """Every call of a program in a plain block: its page, the program, and the words behind it."""
    found = []
    for page in PAGES:
        for block in blocks(page, ""):
            for line in block.replace("\\\n", " ").splitlines():
                if call := _CALL.match(line):
                    found.append((f"{page.name}: {line}", call[1], shlex.split(call[2], comments=True)))
    return found


def test_every_command_names_a_verb_and_flags_that_exist() -> None:
    from papers.__main__ import VERBS as PAPERS_VERBS
    from papers.__main__ import main as papers
    from topograd.cli.main import VERBS, main

    programs = {"topograd": (main, VERBS), "python -m papers": (papers, PAPERS_VERBS)}
    deeper = ("bench", "check", "config", "search", "space", "specialist")
    known: dict[tuple[str, ...], set[str]] = {}
    for where, program, words in commands():
        if program == "python":
            assert (ROOT / words[0]).is_file(), where
            continue
        run, verbs = programs[program]
        verb = words[0]
        if verb.startswith("-"):
            continue
        assert verb in verbs, where
        listed = verb in deeper or words[:2] in (["eval", "core"], ["probe", "ladder"])
        two = listed and not words[1].startswith("-")
        path = tuple(words[: 2 if two else 1])
        if "--task" in words:  # each task has flags of its own
            path = (*path, "--task", words[words.index("--task") + 1])
        if (program, *path) not in known:
            known[program, *path] = flags_of_command(path, run)
        for word in words:
            if word.startswith("--"):
                flag = word.partition("=")[0].replace("_", "-")
                assert flag in known[program, *path], f"{flag} of {where}"


def flags_of_command(words: Sequence[str], main: Callable[[list[str]], int]) -> set[str]:
    """The flags that a command takes, `--no-...` and `--help` among them."""
    command = site_commands.ask(words, main)
    if command.kind is None:
        return set(re.findall(r"--[\w.-]+", command.printed))
    own = [name for name, _ in site_commands.flags(command.kind, command.default) if name.startswith("--")]
    off = {re.sub(r"^--(.*\.)?", lambda level: f"{level[0]}no-", name) for name in own}
    return {*own, *off, "--help", *(["--task"] if words[0] == "train" else [])}


OTHER_FLAGS = {
    "--nproc-per-node",
    "--max-restarts",
    "--nnodes",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--node-rank",
}
"""Of torchrun."""


def test_a_flag_in_a_sentence_is_a_flag_of_some_command() -> None:
    from topograd.cli.main import VERBS, main

    deeper = {
        "bench": ("decode", "serve"),
        "eval": ("core",),
        "interfaces": ("rank", "analyse"),
        "probe": ("ladder",),
        "search": ("dp", "soft", "surgery", "pareto", "choose"),
        "specialist": ("attach", "finetune", "compose", "route", "align"),
    }
    calls: list[tuple[str, ...]] = [("train", "--task", task) for task in ("masked", "images")]
    calls += [(verb,) for verb in VERBS] + [(verb, word) for verb, words in deeper.items() for word in words]
    known = OTHER_FLAGS.union(*(flags_of_command(words, main) for words in calls))
    sources = (file for folder in ("benchmarks", "papers") for file in (ROOT / folder).rglob("*.py"))
    scripts = "".join(file.read_text(encoding="utf-8") for file in sources)
    for page in (ROOT / "README.md", *SITE):
        if "results" in page.parts or "papers" in page.parts:
            continue  # with flags of benchmarks and studies
        prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for code in re.findall(r"`((?:--|topograd )[^`]+)`", prose):
            for flag in re.findall(r"(?<![\w-])--[a-z][\w.-]*", code):
                field = flag.removeprefix("--").replace("-", "_")
                assert flag in known or f" {field}: " in scripts, f"{name_of(page)}: `{code}`"


def test_commands_of_every_program_are_found() -> None:
    assert {program for _, program, _ in commands()} == {"topograd", "python -m papers", "python"}


_LINK = re.compile(r"(?<!`)!?\[[^\]]*\]\(([^)\s]+)\)")


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them, and its labels."""
    titles = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    slugs = {re.sub(r"[^\w\s-]", "", title.lower()).strip().replace(" ", "-") for title in titles}
    return slugs | set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_every_internal_link_of_a_page_resolves(page: Path) -> None:
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if file.is_relative_to(DOCS) and file.relative_to(DOCS).as_posix().startswith(MADE):
            continue  # the build looks for these
        assert file.exists(), f"{name_of(page)}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.read_text(encoding="utf-8")), f"{name_of(page)}: {target}"


def test_every_page_is_in_the_index_and_in_llms_txt() -> None:
    made = site_llms.page(DOCS)
    listed = {link.removesuffix(".html") for link in re.findall(r"\]\(([\w/.-]+\.html)\)", made)}
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in SITE}
    assert pages - {"index"} == listed - site_llms.GENERATED.keys()
    assert all(line.count(": ") for line in made.splitlines() if line.startswith("- ")), "each has a sentence"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    sources = shutil.copytree(DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns("_build"))
    for name in ("reference/api", "reference/commands"):
        shutil.rmtree(sources / name, ignore_errors=True)
    flags = ["-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    command = [sys.executable, *flags, str(sources), str(tmp_path / "out")]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-4000:]
    api = (tmp_path / "out/reference/api/topograd.html").read_text(encoding="utf-8")
    assert all(f'id="topograd.{name}"' in api for name in ("GPT", "train_step", "load", "Topology"))
    train = (tmp_path / "out/reference/commands/train.html").read_text(encoding="utf-8")
    assert "--partition" in train
    keys = (tmp_path / "out/reference/config.html").read_text(encoding="utf-8")
    assert "lr_matrix" in keys
    assert str(ROOT) not in api + train + keys, "no path of this machine"
    assert "three-minutes.html" in (tmp_path / "out/llms.txt").read_text(encoding="utf-8")


def test_every_study_and_script_that_a_page_names_is_there() -> None:
    from papers.check import CHECKS
    from papers.studies import STUDIES

    known = {"run": {*STUDIES, "--all", "NAME"}, "check": {*CHECKS, "NAME"}}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for verb, name in re.findall(r"python -m papers (run|check) ([\w-]+)", text):
            assert name in known[verb], f"{page.name}: {verb} {name}"
        for script in re.findall(r"\bbenchmarks/\w+\.py", text):
            assert (ROOT / script).is_file(), f"{page.name}: {script}"
