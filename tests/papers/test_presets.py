"""What may be asked of a study, and what is refused in one line."""

import pytest

from papers.outcome import asked
from papers.presets import Size, size_of
from raising import refused
from topograd.errors import ConfigError


def test_one_number_for_all_parts() -> None:
    many = asked("image-topologies", "small")
    assert many.parts("steps") == (200, 400, 400)
    one = asked("image-topologies", "small", steps=7, seeds=1)
    assert one.parts("steps") == (7, 7, 7)
    assert one.seeds == 1
    assert asked("continual", "tiny", width=6).parts("width") == (6, 6)
    assert asked("interfaces", "small", width=32, steps=9).width == 32


@pytest.mark.parametrize(
    ("study", "given", "setting"),
    [
        ("leak", {"seeds": 2}, "seeds"),
        ("minilm", {"steps": 3}, "steps"),
        ("jacobians", {"width": 8}, "width"),
        ("optimizers", {"width": 8}, "width"),
    ],
)
def test_a_size_that_means_nothing(study: str, given: dict[str, int], setting: str) -> None:
    with refused(ConfigError, setting=setting):
        asked(study, "tiny", **given)  # type: ignore[arg-type]


def test_a_preset_that_a_study_lacks() -> None:
    with refused(ConfigError, setting="preset", given="demo"):
        size_of("leak", "demo")


def test_sizes_as_plain_numbers() -> None:
    assert Size(2, (3, 4), seeds=1).as_dict() == {"steps": [3, 4], "seeds": 1, "minutes": 2}
