"""Scores of texts: log-probabilities of continuations of a context, at each depth.

Tokens. A context is encoded as a prompt is (`Model.encode`), and a continuation by what it adds to the tokens
of the whole: encode(context + continuation) behind as many tokens as encode(context) has. Space at the end
of the context goes to the continuation first, since tokenizers join it to the word behind it. This is what
lm-eval does, so its numbers are ours.

A context that is longer than the model's is cut from the left, and the answer says by how much.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from topograd.data.tokenizer import Tokenizer
from topograd.decode.model import MAX_PROMPT, Model
from topograd.errors import ConfigError
from topograd.evaluation.scoring import Score, Scorer, TokenRow

Request = tuple[str, Sequence[str]]
"""A context and its continuations."""


@dataclass(frozen=True)
class ScoredText:
    """A continuation, its tokens and their scores."""

    text: str
    tokens: list[int]
    pieces: list[str]
    """The text of each token."""
    score: Score
    cut: int
    """Tokens of the context that did not fit."""

    def stages(self) -> list[dict[str, Any]]:
        """For each depth the log-probability, and that, the rank and the logit of each token."""
        score = self.score
        return [
            {
                "logprob": total,
                "greedy": bool(score.greedy[k].all()),
                "tokens": [
                    {
                        "token": token,
                        "text": piece,
                        "logprob": float(score.logprob[k, i]),
                        "rank": int(score.rank[k, i]),
                        "logit": float(score.logit[k, i]),
                    }
                    for i, (token, piece) in enumerate(zip(self.tokens, self.pieces, strict=True))
                ],
            }
            for k, total in enumerate(score.total)
        ]


def score_texts(
    model: Model, requests: Sequence[Request], depth: str | None = None
) -> list[list[ScoredText]]:
    """Score each continuation of each request, at every exit or at one depth."""
    scorer = Scorer(model.engine, depth, session=model.session)
    pairs = [[encode_pair(model, context, text) for text in texts] for context, texts in requests]
    bundles = [[token_row(*pair, scorer.context) for pair in each] for each in pairs]
    scores = scorer.score([[row for row, _ in bundle] for bundle in bundles])
    return [
        [
            _scored(model.session.tokenizer, text, tokens, score, cut)
            for text, (_, tokens), score, (_, cut) in zip(texts, each, results, bundle, strict=True)
        ]
        for (_, texts), each, results, bundle in zip(requests, pairs, scores, bundles, strict=True)
    ]


def score(
    model: Model, context: str, continuation: str | Sequence[str], depth: str | None = None
) -> list[ScoredText]:
    """Score one or several continuations of a context, which is run once."""
    texts = [continuation] if isinstance(continuation, str) else list(continuation)
    return score_texts(model, [(context, texts)], depth)[0]


def encode_pair(model: Model, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """The tokens of a context and of what follows it."""
    if (characters := len(context) + len(continuation)) > MAX_PROMPT:
        problem = f"context and continuation have {characters} characters"
        remedy = f"give at most {MAX_PROMPT}"
        raise ConfigError(problem, setting="continuation", given=characters, remedy=remedy)
    words = context.rstrip()
    before = model.encode(words)
    after = (
        model.encode(words + context[len(words) :] + continuation)[len(before) :]
        if words
        else model.session.tokenizer.encode(context + continuation)
    )
    if not after:
        problem = f"the continuation {continuation!r} has no token of its own"
        raise ConfigError(problem, setting="continuation", given=continuation, remedy="give some text")
    return before, after


def token_row(before: Sequence[int], after: Sequence[int], context: int) -> tuple[TokenRow, int]:
    """Tokens to score behind others, and how many of the others had to be left out."""
    if len(after) > context:
        problem = f"the continuation has {len(after)} tokens and the model reads {context}"
        raise ConfigError(problem, setting="continuation", given=len(after), remedy="shorten it")
    row = TokenRow([*before, *after], len(before)).cut(context + 1)
    return row, len(before) + len(after) - len(row.tokens)


def _scored(tokenizer: Tokenizer, text: str, tokens: list[int], score: Score, cut: int) -> ScoredText:
    known = tokenizer.pieces
    # a token that a specialist added is behind the tokenizer's own
    pieces = [known[t].decode(errors="replace") if t < len(known) else f"[{t}]" for t in tokens]
    return ScoredText(text, tokens, pieces, score, cut)
