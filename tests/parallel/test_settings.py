"""What --parallel may say."""

import pytest

from raising import refused
from topograd.errors import ConfigError
from topograd.parallel.settings import ParallelConfig


def test_words_become_settings() -> None:
    found = ParallelConfig.parse("stages=4, replicas=2,timeout=5,wire=bf16")
    assert (found.stages, found.replicas, found.world, found.timeout, found.wire) == (4, 2, 8, 5.0, "bf16")
    assert not found.shard
    assert ParallelConfig.parse("stages=2,replicas=2,shard").shard
    alone = ParallelConfig.parse("stages=3,stage=2,links=10.0.0.1:99,buffer=4,lost=replay,patience=9")
    assert (alone.stage, alone.links, alone.buffer, alone.lost) == (2, "10.0.0.1:99", 4, "replay")


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        ("", "parallel"),
        ("replicas=2", "stages"),
        ("stages=two", "stages"),
        ("stages=0", "stages"),
        ("stages=2,stages=3", "parallel"),
        ("stages=2,speed=9", "parallel"),
        ("stages=2,wire=int4", "wire"),
        ("stages=2,timeout=nan", "timeout"),
        ("stages=2,lost=panic", "lost"),
        ("stages=2,shard", "replicas"),
        ("stages=2,replicas=2,shard=2", "parallel"),
        ("stages=2,replicas", "parallel"),
        ("stages=2,stage=1,replicas=2", "replicas"),
    ],
)
def test_bad_words_are_one_line(words: str, setting: str) -> None:
    with refused(ConfigError, setting=setting):
        ParallelConfig.parse(words)
