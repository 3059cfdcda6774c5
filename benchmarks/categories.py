"""Prompts by category, our own texts: what drafters are measured on (`drafters.py`).

    code           the middle of held-out Python files, which the model goes on with
    chat           everyday questions
    summary        a passage to be shortened or corrected: much of the answer stands in the prompt
    maths          sums in words
    translation    a sentence or two, to and from English
    story          a first sentence

The kinds are those of SPEED-Bench (arXiv 2604.09557), the texts are not. A model without a chat template goes
on from the plain text. Nothing here was trained or tuned on.
"""

from __future__ import annotations

from dataclasses import dataclass

from topograd.convert.prompts import Chat
from topograd.data.corpus import read_corpus
from topograd.runs.session import LoadedTextRun

CODE_TOKENS = 48
FERRY = (
    "The ferry to the island leaves at eight in the morning and at four in the afternoon. In winter only the "
    "morning ferry runs. Tickets are sold on board. Bicycles travel free, but there is room for ten of them. "
    "Dogs must be kept on a lead. When the wind is strong, the captain decides whether the ferry leaves."
)
MILL = (
    "The old mill stood empty for thirty years before the village bought it. The roof was mended first, "
    "then the wheel. Today it grinds flour again on two days of the week. Children visit it with their "
    "school, and the flour is sold in the bakery. The river, however, has less water every summer."
)
CATEGORIES: dict[str, tuple[str, ...]] = {
    "chat": (
        "My cat refuses to eat. What could be the reason?",
        "Can you help me plan a quiet weekend in the mountains?",
        "Why does the sky look red in the evening?",
        "I want to sell my old piano. How should I describe it?",
    ),
    "summary": (
        f"Summarize this text in two sentences, with its own words:\n\n{FERRY}",
        f"Repeat this text and replace 'mill' by 'forge':\n\n{MILL}",
        f"List the rules that this text has:\n\n{FERRY}",
        f"Summarize this text:\n\n{MILL}",
    ),
    "maths": (
        "A baker sells 14 loaves in the morning and 9 in the afternoon, at 3 euros each. What does he earn?",
        "Solve 3 x + 5 = 26 and explain each step.",
        "A train needs 2 hours and 20 minutes for 210 kilometres. How fast is it?",
        "What is the sum of the first twelve even numbers? Show how you find it.",
    ),
    "translation": (
        "Translate into French: The library is closed on Monday, but the garden is open.",
        "Translate into Spanish: My sister works in a small hotel near the sea.",
        "Translate into English: Le train est en retard parce qu'il neige depuis ce matin.",
        "Translate into German: We have lost the key, so we wait in front of the house.",
    ),
    "story": (
        "Write a story that begins so: The lighthouse keeper counted the ships, and one was missing.",
        "Write a story about a clock that runs backwards on Sundays.",
        "Write a story that begins so: Nobody had opened the blue door since the summer of the storm.",
        "Write a story about two neighbours who share one umbrella.",
    ),
}


@dataclass
class Prompt:
    """A beginning and how many tokens are written behind it."""

    kind: str
    tokens: list[int]
    count: int = 0


def prompts_of(session: LoadedTextRun, each: int) -> list[Prompt]:
    """Some prompts of each category."""
    tokenizer, chat = session.tokenizer, Chat.of(session.tokenizer)
    code = [d for d in read_corpus(None).heldout if d.name.endswith(".py") and len(d.text) > 3000]
    found = []
    for document in code[:: max(1, len(code) // each)][:each]:
        middle = document.text.find("\n", len(document.text) // 3) + 1
        found.append(Prompt("code", tokenizer.encode(document.text[middle:])[:CODE_TOKENS]))
    for kind, texts in CATEGORIES.items():
        for text in texts[:each]:
            words = tokenizer.encode(text)
            found.append(Prompt(kind, [*chat.first, *words, *chat.behind] if chat else words))
    return found
