"""Logits processor: what a sequence's logits become by the tokens before them.

Of a token t with logit z, which the prompt or the text has (seen), and which the text has c times:

    z <- z / r if z > 0 else z r      where t was seen: the repetition penalty r ("CTRL", Keskar et al. 2019)
    z <- z + b_t - α [c > 0] - β c    bias b, presence penalty α, frequency penalty β, as OpenAI has them
    z <- -inf                         where the grammar does not allow t (`grammar.py`)

The text is what was written behind the prompt. r is of both, α and β are of the text alone, as in vLLM and in
transformers.

Every position has its own history. A strategy that judges several at once (`speculation.py`) gives the tokens
between, so each is judged as if it were written by itself: text is that of full depth token by token. A
drafter's guesses are processed in the same way; that only makes them better, since any draft is safe. Drafts
that the grammar forbids are not made.

Shapes: logits (n, vocab) in float64 on the CPU, row i behind the history and all but the last n - 1 - i of
the tokens ahead. Cost O(n (vocab + seen)).

Limits: of a prompt that is longer than the context, its end counts; where several paths are
pooled, r scales log-probabilities and not logits.
"""

from collections import Counter, abc

import torch
from torch import Tensor

from topograd.decode.sampling import Sampling
from topograd.errors import ConfigError


class LogitsProcessor:
    """Bias, penalties and grammar of one sequence, with its history."""

    def __init__(self, sampling: Sampling, prompt: abc.Iterable[int]) -> None:
        self.sampling = sampling
        self.prompt = frozenset(prompt) if sampling.repetition_penalty != 1 else frozenset()
        self.written: Counter[int] = Counter()
        self.matcher = None if sampling.grammar is None else sampling.grammar.start()

    def take(self, tokens: abc.Sequence[int]) -> None:
        """Tokens were written."""
        self.written.update(tokens)
        if self.matcher is not None:
            self.matcher.take(tokens)

    def fits(self, ahead: abc.Sequence[int], tokens: abc.Sequence[int]) -> int:
        """How many of some tokens may be drafted behind those ahead."""
        return len(tokens) if self.matcher is None else self.matcher.fits(ahead, tokens)

    def ends(self, ahead: abc.Sequence[int] = ()) -> bool:
        """Whether the text is at its end behind the tokens ahead: its grammar lets nothing follow."""
        return self.matcher is not None and self.matcher.ends(ahead)

    def process(self, logits: Tensor, ahead: abc.Sequence[int] = ()) -> Tensor:
        """The changed logits (n, vocab) of the last n places behind the history and the tokens ahead."""
        z = logits.clone()
        self._check_bias(z.shape[-1])
        for row in range(len(z)):
            before = ahead[: len(ahead) + 1 - len(z) + row]
            self._penalise(z[row], self.written + Counter(before))
        if self.matcher is not None:
            z.masked_fill_(~self.matcher.masks(ahead, *z.shape), -torch.inf)
        return z

    def _penalise(self, z: Tensor, counts: Counter[int]) -> None:
        """Change one row (vocab,) in place."""
        given = self.sampling
        if given.repetition_penalty != 1 and (seen := self.prompt | counts.keys()):
            ids = torch.tensor(sorted(seen))
            some = z[ids]
            r = given.repetition_penalty
            z[ids] = torch.where(some > 0, some / r, some * r)
        if counts and (given.presence_penalty or given.frequency_penalty):
            ids, often = torch.tensor(list(counts)), torch.tensor(list(counts.values()), dtype=z.dtype)
            z[ids] -= given.presence_penalty + given.frequency_penalty * often
        if given.logit_bias:
            z[torch.tensor(list(given.logit_bias))] += torch.tensor(
                list(given.logit_bias.values()), dtype=z.dtype
            )

    def _check_bias(self, vocab: int) -> None:
        most = max(self.sampling.logit_bias, default=0)
        if most >= vocab:
            raise ConfigError(setting="logit_bias", given=most, allowed=f"tokens from 0 to {vocab - 1}")
