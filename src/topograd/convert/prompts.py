"""Prompts for a model to continue, as many as are asked for: code, prose, questions.

What a drafter learns from is text that its model wrote itself, so what matters of a prompt is that the next
one leads elsewhere. Two sources, both offline:

    documents     an excerpt of the training documents of a corpus: the embedded one (sources and reference of
                  the Python standard library) or the user's
    questions     a template and a subject, where the model has a chat template

Held-out documents are never used, so that they can measure what was learned here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from topograd.convert.chat import render_chat
from topograd.data.corpus import Document
from topograd.data.tokenizer import Tokenizer

SHORTEST, LONGEST = 8, 64
"""Tokens of an excerpt."""
QUESTIONS = 0.5
"""The share of chats, where the model can chat."""
WHOLE = 0.1
"""The share of rows that are all text of the corpus, which the model reads and does not write."""

TEMPLATES = (
    "What is {}?", "Explain {} in simple terms.", "Explain {} to a ten year old.",
    "Give me five facts about {}.", "List the advantages and disadvantages of {}.",
    "List ten things to know about {}.", "Write a short story about {}.", "Write a poem about {}.",
    "Write an email to a colleague about {}.", "Write a paragraph about the history of {}.",
    "How does {} work?", "How do I get started with {}?", "What are the most common mistakes with {}?",
    "What are the main parts of {}?", "Why is {} important?", "Describe {} step by step.",
    "Give me a recipe or a plan that involves {}.", "Compare {} with something similar.",
    "Summarize what people should know about {}.", "Write a dialogue between two people who talk about {}.",
    "What questions should I ask about {}?", "Make a table of contents for a book about {}.",
    "Write a product description for {}.", "What would the world be like without {}?",
    "Write a Python function that has to do with {}.", "Write a Python class that models {}.",
    "Give an example of {}.", "What is the difference between {} and {}?",
    "Is {} better than {}? Argue both sides.", "Write a news report about {}.", "Give me advice on {}.",
    "Translate a sentence about {} into French and explain it.", "Write a quiz with answers about {}.",
    "Create a weekly schedule around {}.", "Who invented {}, and why?",
)  # fmt: skip
SUBJECTS = (
    "photosynthesis", "the French Revolution", "sorting a list", "a bicycle", "machine learning", "bread",
    "black holes", "a binary tree", "climate change", "chess", "the human heart", "a bank account",
    "volcanoes", "public speaking", "a linked list", "the Roman Empire", "electric cars", "prime numbers",
    "coffee", "a job interview", "the water cycle", "recursion", "gardening", "jazz", "a weather station",
    "gravity", "saving money", "the Fibonacci sequence", "a lighthouse", "vaccines", "time management",
    "a hash table", "the moon", "a library", "regular expressions", "dinosaurs", "yoga", "inflation",
    "a robot", "the ocean", "matrix multiplication", "a wedding", "antibiotics", "the Silk Road",
    "a calculator", "bees", "democracy", "string reversal", "a haunted house", "solar panels",
    "running a marathon", "DNA", "a shopping cart", "the printing press", "a dragon", "probability",
    "learning a language", "earthquakes", "a queue", "the immune system", "remote work", "a spaceship",
    "file input and output", "rivers", "healthy breakfasts", "the stock market", "a detective",
    "palindromes", "glaciers", "teamwork", "a cache", "the Olympic Games", "blood pressure",
    "a train station", "quantum mechanics", "houseplants", "a text editor", "whales",
    "the Industrial Revolution", "dates and times", "a small village", "neural networks", "cooking rice",
    "a lost letter", "graph search", "wind power", "sleep", "a school trip", "encryption", "the desert",
    "tea ceremonies", "a temperature converter", "forest fires", "friendship", "an elevator", "fractions",
    "the Great Wall of China", "unit tests", "a rainy day", "bridges", "video games", "a student", "atoms",
    "word counting", "camping", "the brain", "a chat bot", "museums", "triangles", "a broken clock", "salt",
    "email etiquette", "renewable energy", "a parking lot", "the alphabet", "rust", "insurance",
    "a garden pond", "JSON", "ancient Egypt", "stress", "a vending machine", "satellites", "stairs",
    "the violin", "taxes",
)  # fmt: skip


@dataclass(frozen=True)
class Chat:
    """The tokens around a question: those before the first, those before a later one, those behind each."""

    first: list[int]
    later: list[int]
    behind: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Chat | None:
        """The model's way of chatting; None where it has none."""
        if tokenizer.chat_template is None:
            return None
        marks = ("@first@", "@answer@", "@second@")
        messages = [
            {"role": role, "content": mark}
            for role, mark in zip(("user", "assistant", "user"), marks, strict=True)
        ]
        text = render_chat(tokenizer.chat_template, messages, special_tokens=tokenizer.special_tokens)
        parts = []
        for mark in marks:
            before, found, text = text.partition(mark)
            if not found:
                return None
            parts.append(tokenizer.encode(before, "chat"))
        # the answer's end is the model's own token, so the turn after it begins behind that
        later = parts[2][1:] if parts[2] and parts[2][0] in tokenizer.stop_tokens else parts[2]
        return cls(parts[0], later, tokenizer.encode(text, "chat"))


class Prompts:
    """Prompts of a model, each a function of a seed and the row's number."""

    def __init__(self, tokenizer: Tokenizer, documents: Sequence[Document], seed: int = 0) -> None:
        self.tokenizer, self.documents, self.seed = tokenizer, documents, seed
        self.chat = Chat.of(tokenizer)

    def row(self, number: int, length: int) -> Row:
        """What is given of the row called `number`, of `length` tokens."""
        generator = random.Random(f"{self.seed} {number}")
        share = generator.random()
        whole = share < WHOLE
        chats = self.chat is not None and share > 1 - QUESTIONS * (1 - WHOLE)
        return Row(self, generator, length, whole, chats)


class Row:
    """The given beginnings of one row, one after the other."""

    def __init__(
        self, prompts: Prompts, generator: random.Random, length: int, whole: bool, chats: bool
    ) -> None:
        self.prompts, self.generator, self.chats = prompts, generator, chats
        self.whole = length if whole else None
        self.most = max(1, length // 4)
        self._begun = False

    def next(self, ended: bool) -> list[int]:
        """The next beginning; `ended` says whether the model itself ended what came before."""
        if self.chats and self.prompts.chat is not None:
            chat, first = self.prompts.chat, not (self._begun and ended)
            template = self.generator.choice(TEMPLATES)
            subjects = self.generator.sample(SUBJECTS, template.count("{}"))
            question = self.prompts.tokenizer.encode(template.format(*subjects))
            tokens = [*(chat.first if first else chat.later), *question, *chat.behind]
            if first and self._begun:
                tokens.insert(0, self.prompts.tokenizer.separator)
        else:
            tokens = [self.prompts.tokenizer.separator, *self._excerpt()]
        self._begun = True
        return tokens

    def _excerpt(self) -> list[int]:
        document = self.generator.choice(self.prompts.documents).text
        count = self.whole or self.generator.randint(min(SHORTEST, self.most), min(LONGEST, self.most))
        starts = [0, *(i + 1 for i, c in enumerate(document) if c == "\n")]
        start = self.generator.choice(starts[: max(1, len(starts) - 8)])
        return self.prompts.tokenizer.encode(document[start : start + 8 * count])[:count]
