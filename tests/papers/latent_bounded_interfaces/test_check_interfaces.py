"""`python -m papers check parity`, `leak` and `plan`: their answers, their flags, and what they refuse."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from calls import shown
from papers.latent_bounded_interfaces import check_interfaces as module
from papers.latent_bounded_interfaces import measure
from papers.latent_bounded_interfaces import parity as parity_module
from papers.latent_bounded_interfaces.check_interfaces import parity_table, plan_table
from papers.latent_bounded_interfaces.planner import choose_engine
from papers.latent_bounded_interfaces.timeline import Units
from topograd.nn.config import ARCHITECTURES

ROOT = Path(__file__).parents[3]
TINY = "--regions 3 --region-layers 1 --width 16 --heads 2 --vocab 11 --context 12 --segments 3 --rank 4"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_parity_of_every_architecture(architecture: str, call: Any) -> None:
    words = ("--architecture", architecture, "--trials", 1, "--batches", 1, "--json")
    answer = call("check", "parity", *words).json
    assert (answer["architecture"], answer["trials"]) == (architecture, 1)
    for precision in ("float64", "float32"):
        assert answer[precision].keys() == {
            "max_abs",
            "rel_l2",
            "cosine",
            "worst_tensor",
            "worst_tensor_name",
        }
    assert answer["float64"]["worst_tensor"] <= 1e-12
    assert answer["float32"]["rel_l2"] <= 1e-6


def test_parity_passes_everything_on(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def parity(*given: Any) -> dict[str, Any]:
        asked.append(given)
        return {}

    monkeypatch.setattr(parity_module, "parity", parity)
    monkeypatch.setattr(module, "parity_table", lambda answer: Table())
    words = "--architecture hybrid --trials 4 --batches 2 --engine hybrid --jacobian batched --seed 9"
    assert call("check", "parity", *words.split()).code == 0
    assert call("check", "parity").code == 0
    assert asked == [
        ("hybrid", 4, 2, "hybrid", "batched", 9),
        ("transformer", 20, 5, "scan", "loop", 0),
    ]


def test_the_parity_table_fits_a_terminal() -> None:
    found: dict[str, object] = {"max_abs": 1e-17, "rel_l2": 1.5e-16, "cosine": 1 - 2**-40}
    found |= {"worst_tensor": 2.5e-14, "worst_tensor_name": "relays.interface-3.decode.outer.weight"}
    answer = {"architecture": "hybrid", "trials": 4, "batches": 5, "parameters": 81}
    table = shown(parity_table({**answer, "float64": found, "float32": found, "bfloat16": found}))
    assert "hybrid: worst of 4 × 5, 81 tensors" in table
    assert "│   float64 │ 1.0e-17 │ 1.5e-16 │ 9.1e-13 │ 2.5e-14" in table
    assert "…" not in table


@pytest.mark.parametrize(("pool", "segments"), [("tail", 4), ("mean", 2), ("cumulative", 8)])
def test_no_leak(pool: str, segments: int, call: Any) -> None:
    answer = call("check", "leak", "--pool", pool, "--segments", segments, "--json").json
    assert answer == {
        "max_future_gradient": 0.0,
        "architecture": "transformer",
        "pool": pool,
        "segments": segments,
        "causal": True,
    }


def test_the_published_interface_leaks(call: Any) -> None:
    words = ["check", "leak", "--no-causal", "--pool", "mean", "--segments", "1"]
    found = call(*words, "--json").json
    assert found["max_future_gradient"] > 1e-3
    assert not found["causal"]
    assert str(found["max_future_gradient"]) in call(*words).out


def test_a_plan_on_one_worker(call: Any) -> None:
    answer = call("check", "plan", *TINY.split(), "--json").json
    assert (answer["engine"], answer["carried"], answer["regions"], answer["workers"]) == (
        "autograd",
        0,
        3,
        1,
    )
    assert answer["units"].keys() == {"forward", "local", "vjp", "jacobian"}
    assert answer["span"] == answer["spans"]["autograd"] < answer["spans"]["scan"]
    assert answer["span"] == pytest.approx(3 * (answer["units"]["forward"] + answer["units"]["local"]))
    assert answer["in_forwards"]["forward"] == 1
    assert answer["reason"].startswith("autograd: on one worker the span is the whole work")


def test_a_plan_for_a_worker_each(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    units = Units(forward=0.001, local=0.0019, vjp=0.0011, jacobian=0.008)
    asked: list[Any] = []

    def measured(stack: Any, topology: Any, inputs: Any, jacobian: str) -> Units:
        asked.append((stack.config.architecture, len(topology.stages), tuple(inputs.shape), jacobian))
        return units

    monkeypatch.setattr(measure, "measure_units", measured)
    words = TINY.replace("--regions 3", "--regions 16").split()
    words += ["--workers", "16", "--architecture", "mamba2", "--jacobian", "batched", "--batch", "2"]
    answer = call("check", "plan", *words, "--json").json
    assert asked == [("mamba2", 16, (2, 12), "batched")]
    assert answer["reason"] == choose_engine(units, 16, 16).reason
    assert answer["reason"].startswith("hybrid: 4 regions carry the adjoint while 11 Jacobians finish")
    assert answer["break_even_regions"] == 6
    told = call("check", "plan", *words)
    assert "16 regions on 16 workers" in told.out
    assert "hybrid: 4 regions carry the adjoint" in told.out
    assert "some seconds" in told.err


def test_the_plan_table() -> None:
    units = {"forward": 0.01, "jacobian": 0.08}
    spans = {"hybrid": math.pi / 10}
    table = shown(plan_table({"regions": 6, "workers": 1, "units": units, "spans": spans}))
    assert "│ one region's jacobian │  80.00 │      8.0 │" in table
    assert "│ step by hybrid        │ 314.16 │     31.4 │" in table


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", "nothing was given to check; choose one of catalogue, "),
        ("parities", "'parities' was given to check; choose one of catalogue, "),
        ("parities", ", costs, parity, leak, plan"),
        ("parity --architecture rnn", "--architecture is 'rnn'; it must be one of"),
        ("parity --trials 0", "--trials is 0; it must be at least 1"),
        ("parity --trials many", "--trials is 'many'; it must be a whole number"),
        ("parity --pool tail", "Unrecognized options: --pool"),
        ("leak --segments 5", "S is 5 and the context 32; S must divide the context"),
        ("leak --segments 1", "segments is 1; it must be at least 2"),
        ("leak --segments 64", "S is 64 and the context 32"),
        ("leak --pool best", "--pool is 'best'; it must be one of"),
        ("leak --no-causal", "causal is False; it must be true, unless S=1 and pool=mean"),
        ("plan --rank 0", "rank is 0; it must be at least 3"),
        ("plan --segments 7", "S is 7 and the context 256; S must divide the context"),
        ("plan --workers 0", "0 workers were given for 6 regions; give 1, or one for each region"),
        ("plan --workers 5", "5 workers were given for 6 regions; give 1, or one for each region"),
        ("plan --regions 2", "--regions is 2; it must be at least 3"),
        ("plan --width 30", "width is 30; it must be a multiple of twice the 4 heads"),
        ("plan --jacobian guess", "--jacobian is 'guess'; it must be one of"),
    ],
)
def test_bad_input_is_one_line(words: str, why: str, call: Any) -> None:
    assert why in call("check", *words.split()).refusal


HUGE = "99999999999999999999"


@pytest.mark.parametrize(
    "words",
    [
        *(f"{question} --seed {value}" for question in ("parity", "leak") for value in (HUGE, -1, "nan")),
        *(f"parity --{name} {value}" for name in ("trials", "batches") for value in (HUGE, "inf", -5)),
        *(f"leak --segments {value}" for value in (HUGE, "inf", -1)),
        *(
            f"plan --{name} {value}"
            for name in ("regions", "region-layers", "width", "heads", "vocab", "context", "batch", "rank")
            for value in (HUGE, 2**62, 2**31 - 2, "nan", -1)
        ),
        *(f"plan --{name} {value}" for name in ("segments", "workers") for value in (HUGE, 2**31, "inf", -1)),
    ],
)
def test_wrong_and_infinite_numbers_are_one_line(
    words: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "build_model", lambda *_: pytest.fail("built before the refusal"))
    assert call("check", *words.split()).refusal


def test_the_largest_seed_is_a_seed(call: Any) -> None:
    for question in ("leak", "parity --trials 1 --batches 2"):
        assert call("check", *question.split(), "--seed", 2**63 - 1, "--json").json


@pytest.mark.parametrize(
    "words",
    [
        "plan --help",
        "plan --regoins 3",
        "plan --workers 5",
        "parity --seed -1",
        "nonsense",
    ],
)
def test_flags_are_read_without_torch(words: str) -> None:
    program = (
        "import sys; from papers.__main__ import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'torch or numpy was imported'; "
        "sys.exit(code)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, "check", *words.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == (0 if "--help" in words else 2), ran.stderr
