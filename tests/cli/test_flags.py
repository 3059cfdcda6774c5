"""Flags as a person types them: their names in errors, and the words that they do not take."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import tyro

from topograd.cli.console import Folder, Json, parse
from topograd.cli.flags import as_typed, flags_of
from topograd.errors import ConfigError
from topograd.limits import REPEATS, SEED, check_numbers


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model."""

    rope_base: float = 10.0
    """Base."""
    width: int = 8
    """Width."""

    def __post_init__(self) -> None:
        if self.rope_base < 1:
            raise ConfigError(f"rope_base is {self.rope_base}; it must be at least 1")
        if self.width == 30:
            raise ConfigError("width 30 does not split into 4 heads; choose another")


@dataclass(frozen=True, kw_only=True)
class Other:
    """Another."""

    width: int = 8
    """Width too."""
    drafts: int = 1
    """Drafts."""

    def __post_init__(self) -> None:
        check_numbers(self, drafts=REPEATS)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A verb to try."""

    folder: Folder
    """Where."""
    stop_after: int | None = None
    """When."""
    rate: float | None = None
    """How fast."""
    seed: int = 0
    """Which."""
    maps: tuple[int, ...] = (1, 2)
    """How many."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Which two."""
    data: str | None = None
    """What."""
    page: Path = Path("x")
    """Where to."""
    prompt: str = ""
    """What first."""
    kind: Literal["a", "b"] | None = None
    """Which kind."""
    from_: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """Since when."""
    loud: tyro.conf.FlagCreatePairsOff[bool] = False
    """Whether."""
    json: Json = False
    model: Model = field(default_factory=Model)
    other: Annotated[Other, tyro.conf.arg(name="")] = field(default_factory=Other)

    def __post_init__(self) -> None:
        check_numbers(self, seed=SEED)
        if self.seed == 13:
            raise ConfigError(f"seed is 13 and maps {self.maps[0]}; they do not go together")


def test_every_flag_has_the_name_that_tyro_gives_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(Sample, ["--help"], "sample")
    said = capsys.readouterr().out
    flags = flags_of(Sample)
    assert {"--model.rope-base", "--drafts", "--width", "--model.width", "--from", "--json"} <= flags.keys()
    assert "--folder" not in flags, "it has no flag"
    for name in flags:
        assert f"{name} " in said or f"{name}\n" in said, name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--stop-after nan", "--stop-after was given 'nan'; it must be a whole number"),
        ("--stop_after=1.5", "--stop-after was given '1.5'; it must be a whole number"),
        ("--stop-after=", "--stop-after was given nothing (''); leave the flag out, or give a value"),
        ("--seed 99999999999999999999", "--seed is 99999999999999999999; it must be below 2^63"),
        ("--seed -1", "--seed is -1; it must be at least 0"),
        ("--seed=-99999999999999999999", "--seed is -99999999999999999999; it must be below 2^63"),
        ("--rate nan", "--rate was given 'nan'; it must be a finite number"),
        ("--rate -inf", "--rate was given '-inf'; it must be a finite number"),
        ("--rate 1e999", "--rate was given '1e999'; it must be a finite number"),
        ("--rate fast", "--rate was given 'fast'; it must be a number"),
        ("--maps 3 x 4", "--maps was given 'x'; it must be a whole number"),
        ("--betas 0.9 inf", "--betas was given 'inf'; it must be a finite number"),
        ("--model.rope-base 0", "--model.rope-base is 0.0; it must be at least 1"),
        ("--model.rope-base q", "--model.rope-base was given 'q'; it must be a number"),
        ("--model.width 30", "--model.width 30 does not split into 4 heads; choose another"),
        ("--drafts 0", "--drafts is 0; it must be at least 1"),
        ("--seed 13", "--seed is 13 and --maps 1; they do not go together"),
    ],
)
def test_errors_name_the_flag(words: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Sample, ["here", *words.split()], "sample")
    assert str(caught.value) == said


