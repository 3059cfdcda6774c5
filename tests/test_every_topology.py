"""Every kind of run goes through every door: opened, written with, measured, calibrated, exported, compared.

One tiny run of each kind is trained once. What a door gives is compared with the slow way: the model's own
prediction (`Model.logits`), computed whole for every token, in float64 where text is compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import topograd as tg
from papers.export_run import export
from tests.oracles.decoding import moved
from topograd.cli.main import main
from topograd.decode.calibration import measure, tune
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.runs.session import heldout_text, open_session
from topograd.topology.dag import EMBEDDING, Edge, Stage

CONTEXT, TOKENS, PROMPT = 16, 20, "layer"


@dataclass(frozen=True)
class Kind:
    """A kind of run: what it changes, how many exits it has, and how it predicts."""

    topology: Mapping[str, Any] = field(default_factory=dict)
    exits: int = 2
    predicts: str = "last"
    words: str = "its last stage"
    model: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "muon+adamw"


CHAIN = {"partition": "2,2"}
KINDS = {
    "backprop": Kind({"partition": "L"}, exits=1),
    "chain": Kind(CHAIN),
    "residual": Kind(
        CHAIN | {"objective": "residual", "heads": "per-stage"},
        predicts="sum",
        words="the sum of stages 1-2",
    ),
    "next": Kind(CHAIN | {"grad_scale": 1.0, "reach": "next", "loss_every": (2, 1)}),
    "low-rank heads": Kind(CHAIN | {"heads": "low-rank", "head_rank": 2}),
    "decoder": Kind(CHAIN | {"decoder": 1}),
    "residual decoder": Kind(
        CHAIN | {"decoder": 1, "objective": "residual"}, predicts="sum", words="the sum of stages 2,4"
    ),
    "forest": Kind(
        {"graph": "forest", "branches": ("2", "1,1")},
        exits=3,
        predicts="pool",
        words="a pool of stages 1,3",
    ),
    "cover": Kind(
        {"graph": "cover", "intervals": ((0, 3), (2, 4))}, predicts="pool", words="a pool of stages 1-2"
    ),
    "soft": Kind({"graph": "soft", "grad_scales": (0.5, 1.0, 0.0)}, exits=3),
    "stages": Kind(
        {
            "graph": "stages",
            "stages": (
                Stage(0, 2, (Edge(EMBEDDING, grad_scale=1.0),)),
                Stage(2, 3, (Edge(0, layer=1),), weight=0.5),
                Stage(3, 4, (Edge(0), Edge(1, grad_scale=0.5, relay="pre-norm")), "z-loss"),
            ),
        },
        exits=3,
    ),
    "relays and a bus": Kind(
        CHAIN | {"relay": "gate", "source": "embedding", "join": "low-rank", "relay_rank": 3}
    ),
    "z-loss": Kind(CHAIN | {"objective": "z-loss"}),
    "distillation": Kind(CHAIN | {"objective": "distillation"}),
    "interface": Kind({"partition": "1,1,2", "interface": "S=4,r=4,pool=mean"}, exits=1),
    "path": Kind(
        {"partition": "1,1,2", "prediction": "path:1,3"}, exits=3, predicts="path", words="the path 1,3"
    ),
    "weights": Kind(
        {"partition": "1,1,2", "prediction": "0.25,0,0.75"},
        exits=3,
        predicts="pool",
        words="a pool of stages 1,3",
    ),
    "mamba3": Kind(CHAIN, model={"architecture": "mamba3", "ssm_state": 8}),
    "hybrid": Kind(CHAIN, model={"architecture": "hybrid", "ssm_state": 8}),
    "ddc-adam": Kind(CHAIN, optimizer="ddc-adam"),
}


@dataclass(frozen=True)
class Trained:
    """A run of a kind, and what its training found."""

    kind: Kind
    folder: Path
    results: Mapping[str, Any]

    @property
    def leaves_early(self) -> bool:
        return self.kind.exits > 1 and self.kind.predicts != "path"


@pytest.fixture(scope="module")
def train(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    folder = tmp_path_factory.mktemp("topologies")

    def make(name: str, **changes: Any) -> Trained:
        kind = KINDS[name]
        config = tg.TrainConfig(
            steps=4,
            batch=2,
            seed=1,
            data=str(corpus),
            tokenizer="bytes",
            eval_every=0,
            eval_bytes=300,
            save_every=0,
            model=tg.GPTConfig(layers=4, width=16, heads=2, context=CONTEXT, **kind.model),
            optimizer=tg.OptimizerConfig(name=kind.optimizer),
        )
        config = config.changed(**kind.topology, **changes)
        trainer = tg.start(config, folder / name.replace(" ", "-"))
        return Trained(kind, trainer.task.run.folder, trainer.train())

    return make


@pytest.fixture(scope="module")
def backprop(train: Callable[..., Trained]) -> Path:
    return train("backprop").folder


@pytest.fixture(scope="module", params=[name for name in KINDS if name != "backprop"])
def run(request: pytest.FixtureRequest, train: Callable[..., Trained], backprop: Path) -> Trained:
    """Each kind but backprop, which is what the others are compared with, and a teacher."""
    more = {"teacher": str(backprop)} if request.param == "distillation" else {}
    return train(request.param, **more)


@pytest.fixture(scope="module")
def exact(run: Trained) -> tg.Model:
    """The run in float64, where no two logits are closer than rounding."""
    model = tg.load(run.folder)
    model.session.stack.double()
    return model


def slow(model: tg.Model, count: int = TOKENS) -> list[int]:
    """The likeliest token of the model's own prediction each time, the window read whole."""
    window, written = model.encode(PROMPT), []
    for _ in range(count):
        written.append(int(model.logits(window)[-1].argmax()))
        window = moved(window, written[-1], CONTEXT)
    return written


