"""Few-shot prompts: an item of a task as tokens, and which of them are scored.

Text. Examples come first, each with its answer and a blank line behind it; then the item:

    multiple choice      query      + delimiter + choice         once for every choice
    schema               context    + delimiter + continuation   once for every context
    language modelling   context    + delimiter + continuation   once; contexts without space at their ends

Scored are, as in nanochat, the tokens in which prompts differ: behind the tokens that all choices share
(which may reach into them, where two begin alike), the tokens that all schemas end with (at least one), or
those behind the prompt without its continuation and without space at its end. A prompt of a run begins with
the separator, as its training documents do; one of an imported model with what its tokenizer puts there,
for SmolLM2 nothing (nanochat always puts a token there: see docs/how-to/evaluate.md). What is longer than
the model's context loses tokens from the left, each prompt for itself.

Limits. Two choices that are the same have the same loss, and the first wins. Where a tokenizer joins the end
of a context with what follows, language modelling scores the tokens behind those that the two still share.
"""

from collections.abc import Sequence

from topograd.data.tokenizer import Tokenizer
from topograd.evaluation.scoring import TokenRow
from topograd.evaluation.tasks import Item, Task


def prompts(task: Task, item: Item, shown: Sequence[Item]) -> list[str]:
    """The texts to score; of language modelling the one without and the one with the continuation."""
    before = ""
    for example in shown:
        starts, ends = _halves(task, example)
        gold = example["gold"] if len(starts) > 1 else 0
        before += f"{starts[gold]}{task.delimiter}{ends[gold]}\n\n"
    starts, ends = _halves(task, item)
    texts = [f"{before}{a}{task.delimiter}{b}" for a, b in zip(starts, ends, strict=True)]
    if task.kind == "language_modeling":
        return [f"{before}{starts[0]}{task.delimiter}".rstrip(), *texts]
    return texts


def _halves(task: Task, item: Item) -> tuple[list[str], list[str]]:
    """What stands before and behind the delimiter, for each option of an item."""
    if task.kind == "multiple_choice":
        return [item["query"]] * len(item["choices"]), item["choices"]
    if task.kind == "schema":
        return item["context_options"], [item["continuation"]] * len(item["context_options"])
    return [item["context"].strip()], [item["continuation"]]


def bundle_of(
    task: Task, item: Item, shown: Sequence[Item], tokenizer: Tokenizer, context: int
) -> tuple[list[TokenRow], int]:
    """The sequences of an item with what is scored of each, and how many of them had to be cut."""
    texts = prompts(task, item, shown)
    tokens = [[*tokenizer.start_tokens, *tokenizer.encode(text)] for text in texts]
    if task.kind == "multiple_choice":
        start = min(shared(tokens), min(map(len, tokens)) - 1)
        rows = [TokenRow(each, max(start, 1)) for each in tokens]
    elif task.kind == "schema":
        same = max(1, shared([each[::-1] for each in tokens]))
        rows = [TokenRow(each, max(len(each) - same, 1)) for each in tokens]
    else:
        without, whole = tokens
        start = min(shared([without, whole]), len(whole) - 1)
        rows = [TokenRow(whole, max(start, 1))]
    return [row.cut(context) for row in rows], sum(len(row.tokens) > context for row in rows)


def shared(sequences: Sequence[Sequence[int]]) -> int:
    """How many leading tokens all sequences have in common."""
    for place, tokens in enumerate(zip(*sequences, strict=False)):
        if len(set(tokens)) > 1:
            return place
    return min(map(len, sequences))
