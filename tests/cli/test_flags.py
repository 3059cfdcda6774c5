"""Flags: their names, help and completion, the values that they do not take, and their names in errors."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
import tyro

from topograd.cli.console import Folder, Json, parse
from topograd.cli.flags import completions, flags_of, help_text, name_flag
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
            raise ConfigError(setting="rope_base", given=self.rope_base, allowed="at least 1")
        if self.width == 30:
            raise ConfigError(
                "width 30 does not split into 4 heads", setting="width", remedy="choose another"
            )


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
            raise ConfigError("maps and seed do not go together", setting="seed")


def test_every_flag_has_the_name_that_tyro_gives_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tyro.cli(Sample, args=["--help"])
    said = capsys.readouterr().out
    flags = flags_of(Sample)
    assert {"--model.rope-base", "--drafts", "--width", "--model.width", "--from", "--json"} <= flags.keys()
    assert "--folder" not in flags, "it has no flag"
    for name in (name for name, flag in flags.items() if not flag.positional):
        assert f"{name} " in said or f"{name}\n" in said, name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--stop-after nan", "--stop-after is 'nan'; it must be a whole number"),
        ("--stop_after=1.5", "--stop-after is '1.5'; it must be a whole number"),
        ("--stop-after=", "--stop-after was given nothing (''); leave the flag out, or give a value"),
        ("--seed 99999999999999999999", "--seed is 99999999999999999999; it must be below 2^63"),
        ("--seed -1", "--seed is -1; it must be at least 0"),
        ("--seed=-99999999999999999999", "--seed is -99999999999999999999; it must be below 2^63"),
        ("--rate nan", "--rate is 'nan'; it must be a finite number"),
        ("--rate -inf", "--rate is '-inf'; it must be a finite number"),
        ("--rate 1e999", "--rate is '1e999'; it must be a finite number"),
        ("--rate fast", "--rate is 'fast'; it must be a number"),
        ("--maps 3 x 4", "--maps is 'x'; it must be a whole number"),
        ("--betas 0.9 inf", "--betas is 'inf'; it must be a finite number"),
        ("--model.rope-base 0", "--model.rope-base is 0.0; it must be at least 1"),
        ("--model.rope-base q", "--model.rope-base is 'q'; it must be a number"),
        ("--model.width 30", "--model.width 30 does not split into 4 heads; choose another"),
        ("--drafts 0", "--drafts is 0; it must be at least 1"),
        ("--seed 13", "maps and --seed do not go together"),
        ("--kind c", "--kind is 'c'; it must be one of a, b"),
        ("--seed", "--seed has no value; see topograd sample --help"),
        ("--rate --seed 1", "--rate has no value; see topograd sample --help"),
        ("there", "Unrecognized options: there; see topograd sample --help"),
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
    with pytest.raises(ConfigError, match=r"^DIR was given nothing"):
        parse(Sample, [empty], "sample")


def test_what_is_right_passes() -> None:
    words = "here --stop-after None --rate 1e-3 --maps 3 4 --betas 0 1 --from x --loud --prompt"
    asked = parse(Sample, [*words.split(), "", "--data", "None", "--seed", str(2**63 - 1)], "sample")
    assert (asked.stop_after, asked.rate, asked.maps, asked.betas) == (None, 1e-3, (3, 4), (0.0, 1.0))
    assert (asked.from_, asked.loud, asked.seed, asked.prompt) == ("x", True, 2**63 - 1, "")
    assert parse(Sample, ["--loud", "here"], "sample").folder == Path("here")


def test_a_number_of_five_thousand_digits_is_short_in_the_error() -> None:
    with pytest.raises(ConfigError, match=r"^--seed is '9{40}…'; it must be a whole number$"):
        parse(Sample, ["here", "--seed", "9" * 5000], "sample")


@pytest.mark.parametrize(
    ("setting", "argv", "typed", "name"),
    [
        ("width", [], False, "width"),  # two flags have that name
        ("width", ["--model.width", "3"], True, "--model.width"),
        ("model.width", [], False, "--model.width"),
        ("seed", [], False, "--seed"),
        ("seed", [], True, "seed"),  # it may be a run's own
        ("folder", ["x"], False, "folder"),  # it has no flag
        ("nothing", [], False, "nothing"),
        ("", [], False, ""),
    ],
)
def test_a_setting_becomes_the_flag_where_it_is_clear_which(
    setting: str, argv: list[str], typed: bool, name: str
) -> None:
    error = ConfigError(f"{setting} and reseeded, the {setting}", setting=setting)
    name_flag(error, flags_of(Sample), argv, typed)
    assert (error.setting, error.problem) == (name, f"{name} and reseeded, the {setting}")


def test_help_shows_values_defaults_and_parts() -> None:
    text = " ".join(help_text(Sample, "topograd sample").split())
    assert text.startswith(
        "usage: topograd sample DIR [OPTIONS] A verb to try. arguments: DIR Where. (required)"
    )
    for part in (
        "--stop-after INT When.",
        "--betas FLOAT FLOAT Which two. (default: 0.9 0.95)",
        "--maps INT [INT ...] How many. (default: 1 2)",
        "--kind {a,b} Which kind.",
        "--seed INT Which. (default: 0)",
        "model options: --model.rope-base FLOAT Base. (default: 10.0)",
    ):
        assert part in text
    assert "None" not in text


@dataclass(frozen=True, kw_only=True)
class Levels(Sample):
    """Two levels of help."""

    COMMON: ClassVar[tuple[str, ...]] = ("--seed",)


def test_help_in_two_levels(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for word in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            parse(Levels, [word], "levels")
        shown[word] = capsys.readouterr().out
    assert "--seed INT" in shown["--help"]
    assert "--rate FLOAT" not in shown["--help"]
    more = len(flags_of(Levels)) - 2
    assert shown["--help"].endswith(f"\n{more} more options: topograd levels --help-all\n")
    assert "--rate FLOAT" in shown["--help-all"]
    assert "more options" not in shown["--help-all"]


def test_what_may_come_next() -> None:
    flags = flags_of(Sample)
    assert completions(flags, ["here", "--kind"]) == ["a", "b"]
    assert completions(flags, ["--data"]) == [], "a path: the shell completes files"
    words = completions(flags, ["here", "--loud"])
    assert {"--kind", "--model.width", "--help"} <= set(words)
    assert "DIR" not in words


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
    monkeypatch.setattr("topograd.cli.main.run_command", _parse_only(reached))
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

        def read(*given: Any, **more: Any) -> None:
            getattr(console, name)(*given, **more)
            reached.append("read")
            raise SystemExit(0)

        name = "parse_one_of" if hasattr(module, "parse_one_of") else "parse"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, read)
            code: int = module.run(argv)
            return code

    return run_verb
