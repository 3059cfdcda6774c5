"""Incremental detokenisation with stop strings.

Tokens are byte strings, so a character of several bytes waits for the last of them. Bytes that are not UTF-8
become U+FFFD, as in `Tokenizer.decode`; the separator becomes nothing.

Stop strings. As soon as the text holds one, it is cut before the first occurrence of a stop string (the one
that starts earliest) and nothing more comes. Until then, the longest end of the text that is the beginning of
a stop string is held back. So nothing that was shown has to be taken back: an occurrence that began in shown
text would have been held back from its beginning on. Only written text is searched, not the prompt.

Cost. Per token O(n² m) characters are compared in the worst case for m stop strings of n characters; without
stop strings nothing is held back or searched.

Limits. If one stop string lies inside another, where the text is cut can depend on where the tokens end:
with "c" and "abcd", the token "abcd" leaves nothing, and "abc" then "d" leave "ab". Otherwise it depends on
the text alone.
"""

import codecs
from collections.abc import Mapping, Sequence

from topograd.data.tokenizer import Tokenizer
from topograd.errors import ConfigError

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 200


class TextStream:
    """The text of a sequence of tokens, released as soon as it is sure to stay."""

    text: str
    """Everything that was released."""
    stopped: bool
    """Whether a stop string came; then no more text does."""
    stop: str | None = None
    """The stop string that came."""

    def __init__(
        self, tokenizer: Tokenizer, stops: str | Sequence[str] = (), shown: Mapping[int, bytes] | None = None
    ) -> None:
        """`stops` is one stop string, or several; `shown` are special tokens that become text."""
        stops = [stops] if isinstance(stops, str) else stops
        if not isinstance(stops, Sequence) or len(stops) > MAX_STOPS:
            raise ConfigError(setting="stop", given=stops, allowed=f"a text, or at most {MAX_STOPS} of them")
        for stop in stops:
            if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARACTERS:
                allowed = f"texts of 1 to {MAX_STOP_CHARACTERS} characters"
                raise ConfigError(setting="stop", given=stop, allowed=allowed)
        self.text = ""
        self.stopped = False
        self._shown = shown or {}
        self._pieces = tokenizer.pieces
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=1)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, token: int) -> str:
        """Take a token; the text that can be shown now, after all that was shown before."""
        piece = self._pieces[token] if token < len(self._pieces) else b""  # a head may have more rows
        return self._take(self._decoder.decode(self._shown.get(token, piece)), last=False)

    def finish(self) -> str:
        """What was held back, for when no token follows; nothing after a stop."""
        return self._take(self._decoder.decode(b"", final=True), last=True)

    def _take(self, new: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        found = [(start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        self.stopped = bool(found)
        cut, self.stop = min(
            found, default=(len(text) if last else held_from(text, self._stops, self._longest), None)
        )
        released, self._held = text[:cut], text[cut:]
        self.text += released
        return released


def held_from(text: str, stops: Sequence[str], longest: int) -> int:
    """Where the longest end of `text` begins that is the beginning of one of `stops`."""
    for start in range(max(0, len(text) - longest + 1), len(text)):
        end = text[start:]
        if any(stop.startswith(end) for stop in stops):
            return start
    return len(text)
