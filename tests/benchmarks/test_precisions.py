"""What a precision costs: scores and differences by the formula, and llama.cpp on a file of ours."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_library import library
from precisions import Question, Readings, measure, score, summary
from topograd.evaluation.scoring import TokenRow
from topograd.evaluation.tasks import TASKS
from topograd.runs.session import LoadedTextRun


def test_a_score_is_of_the_tokens_behind_the_start() -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0], [0.0, 2.0, 1.0], [3.0, 0.0, 0.0], [7.0, 7.0, 7.0]])
    found = score(logits, TokenRow([0, 0, 2, 0], 2))
    first, second = 1 - math.log(1 + math.e**2 + math.e), 3 - math.log(math.e**3 + 2)
    assert found.logprob.tolist() == [pytest.approx([first, second])]
    assert (found.rank.tolist(), found.greedy.tolist()) == ([[2, 1]], [[False, True]])


def test_differences_are_paired() -> None:
    asked = [Question(TASKS[label], {}, []) for label in ("copa", "copa", "piqa")]
    plain = Readings([8.0, 8.0], torch.tensor([[1, 2], [3, 4]]), [0, 1, 0], [True, False, True])
    other = Readings([8.0, 12.0], torch.tensor([[1, 2], [3, 5]]), [0, 0, 1], [True, True, False])
    found = summary(plain, other, asked, [4, 4])
    assert found["bpb"] == pytest.approx(20 / 8 / math.log(2))
    assert found["bpb_difference"][0] == pytest.approx(0.5 / math.log(2))
    assert found["agreement"][0] == 0.75
    tasks = found["tasks"]
    assert [tasks[name]["difference"][0] for name in ("copa", "piqa", "all")] == [0.5, -1.0, 0.0]
    assert [tasks[name]["same_answer"] for name in ("copa", "piqa")] == [0.5, 0.0]
    assert (tasks["all"]["items"], tasks["all"]["accuracy"][0]) == (3, pytest.approx(2 / 3))


@pytest.mark.skipif(library() is None, reason="the wheel xllamacpp is not installed")
def test_llama_cpp_on_a_float32_file_answers_as_we_do(
    imported: LoadedTextRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items = [{"query": f"number {i} is", "choices": ["small", "a loss"], "gold": i % 2} for i in range(3)]
    (tmp_path / "copa.jsonl").write_text("\n".join(map(json.dumps, items)))
    given: dict[str, Any] = {"model": imported.run.folder, "tasks": tmp_path, "only": ["copa"], "items": 3}
    measure(argparse.Namespace(**given, windows=2, weights=["float32", "int4"], gguf=["F32"]))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [list(line) for line in lines] == [["native float32"], ["native int4"], ["llama.cpp F32"]]
    plain, int4, control = (next(iter(line.values())) for line in lines)
    assert control["bpb"] == pytest.approx(plain["bpb"], abs=1e-3)
    assert abs(int4["bpb"] - plain["bpb"]) > abs(control["bpb"] - plain["bpb"])
    assert control["tasks"]["all"]["same_answer"] == 1
