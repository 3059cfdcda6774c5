"""What may be asked of a study, and what is refused in one line."""

import pytest

from papers.outcome import asked
from papers.presets import Size, size_of
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
    ("study", "given", "why"),
    [
        ("leak", {"seeds": 2}, "--seeds is 2; study leak has no choice of seeds, it takes --steps"),
        ("minilm", {"steps": 3}, "--steps is 3; study minilm has no choice of steps, leave --steps out"),
        ("jacobians", {"width": 8}, "--width is 8; study jacobians has no choice of width, it takes --steps"),
        ("optimizers", {"width": 8}, "no choice of width, it takes --steps and --seeds"),
    ],
)
def test_a_size_that_means_nothing(study: str, given: dict[str, int], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        asked(study, "tiny", **given)  # type: ignore[arg-type]


def test_a_preset_that_a_study_lacks() -> None:
    with pytest.raises(ConfigError, match="--preset is demo; study leak has the presets tiny, small"):
        size_of("leak", "demo")


def test_sizes_as_plain_numbers() -> None:
    assert Size(2, (3, 4), seeds=1).as_dict() == {"steps": [3, 4], "seeds": 1, "minutes": 2}
