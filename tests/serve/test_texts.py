"""From fields to jobs."""

from __future__ import annotations

from typing import Any

import pytest

from topograd.serve.jobs import Progress
from topograd.serve.request_schema import COMPLETION, RequestError, read
from topograd.serve.texts import ServedModel


def _silent(index: int) -> Any:
    def tell(progress: Progress) -> None:
        """Nobody listens."""

    return tell


def jobs_of(served: ServedModel, **fields: Any) -> list[Any]:
    asked = read(COMPLETION, fields)
    return served.jobs(asked, served.prompts(asked["prompt"]), asked["max_tokens"], _silent)


def test_prompts_in_four_forms(served: ServedModel) -> None:
    tokens = served.encode("def ")
    assert served.prompts("def ") == [tokens]
    assert served.prompts(["def ", ""]) == [tokens, [served.tokenizer.separator]]
    assert served.prompts(tokens) == [tokens]
    assert served.prompts([tokens, [1]]) == [tokens, [1]]
    with pytest.raises(RequestError) as caught:
        served.prompts([2048])
    assert (caught.value.param, caught.value.status) == ("prompt", 400)


def test_sampling_seeds_and_stops(served: ServedModel) -> None:
    jobs = jobs_of(served, prompt="a", n=2, seed=2**63 - 1, temperature=0.5, top_k=0, top_p=0.9, stop="x")
    assert [job.sampling.seed for job in jobs] == [2**63 - 1, 0]
    assert (jobs[0].sampling.top_k, jobs[0].sampling.top_p) == (None, 0.9)
    assert jobs_of(served, prompt="a", seed=-1)[0].sampling.seed == 2**63 - 1
    assert jobs_of(served, prompt="a")[0].sampling.temperature == 1.0


def test_what_fits_into_the_context(served: ServedModel) -> None:
    assert served.room([1] * 250, None) == 6
    assert served.room([1] * 250, 6) == 6
    for count, tokens in ((250, 7), (256, None), (257, None), (300, 0)):
        with pytest.raises(RequestError) as caught:
            served.room([1] * count, tokens)
        assert caught.value.code == "context_length_exceeded"
    assert served.room([1] * 256, 0) == 0


def test_specialists_that_are_not_there(served: ServedModel) -> None:
    bad: list[tuple[str, list[Any]]] = [("specialists", ["x"]), ("weights", [1])]
    for name, value in bad:
        with pytest.raises(RequestError) as caught:
            jobs_of(served, prompt="a", **{name: value})
        assert caught.value.param == name
    assert jobs_of(served, prompt="a", specialists=[])[0].specialists == ()


def test_a_text_that_cannot_fit_is_not_tokenised(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*words: object) -> list[int]:
        raise AssertionError("tokenised")

    assert served.encode("x" * 100)
    monkeypatch.setattr(type(served.tokenizer), "encode", forbidden)
    for encode in (served.encode, served.encode_bare):
        with pytest.raises(RequestError) as caught:
            encode("x" * (served.max_text + 1))
        assert caught.value.code == "context_length_exceeded"
