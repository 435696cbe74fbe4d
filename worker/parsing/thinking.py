"""Parser of reasoning between two single-token marks, as DeepSeek-R1 writes it.

It returns what vLLM's parser `deepseek_r1` returns for one token at a time.
"""

from collections.abc import Sequence


class Thinking:
    """Separates reasoning from content. The opening mark may be missing, also in the prompt."""

    __slots__ = ("_end_id", "_start_id", "is_open")

    def __init__(self, start_id: int, end_id: int, opening: Sequence[int]) -> None:
        self._start_id = start_id
        self._end_id = end_id
        self.is_open = self._is_open_after(opening)
        """Whether the next token belongs to the reasoning."""

    def feed(self, token_id: int, text: str) -> str:
        """Return the text of the next token of the reasoning; marks have none."""
        if token_id == self._end_id:
            self.is_open = False
            return ""
        return "" if token_id == self._start_id else text

    def _is_open_after(self, opening: Sequence[int]) -> bool:
        marks = [each for each in opening if each in (self._start_id, self._end_id)]
        return not marks or marks[-1] == self._start_id
