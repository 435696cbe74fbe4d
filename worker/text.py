"""From token ids to text, one sequence at a time: decoding, and stop strings.

Equal to what vLLM's own detokenizer yields, with two differences: text of the prompt never leaks into a
completion when the prompt ends inside a character, and no more text is held back than a stop string
could still claim.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_REPLACEMENT = "\ufffd"
_WINDOWS = (8, 64)
_LONGEST_CHARACTER_TAIL = 4


class Detokenizer:
    """Decodes a completion token by token; text appears as soon as its characters are complete."""

    __slots__ = ("_prompt_tail", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        window = self._context(prompt_token_ids)
        head = self._complete_head(window)
        self._stream = DecodeStream(ids=head, skip_special_tokens=True)
        # Bytes that begin a character at the prompt's end belong to the completion if it completes
        # the character, else to the prompt, where they read as replacement characters.
        self._prompt_tail = ""
        if head != window:
            shown = [
                self._stream.step(tokenizer, token_id) or "" for token_id in window[len(head) :]
            ]
            self._prompt_tail = self._decode(window)[
                len(self._decode(head)) + len("".join(shown)) :
            ]

    def step(self, token_id: int) -> str:
        """Return the text that this token completes, often one word, sometimes none."""
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:
            # tokenizers raises a bare Exception when bytes decoded so far turn out differently with
            # the next token. Starting afresh is what vLLM does, too.
            if not str(error).startswith("Invalid prefix"):
                raise
            self._stream = DecodeStream(skip_special_tokens=True)
            text = self._stream.step(self._tokenizer, token_id)
        if text and self._prompt_tail:
            text = text.removeprefix(self._prompt_tail)
            self._prompt_tail = ""
        return text or ""

    def _context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """Return the last tokens of the prompt, enough to have text: decoding depends on no more."""
        for size in _WINDOWS:
            window = list(prompt_token_ids[-size:])
            if self._decode(window):
                return window
        return list(prompt_token_ids)

    def _complete_head(self, window: list[int]) -> list[int]:
        for tail in range(_LONGEST_CHARACTER_TAIL):
            head = window[: len(window) - tail]
            if not self._decode(head).endswith(_REPLACEMENT):
                return head
        return []

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


class StopMatcher:
    """Finds stop strings in text that arrives in pieces, and holds back what may become one."""

    __slots__ = ("_held", "_stop", "matched")

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; nothing may be pushed after that."""

    def push(self, text: str) -> str:
        """Return the text that can be shown: up to a match, or to what could be the start of one."""
        text = self._held + text
        end = len(text) + 1
        for stop in self._stop:
            start = text.find(stop)
            if start >= 0 and start + len(stop) < end:
                end = start + len(stop)
                self.matched = stop
        if self.matched is not None:
            self._held = ""
            return text[: end - len(self.matched)]
        split = min((_claimed_from(text, stop) for stop in self._stop), default=len(text))
        self._held = text[split:]
        return text[:split]

    def flush(self) -> str:
        """Return the text held back, once no more will come."""
        held, self._held = self._held, ""
        return held


def _claimed_from(text: str, stop: str) -> int:
    """Return where the longest end of `text` that begins `stop` starts; `len(text)` if there is none."""
    start = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return start if start >= 0 else len(text)
