"""README, documentation and examples: their Python runs, and their commands name flags that exist."""

from __future__ import annotations

import doctest
import importlib
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import topograd as tg

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "papers").rglob("*.md"))]
EXAMPLES = ROOT / "examples"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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
    monkeypatch.setitem(sys.modules, page.stem, ModuleType(page.stem))  # where dataclasses look up names
    for block in code:
        assert not re.search(r"^(from|import) topograd\.|^from topograd import", block, re.MULTILINE), block
        exec(compile(block, f"{page.name}", "exec"), names)


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
        ROOT / "docs/howto/own-model.md", "python"
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


def test_every_command_names_a_verb_and_flags_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    from papers.__main__ import VERBS as PAPERS_VERBS
    from papers.__main__ import main as papers
    from topograd.cli.main import VERBS, main

    programs = {"topograd": (main, VERBS), "python -m papers": (papers, PAPERS_VERBS)}
    deeper = ("bench", "check", "search", "space")
    known: dict[tuple[str, ...], str] = {}
    for where, program, words in commands():
        if program == "python":
            assert (ROOT / words[0]).is_file(), where
            continue
        run, verbs = programs[program]
        verb = words[0]
        assert verb in verbs or verb.startswith("-"), where
        if verb.startswith("-"):
            continue
        two = (verb in deeper or words[:2] == ["eval", "core"]) and not words[1].startswith("-")
        path = tuple(words[: 2 if two else 1])
        if "--task" in words:  # each task has flags of its own
            path = (*path, "--task", words[words.index("--task") + 1])
        if (program, *path) not in known:
            assert run([*path, "--help"]) == 0, where
            known[program, *path] = capsys.readouterr().out
        for word in words:
            if word.startswith("--"):
                flag = word.partition("=")[0]
                assert re.search(rf"{re.escape(flag)}\b", known[program, *path]), f"{flag} of {where}"


def test_commands_of_every_program_are_found() -> None:
    assert {program for _, program, _ in commands()} == {"topograd", "python -m papers", "python"}


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
