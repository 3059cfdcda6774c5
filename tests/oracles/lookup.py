"""What followed the last tokens where they stood before, by reading the text from its end: O(tokens)."""

from __future__ import annotations

from collections.abc import Sequence


def followers(text: Sequence[int], longest: int, count: int) -> list[int]:
    """Up to `count` tokens that followed the newest earlier place of the text's last n tokens, n ≤ `longest`.

    >>> followers([1, 2, 3, 9, 1, 2], longest=3, count=2)
    [3, 9]
    """
    for n in range(min(longest, len(text) - 1), 0, -1):
        end = list(text[len(text) - n :])
        for start in range(len(text) - n - 1, -1, -1):
            if list(text[start : start + n]) == end:
                return list(text[start + n : start + n + max(count, 0)])
    return []
