"""The probe: ranks and probabilities as they are computed by hand, on stages, paths and with a passage."""

from __future__ import annotations

import pytest
import torch

from raising import refused
from topograd.errors import ConfigError
from topograd.exec.forward import Predictor, stage_outputs
from topograd.runs.session import LoadedTextRun
from topograd.specialists.attach import Attached, attach, new_specialist
from topograd.specialists.probe import probe


@pytest.fixture(scope="module")
def attached(gpt: LoadedTextRun, tmp_path_factory: pytest.TempPathFactory) -> Attached:
    made = attach(gpt, [new_specialist(tmp_path_factory.mktemp("s") / "s", gpt)])
    with torch.no_grad():
        for parameter in made.part("s").parameters():
            parameter.add_(0.2)
    return made


@torch.no_grad()
def test_readings_are_those_of_the_model(attached: Attached) -> None:
    prompt, target = [5, 6, 7], [9, 11]
    found = probe(attached, prompt, target)
    logits = Predictor(attached.base.stack, attached.base.plan)(torch.tensor([[5, 6, 7, 9]]))[0]
    base = next(row for row in found["paths"] if row["path"] == "base")
    assert base["logit"] == pytest.approx(float(logits[2, 9]), rel=1e-5)
    order = logits[2].argsort(descending=True).tolist()
    assert order[base["rank"] - 1] == 9
    logs = logits.log_softmax(-1)
    assert base["probability"] == pytest.approx(float(logs[2, 9].exp()), rel=1e-4)
    assert base["sequence"] == pytest.approx(float((logs[2, 9] + logs[3, 11]).exp()), rel=1e-4)
    assert [row["stage"] for row in found["stages"]] == [1, 2, 3, 4]
    assert [row["specialist"] for row in found["stages"]] == [None, None, None, "s"]
    assert found["stages"][2]["logit"] == pytest.approx(base["logit"])


@torch.no_grad()
def test_another_head_reads_the_specialists_state(attached: Attached) -> None:
    found = probe(attached, [5, 6], [9])
    rows = {row["path"]: row for row in found["paths"]}
    h = stage_outputs(attached.stack, attached.plan, torch.tensor([[5, 6]]), [3])[3]
    assert rows["base head of s"]["logit"] == pytest.approx(
        float(attached.stack.readout(h, 2)[0, -1, 9]), rel=1e-5
    )
    middle = (rows["base"]["logit"] + rows["s"]["logit"]) / 2
    assert rows["base + s"]["logit"] == pytest.approx(middle, rel=1e-4)


def test_a_passage_in_front(attached: Attached) -> None:
    found = probe(attached, [5, 6], [9], passage=[1, 2, 3])
    assert found["with_passage"] == probe(attached, [1, 2, 3, 5, 6], [9])
    assert found["stages"] != found["with_passage"]["stages"]


def test_what_cannot_be_asked_is_refused(attached: Attached) -> None:
    with refused(ConfigError, setting="target"):
        probe(attached, [1], [])
    with refused(ConfigError, setting="tokens", given=999):
        probe(attached, [1], [999])
    with refused(ConfigError, setting="prompt", given=17):
        probe(attached, [1] * 16, [2, 3])


@torch.no_grad()
def test_a_model_that_can_have_no_specialist(adapted: LoadedTextRun) -> None:
    prompt, target = [5, 6, 7], [9]
    found = probe(attach(adapted, []), prompt, target)
    logits = Predictor(adapted.stack, adapted.plan)(torch.tensor([prompt]))[0, -1]
    assert [row["stage"] for row in found["stages"]] == [1, 2]
    assert found["stages"][1]["logit"] == pytest.approx(float(logits[9]), rel=1e-4)
