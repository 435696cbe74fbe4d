"""Detokenization and stop strings, for one sequence at a time.

The result equals the text of vLLM's detokenizer, with two differences. Prompt text never leaks into
a completion if the prompt ends inside a character. Only text that a stop string could still match
is held back.
"""

from bisect import bisect_right
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from copy import copy
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from contract.pieces import REPLACEMENT

_WINDOWS = (8, 64)
_LONGEST_CHARACTER_TAIL = 4


class Detokenizer:
    """Decodes a completion token by token; returns text as soon as its characters are complete."""

    __slots__ = ("_hidden", "_hides_special", "_prompt_tail", "_stream", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        shows_special_tokens: bool = False,
        hidden: AbstractSet[int] = frozenset(),
    ) -> None:
        """`hidden` are more tokens without text."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._hides_special = not shows_special_tokens
        window = self._context(prompt_token_ids)
        head = self._complete_head(window)
        self._stream = DecodeStream(ids=head, skip_special_tokens=self._hides_special)
        # Bytes that begin a character at the prompt's end belong to the completion if it completes
        # the character. Otherwise they belong to the prompt and decode as replacement characters.
        self._prompt_tail = ""
        if head != window:
            shown = [
                self._stream.step(tokenizer, token_id) or "" for token_id in window[len(head) :]
            ]
            self._prompt_tail = self._decode(window)[
                len(self._decode(head)) + len("".join(shown)) :
            ]

    def decode(self, token_ids: list[int]) -> str:
        """Return the text that these tokens complete, as `step` for each of them in fewer calls."""
        if len(token_ids) == 1 or not self._hidden.isdisjoint(token_ids):
            return "".join(map(self.step, token_ids))
        before = copy(self._stream)
        with suppress(Exception):  # `step` handles the bare Exception of tokenizers.
            text = self._stream.step(self._tokenizer, token_ids)
            if text is not None:
                return self._without_prompt_tail(text) if self._prompt_tail else text
        # The last token may begin a character, which holds back the text of all.
        self._stream = before
        return "".join(map(self.step, token_ids))

    def step(self, token_id: int) -> str:
        """Return the text that this token completes, often one word, sometimes none."""
        if token_id in self._hidden:
            return ""
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:
            # tokenizers raises a bare Exception if the next token changes how
            # earlier bytes decode. vLLM also resets the decoder in this case.
            if not str(error).startswith("Invalid prefix"):
                raise
            self._stream = DecodeStream(skip_special_tokens=self._hides_special)
            text = self._stream.step(self._tokenizer, token_id)
        if text and self._prompt_tail:
            text = self._without_prompt_tail(text)
        return text or ""

    def _without_prompt_tail(self, text: str) -> str:
        text, self._prompt_tail = text.removeprefix(self._prompt_tail), ""
        return text

    def _context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """Return the last tokens of the prompt that have text: decoding depends on no more."""
        for size in _WINDOWS:
            window = list(prompt_token_ids[-size:])
            if self._decode(window):
                return window
        return list(prompt_token_ids)

    def _complete_head(self, window: list[int]) -> list[int]:
        for tail in range(_LONGEST_CHARACTER_TAIL):
            head = window[: len(window) - tail]
            if not self._decode(head).endswith(REPLACEMENT):
                return head
        return []

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._hides_special)


class StopStrings:
    """The stop strings of a job, prepared for searching. Its sequences share them."""

    __slots__ = ("_first_characters", "_last_characters", "_ordered", "texts")

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self._ordered = sorted(set(texts))
        self._first_characters = frozenset(text[0] for text in texts)
        self._last_characters = frozenset(text[-1] for text in texts)

    def find(self, text: str, searched: int) -> tuple[int, str] | None:
        """Return the end and the string of the first match to end; of equal ends, the first given.

        Only matches that end after the first `searched` characters count.
        """
        if self._last_characters.isdisjoint(text[searched:]):
            return None
        best, found = len(text) + 1, ""
        for stop in self.texts:
            start = text.find(stop, max(searched + 1 - len(stop), 0), best)
            if start >= 0 and start + len(stop) < best:
                best, found = start + len(stop), stop
        return (best, found) if found else None

    def claimed_from(self, text: str) -> int:
        """Return where the longest end of `text` that begins a stop string starts, or its length.

        Checks one suffix for each character that is no longer held back: few on average.
        """
        for start, character in enumerate(text):
            if character in self._first_characters and self._begins_one(text[start:]):
                return start
        return len(text)

    def _begins_one(self, text: str) -> bool:
        """Whether `text` is a proper prefix of a stop string."""
        position = bisect_right(self._ordered, text)
        return position < len(self._ordered) and self._ordered[position].startswith(text)


@dataclass(eq=False, slots=True)
class StopMatcher:
    """Finds stop strings in incremental text, and holds back a possible beginning of one."""

    stops: StopStrings
    includes_stop: bool = False
    _held: str = ""
    matched: str | None = None
    """The stop string that matched; nothing may be pushed after a match."""

    def push(self, text: str, *, may_match: bool = True) -> str:
        """Return the text that can be sent: up to a match or a possible beginning of one.

        A match that ends where `may_match` is false (before `min_tokens`) never counts.
        """
        searched = len(self._held)
        text = self._held + text
        if may_match and (match := self.stops.find(text, searched)) is not None:
            end, self.matched = match
            self._held = ""
            return text[: end if self.includes_stop else end - len(self.matched)]
        split = self.stops.claimed_from(text)
        self._held = text[split:]
        return text[:split]

    def flush(self) -> str:
        """Return the held-back text at the end of the sequence."""
        held, self._held = self._held, ""
        return held