def text_of(tokens: Sequence[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


def test_the_plan_says_how_it_predicts(run: Trained) -> None:
    session = open_session(run.folder)
    assert session.plan.prediction.kind == run.kind.predicts
    assert len(session.plan.predicting()) == run.kind.exits
    assert session.step == 4


@pytest.mark.covers("gpt", "decode")
@pytest.mark.covers("gpt", "decode", feature="topologies")
@pytest.mark.covers("gpt", "decode", feature="objectives")
@pytest.mark.covers("gpt", "decode", feature="relays")
@pytest.mark.covers("gpt", "decode", feature="interfaces")
@pytest.mark.covers("mamba", "decode")
@pytest.mark.covers("mamba", "train", "decode", feature="topologies")
def test_greedy_text_is_that_of_the_models_own_prediction(exact: tg.Model) -> None:
    """Within the context and, its older half forgotten, beyond it."""
    expected = slow(exact)
    assert len(set(expected)) > 1
    [written] = generate_batch(FixedDepth(exact.engine), [exact.encode(PROMPT)], TOKENS)
    assert [emitted.token for emitted in written] == expected
    assert exact.generate(PROMPT, TOKENS, depth="full") == text_of(expected)


def test_bits_per_byte_are_those_of_the_models_own_prediction(run: Trained) -> None:
    model = tg.load(run.folder)
    reading, text = model.evaluate(), heldout_text(model.session)
    nats = F.cross_entropy(
        model.logits(text.inputs).flatten(0, 1).double(), text.targets.flatten(), reduction="sum"
    )
    bpb = nats.item() / math.log(2) / text.nbytes
    assert reading.bpb.prediction == pytest.approx(bpb, rel=1e-6)
    assert len(reading.bpb.prefix) == run.kind.exits
    if run.kind.predicts != "path":
        assert reading.bpb.prefix[-1] == reading.bpb.prediction
    assert run.results["bpb"] == reading.as_dict()["bpb"], "what the training kept"
    assert 3 < bpb < 9


@pytest.mark.covers("gpt", "decode", feature="speculation")
@pytest.mark.covers("mamba", "decode", feature="speculation")
def test_drafts_write_what_full_depth_writes(run: Trained, exact: tg.Model) -> None:
    if not run.leaves_early:
        with pytest.raises(tg.TopogradError) as caught:
            exact.generate(PROMPT, TOKENS, depth="speculate:3")
        assert "\n" not in str(caught.value)
        return
    full = exact.generate(PROMPT, TOKENS, depth="full")
    for depth in ("speculate:3", "speculate:5:0.01"):
        drafted = exact.generate(PROMPT, TOKENS, depth=depth)
        assert drafted == full
        assert drafted.drafted
        assert sum(drafted.exits(run.kind.exits)) == TOKENS


class Called:
    """The command line, called as a program would."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self.capture = capture

    def json(self, *words: object) -> dict[str, Any]:
        assert self(*words, "--json") == 0
        value = json.loads(self.out)
        assert self.out.count("\n") == 1
        assert isinstance(value, dict)
        return value

    def refusal(self, *words: object) -> str:
        assert self(*words) == 2
        assert self.out == ""
        assert self.err.count("\n") == 1
        return self.err

    def __call__(self, *words: object) -> int:
        self.capture.readouterr()
        code = main([str(word) for word in words])
        self.out, self.err = self.capture.readouterr()
        return code


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Called:
    """With one round of timing, and reports without figures, which take a second each."""
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(tune, "OWN_TEXTS", 2)
    monkeypatch.setattr("topograd.report.page._panels", lambda *_: ())
    return Called(capfd)


@pytest.mark.covers("gpt", "decode", feature="early exit")
@pytest.mark.covers("mamba", "decode", feature="early exit")
def test_calibrated_and_left_early_or_refused(run: Trained, call: Called) -> None:
    if not run.leaves_early:
        why = "predicts by the path" if run.kind.predicts == "path" else "has 1 predicting stages of"
        assert why in call.refusal("calibrate", run.folder, "--bytes", 200)
        for depth in ("wand", "speculate:2"):
            assert why in call.refusal("generate", run.folder, "--depth", depth, "--prompt", PROMPT)
        asked = ("generate", run.folder, "--prompt", PROMPT, "--tokens", TOKENS, "--depth")
        if run.kind.predicts == "path":
            assert why in call.refusal(*asked, "speculate")
        else:  # lookup drafts, which needs no second exit
            assert call.json(*asked, "speculate")["text"] == call.json(*asked, "full")["text"]
        return
    assert len(call.json("calibrate", run.folder, "--bytes", 200)["agreement"]) == run.kind.exits
    for depth in ("wand", "wand:rival-gain:1e-9", "speculate"):
        words = ("generate", run.folder, "--prompt", PROMPT, "--tokens", TOKENS, "--depth", depth)
        answer = call.json(*words)
        assert sum(answer["exits"]) == answer["tokens"] == TOKENS
        assert len(answer["exits"]) == run.kind.exits
    assert "exit 9 does not exist" in call.refusal("generate", run.folder, "--depth", "prefix:9")


def test_every_exit_writes(run: Trained) -> None:
    model = tg.load(run.folder)
    for place in range(run.kind.exits):
        made = model.generate(PROMPT, 5, depth=f"prefix:{place + 1}")
        assert made.exits(run.kind.exits) == [5 * (k == place) for k in range(run.kind.exits)]


def test_an_exported_run_writes_what_its_rounded_weights_write(run: Trained, tmp_path: Path) -> None:
    exported = tg.load(export(run.folder, tmp_path / "exported"))
    rounded = tg.load(run.folder)
    with torch.no_grad():
        for tensor in rounded.session.stack.state_dict().values():
            tensor.copy_(tensor.to(torch.bfloat16))
    tokens = exported.encode(PROMPT)
    assert torch.equal(exported.logits(tokens), rounded.logits(tokens))
    assert exported.generate(PROMPT, TOKENS) == rounded.generate(PROMPT, TOKENS, depth="full")


def test_compared_and_reported_by_what_it_predicts(run: Trained, backprop: Path, call: Called) -> None:
    answer = call.json("compare", run.folder, backprop)
    ours, theirs = answer["runs"]
    assert ours["predicts_by"] == run.kind.predicts
    base, own = theirs["bpb"]["prediction"], run.results["bpb"]["prediction"]
    assert ours["gap"]["prediction"] == pytest.approx(100 * (own / base - 1), abs=1e-9)
    assert call("compare", run.folder, backprop) == 0
    assert "predicts by" in call.out
    page = Path(call.json("report", run.folder, "--against", backprop)["report"]).read_text()
    assert "bits per byte, what the model predicts" in page
    assert f"<td>{own:.4f}</td>" in page
    assert (f"It predicts by {run.kind.words}." in page) == (run.kind.exits > 1)
    assert call("eval", run.folder) == 0
    assert (run.kind.words in " ".join(call.out.split())) == (run.kind.exits > 1)
