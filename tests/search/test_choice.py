from dataclasses import asdict
from pathlib import Path

import pytest

from topograd.runs.config import TrainConfig
from topograd.runs.session import heldout_text, open_session
from topograd.search.choice import worth
from topograd.search.properties import read_numbers
from topograd.search.trained import Trained
from topograd.search.utility import DEPLOYMENTS, Weights, utility
from topograd.training.trainer import start


@pytest.fixture(scope="module")
def trained(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder: Path = tmp_path_factory.mktemp("choice") / "run"
    start(config.changed(partition="2,2", heads="per-stage", objective="residual"), folder).train()
    session = open_session(folder)
    return Trained.of(session, heldout_text(session))


def test_the_worth_of_a_run_is_weighed_from_what_is_measured(trained: Trained) -> None:
    found = worth(trained, DEPLOYMENTS["on-device"], ["wand", "gradient_depth"])
    assert asdict(found.terms) == read_numbers(trained, asdict(found.terms))
    assert found.terms.bpb == trained.evaluation.bpb.prediction != trained.evaluation.bpb.last
    assert found.utility == utility(found.terms, DEPLOYMENTS["on-device"])
    assert sum(found.shares.values()) == pytest.approx(found.utility)
    assert found.shares["capability"] == -0.3 * found.terms.capability < 0
    assert found.properties == {"wand": found.properties["wand"], "gradient_depth": 2}


def test_without_weights_bits_per_byte_are_left(trained: Trained) -> None:
    found = worth(trained, Weights())
    assert found.utility == found.terms.bpb
    assert set(found.shares.values()) == {found.terms.bpb, 0.0}
