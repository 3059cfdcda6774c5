"""lm-eval adapter of a run, at any depth. Needs the extra `eval`.

    lm_eval.simple_evaluate(model=RunLM("runs/mine", depth="prefix:1"), tasks=[...])

lm-eval asks for Σ log p of continuations behind contexts, one request for each choice. Requests with the same
context are one bundle here (`scoring.py`), so a question is read once for all its choices. Contexts are cut
from the left as lm-eval's own models cut them: the last `max_length` + 1 tokens, of which the last is only
predicted. Tokens are split between context and continuation by lm-eval itself; `texts.encode_pair` agrees.

Limits: one process, no chat templates, greedy `generate_until` one request at a time.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from topograd.data.tokenizer import TextKind
from topograd.decode.model import Model, load
from topograd.errors import ConfigError
from topograd.evaluation.scoring import BATCH_TOKENS, Scorer, TokenRow
from topograd.evaluation.texts import token_row

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
except ImportError:
    raise ConfigError(
        "lm-eval is not installed", remedy="install it with: pip install 'topograd[eval]'"
    ) from None


class RunLM(TemplateLM):
    """A run behind lm-eval's interface. `depth` is full, prefix:J, path:1,3, branches:1-4*3+1-2, pool,
    router or shrinkage."""

    def __init__(
        self, run: Model | Path | str, depth: str = "full", batch_tokens: int = BATCH_TOKENS
    ) -> None:
        super().__init__()
        self.model = run if isinstance(run, Model) else load(run)
        self.depth = depth
        self.scorer = Scorer(self.model.engine, depth, batch_tokens=batch_tokens, session=self.model.session)
        self.cut = 0
        """Requests whose context did not fit."""

    @property
    def max_length(self) -> int:
        return self.scorer.context

    @property
    def eot_token_id(self) -> int:
        return self.model.session.tokenizer.separator

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context."""
        tokenizer = self.model.session.tokenizer
        return tokenizer.special_ids.get("bos", tokenizer.separator)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        kind: TextKind = "document" if add_special_tokens is False else "prompt"
        return self.model.session.tokenizer.encode(string, kind)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **more: object
    ) -> list[tuple[float, bool]]:
        bundles: dict[tuple[int, ...], list[int]] = {}
        results: dict[int, tuple[float, bool]] = {}
        rows: list[TokenRow] = []
        for place, (_, before, after) in enumerate(requests):
            bundles.setdefault(tuple(before), []).append(place)
            row, cut = token_row(before, after, self.max_length)
            rows.append(row)
            self.cut += cut > 0
        scores = self.scorer.score([[rows[place] for place in places] for places in bundles.values()])
        for places, each in zip(bundles.values(), scores, strict=True):
            for place, score in zip(places, each, strict=True):
                results[place] = score.total[0], bool(score.greedy.all())
        return [results[place] for place in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Every token of a text once, with as much context as fits: windows of lm-eval's own cutting."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        totals = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(total for total, _ in self._loglikelihood_tokens(pairs)))
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations up to a stop text."""
        written = []
        for request in requests:
            context, settings = request.args
            until = settings.get("until") or []
            stop = [until] if isinstance(until, str) else list(until)
            tokens = int(settings.get("max_gen_toks", 256))
            written.append(str(self.model.generate(context, tokens, depth=self.depth, stop=stop)))
        return written
