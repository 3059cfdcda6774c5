"""What --parallel may say."""

import pytest

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
    ("words", "line"),
    [
        ("", "give stages=P"),
        ("replicas=2", "lacks stages"),
        ("stages=two", "must be a number"),
        ("stages=0", "at least 1"),
        ("stages=2,stages=3", "give stages=P"),
        ("stages=2,speed=9", "'speed=9'"),
        ("stages=2,wire=int4", "choose one of exact, bf16, int8"),
        ("stages=2,timeout=nan", "timeout is nan"),
        ("stages=2,lost=panic", "wait or replay"),
        ("stages=2,shard", "give replicas=2 or more"),
        ("stages=2,replicas=2,shard=2", "'shard=2'"),
        ("stages=2,replicas", "'replicas'"),
        ("stages=2,stage=1,replicas=2", "a lone stage has no replicas"),
    ],
)
def test_bad_words_are_one_line(words: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        ParallelConfig.parse(words)