@pytest.mark.parametrize("empty", ["", "  ", "\t"])
@pytest.mark.parametrize("flag", ["--data", "--page", "--from", "--kind"])
def test_nothing_is_refused_where_something_belongs(flag: str, empty: str) -> None:
    for words in ([flag, empty], [f"{flag}={empty}"]):
        with pytest.raises(ConfigError, match=f"^{flag} was given nothing"):
            parse(Sample, ["here", *words], "sample")
    with pytest.raises(ConfigError, match=r"^an argument was given nothing"):
        parse(Sample, [empty], "sample")


def test_what_is_right_passes() -> None:
    words = "here --stop-after None --rate 1e-3 --maps 3 4 --betas 0 1 --from x --loud --prompt"
    asked = parse(Sample, [*words.split(), "", "--data", "None", "--seed", str(2**63 - 1)], "sample")
    assert (asked.stop_after, asked.rate, asked.maps, asked.betas) == (None, 1e-3, (3, 4), (0.0, 1.0))
    assert (asked.from_, asked.loud, asked.seed, asked.prompt) == ("x", True, 2**63 - 1, "")
    assert parse(Sample, ["--loud", "here"], "sample").folder == Path("here")


def test_a_number_of_five_thousand_digits_is_short_in_the_error() -> None:
    with pytest.raises(ConfigError, match=r"^--seed was given '9{40}…'; it must be a whole number$"):
        parse(Sample, ["here", "--seed", "9" * 5000], "sample")


@pytest.mark.parametrize(
    ("message", "argv", "said"),
    [
        ("width is 3; no", [], "width is 3; no"),  # two flags have that name
        ("width is 3; no", ["--model.width", "3"], "--model.width is 3; no"),
        ("model.width is 3; no", [], "--model.width is 3; no"),
        ("the seed is odd", [], "the seed is odd"),
        ("nothing is 3", [], "nothing is 3"),
    ],
)
def test_only_settings_become_flags(message: str, argv: list[str], said: str) -> None:
    assert as_typed(message, flags_of(Sample), argv) == said


NUMBERS = ["0", "-1", str(10**30), "nan", "inf", "", "1e400", "0x10"]


@pytest.mark.parametrize(
    "line",
    [
        "bench decode --prompts --prompt-tokens --tokens --rounds --bytes --rows",
        "space show 4,4 --microbatches",
        "space count 4 --stages --min-depth",
        "space properties 4,4 --limit-bytes",
        "demo --steps --seed",
    ],
)
def test_no_number_makes_a_traceback(line: str, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every numeric flag of a verb with every hostile number: refused in one line, before any work."""
    words = [word for word in line.split() if not word.startswith("--")]
    flags = [word for word in line.split() if word.startswith("--")]
    reached: list[str] = []
    monkeypatch.setattr("topograd.cli.main._run_verb", _parse_only(reached))
    for flag in flags:
        for number in NUMBERS:
            reached.clear()
            answer = call(*words, flag, number)
            assert answer.out == ""
            if answer.code != 0:
                assert answer.code == 2
                assert answer.err.startswith("topograd: ")
                assert flag in answer.err
                assert answer.err.count("\n") == 1
            else:
                assert reached, "it was taken"
                assert number in ("0", "-1"), f"{flag} {number} was taken"


def _parse_only(reached: list[str]) -> Any:
    """Runs a verb that ends once its flags have been read."""
    from importlib import import_module

    from topograd.cli import console

    def run_verb(verb: str, argv: list[str]) -> int:
        module = import_module(f"topograd.cli.{verb}")

        def read(*given: Any) -> None:
            getattr(console, name)(*given)
            reached.append("read")
            raise SystemExit(0)

        name = "parse_one_of" if hasattr(module, "parse_one_of") else "parse"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, read)
            code: int = module.run(argv)
            return code

    return run_verb
