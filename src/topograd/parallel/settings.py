"""Settings of parallel training (`--parallel`), and this process's place under torchrun. Needs no torch.

torchrun starts the same command for every rank of a machine, and ends all of them when one has failed. So of
an error that every rank finds, the first rank of a machine prints it, and the others wait until it has.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, fields
from typing import Literal

from topograd.errors import ConfigError
from topograd.limits import Bounds, check_numbers, check_rules

WireKind = Literal["exact", "bf16", "int8"]
WIRES: tuple[WireKind, ...] = ("exact", "bf16", "int8")
RANKS: Bounds = (1, 2**16)
TIMEOUT: Bounds = (0.1, 86_400)
FEW_NUMBERS = 1024
"""So many are sent to every rank where ranks meet (`ranks.Meeting`); more are added up in parts."""
LINGER = 10.0
"""Seconds in which the rank that prints an error is waited for; torchrun ends the others when it has."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """`stages=4,replicas=2,shard,timeout=60,wire=exact`."""

    stages: int
    """Ranks that the stages are dealt to, in order; a rank may have several stages."""
    replicas: int = 1
    """Copies of each stage, which share the batches of a step."""
    shard: bool = False
    """Whether replicas hold shards of their layers instead of copies."""
    timeout: float = 60.0
    """Seconds that one rank waits for another before it gives up."""
    wire: WireKind = "exact"
    """What activations are sent as: their own numbers, bf16, or int8 with a scale for each position."""
    stage: int | None = None
    """Train this stage alone, counted from 1, in a process that the others do not depend on."""
    links: str = "127.0.0.1:29800"
    """Of independent stages: the address of stage 1, the next ports are the others'; or all, joined by +."""
    buffer: int = 64
    """Of independent stages: steps whose activations are kept for a stage that returns, or to be replayed."""
    lost: Literal["wait", "replay"] = "wait"
    """What an independent stage does when the one before it is gone: wait, or train on its last inputs."""
    patience: float = 600.0
    """Seconds for which an independent stage waits for the one before it to return."""

    def __post_init__(self) -> None:
        check_numbers(self, stages=RANKS, replicas=RANKS, timeout=TIMEOUT, patience=TIMEOUT)
        check_numbers(self, buffer=(1, 2**20), stage=(1, RANKS[1]))
        if self.lost not in ("wait", "replay"):
            raise ConfigError(setting="lost", given=self.lost, allowed="wait or replay")
        if self.stage is not None:
            alone = "{} with stage, which trains alone"
            one, exact = self.replicas == 1, self.wire == "exact"
            check_rules(self, replicas=(one, alone.format(1)), wire=(exact, alone.format("exact")))
        if self.shard and self.replicas < 2:
            raise ConfigError(setting="replicas", given=self.replicas, allowed="at least 2 with shard")
        if self.wire not in WIRES:
            raise ConfigError(setting="wire", given=self.wire, allowed=f"one of {', '.join(WIRES)}")

    @property
    def world(self) -> int:
        """Processes in all."""
        return self.stages * self.replicas

    @classmethod
    def parse(cls, words: str) -> ParallelConfig:
        """The settings in `stages=4,replicas=2`.

        >>> ParallelConfig.parse("stages=4,replicas=2").world
        8
        """
        known = [field.name for field in fields(cls)]
        forms = [name if name == "shard" else f"{name}=..." for name in known if name != "stages"]
        given: dict[str, object] = {}
        for word in words.split(","):
            name, equals, value = word.strip().partition("=")
            if bool(equals) == (name == "shard") or name not in known or name in given:
                raise ConfigError(
                    f"--parallel {words!r} has {word.strip()!r}",
                    setting="parallel",
                    given=word.strip(),
                    remedy=f"give stages=P and, if you like, once each, {', '.join(forms)}",
                )
            given[name] = True if name == "shard" else _number(words, name, value)
        if "stages" not in given:
            raise ConfigError(
                f"--parallel {words!r} lacks stages",
                setting="stages",
                remedy="give the number of ranks, as stages=2",
            )
        try:
            return cls(**given)  # type: ignore[arg-type]
        except ConfigError as error:
            raise ConfigError(
                f"--parallel {words!r}: {error}", setting=error.setting, given=error.given
            ) from None


def _number(words: str, name: str, value: str) -> object:
    if name in ("wire", "links", "lost"):
        return value
    try:
        return float(value) if name in ("timeout", "patience") else int(value)
    except ValueError:
        raise ConfigError(
            f"--parallel {words!r}: {name} is {value!r}", setting=name, given=value, allowed="a number"
        ) from None


def started_processes() -> int:
    """How many processes torchrun started; 1 without it."""
    given = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
    return int(given) if given.isdecimal() else 1


def is_first_local_rank() -> bool:
    """Whether this process prints the errors that all ranks of the machine find."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def wait_for_first_rank() -> None:
    """Before a rank ends without a message: under torchrun, wait for the one that prints it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(LINGER)
