"""What quantised weights cost: nothing in float32, little in int8, more in int4."""

from __future__ import annotations

import pytest

pytest.importorskip("onnxruntime")

from topograd.data.windows import Text
from topograd.decode.calibration.measure import heldout_readings, precision_cost
from topograd.decode.depths import engine_of
from topograd.pretrained import REFERENCE
from topograd.runs.session import LoadedTextRun, open_session


@pytest.fixture(scope="module")
def session() -> LoadedTextRun:
    return open_session(REFERENCE)


@pytest.fixture(scope="module")
def text(session: LoadedTextRun) -> Text:
    import torch

    ids = session.tokenizer.encode("def read(self):\n    return self.value\n\nclass Reader:\n    pass\n" * 3)[
        :64
    ]
    tokens = torch.tensor([ids])
    targets = torch.cat((tokens[:, 1:], torch.full((1, 1), -100)), dim=1)
    return Text(tokens, targets, len(session.tokenizer.decode(ids[1:]).encode()))


def test_costs_by_exit(session: LoadedTextRun, text: Text) -> None:
    costs = {
        w: precision_cost(session, engine_of(session, "onnx", w), text) for w in ("float32", "int8", "int4")
    }
    assert costs["float32"]["agreement"] == [1.0] * 4
    assert costs["float32"]["bpb"] == pytest.approx(costs["float32"]["float32_bpb"], rel=1e-4)
    for cost in costs.values():
        assert cost["tokens"] == text.inputs.shape[1] - 1
        assert len(cost["bpb"]) == len(cost["agreement"]) == 4
    assert max(costs["int8"]["agreement"]) < 1 or costs["int8"]["bpb"] != costs["int8"]["float32_bpb"]
    assert costs["int8"]["bpb"] == pytest.approx(costs["int8"]["float32_bpb"], rel=0.05)
    assert sum(costs["int4"]["agreement"]) < sum(costs["int8"]["agreement"])


@pytest.mark.covers("gpt", "runtime", feature="int8")
def test_readings_are_those_of_the_weights_that_run(session: LoadedTextRun, text: Text) -> None:
    own = heldout_readings(session, text)
    same = heldout_readings(session, text, engine=engine_of(session, "onnx"))
    assert own.margin.equal(same.margin), "float32 is read by torch, whichever runtime writes"
    other = heldout_readings(session, text, engine=engine_of(session, "onnx", "int4"))
    assert not own.margin.equal(other.margin)
    cost = precision_cost(session, engine_of(session, "onnx", "int4"), text)
    agreement = (own.top == other.top).double().mean(1).tolist()
    assert agreement == pytest.approx(cost["agreement"], abs=0.05)
