"""What a client was told of one completion, however often it had to ask for it."""

from dataclasses import dataclass, field
from typing import Any

_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@dataclass(slots=True)
class ToldChoice:
    """One choice, put together from the pieces that came."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, piece: dict[str, Any]) -> None:
        """Put a piece behind what is there."""
        self.text += piece["text"]
        self.token_ids += piece.get("token_ids") or []
        lists = piece.get("logprobs") or {}
        for name in _LISTS:
            self.logprobs.setdefault(name, []).extend(lists.get(name) or [])
        self.finish_reason = piece["finish_reason"] or self.finish_reason
        self.stop_reason = piece.get("stop_reason") or self.stop_reason


@dataclass(slots=True)
class Transcript:
    """All choices of a completion, as far as they were told."""

    choices: dict[int, ToldChoice] = field(default_factory=dict)
    usage: dict[str, int] | None = None
    error: dict[str, Any] | None = None
    is_done: bool = False
    """Whether everything was told: a whole body, or a stream with its `[DONE]`."""
    after_end: int = 0
    """Pieces of a choice that came after its finish reason, and events after `[DONE]`."""

    @property
    def tokens(self) -> int:
        """Token ids that were told."""
        return sum(len(choice.token_ids) for choice in self.choices.values())

    def add(self, event: dict[str, Any]) -> None:
        """Take in a chunk of a stream, or a whole body."""
        self.error = event.get("error") or self.error
        self.after_end += self.is_done
        for piece in event.get("choices", []):
            choice = self.choices.setdefault(piece["index"], ToldChoice())
            self.after_end += choice.finish_reason is not None
            choice.add(piece)
        if event.get("usage") and self.error is None:
            counts = event["usage"]
            self.usage = {each: counts[each] for each in ("prompt_tokens", "completion_tokens")}

    def difference(self, expected: "Transcript") -> str:
        """Say where this is not what was expected; empty if it is, as far as it goes.

        A transcript that is done must be complete, any other one may end anywhere.
        """
        if self.after_end:
            return f"{self.after_end} pieces after the end"
        if unknown := set(self.choices) - set(expected.choices):
            return f"choices {sorted(unknown)} that nobody asked for"
        for index in sorted(expected.choices):
            told, wanted = self.choices.get(index, ToldChoice()), expected.choices[index]
            if found := _difference(told, wanted, is_done=self.is_done):
                return f"choice {index}: {found}"
        if self.is_done and self.usage is not None and self.usage != expected.usage:
            return f"usage is {self.usage} instead of {expected.usage}"
        return ""


def _difference(told: ToldChoice, wanted: ToldChoice, *, is_done: bool) -> str:
    pairs = [
        ("text", told.text, wanted.text),
        ("token_ids", told.token_ids, wanted.token_ids),
        *((name, told.logprobs.get(name, []), wanted.logprobs.get(name, [])) for name in _LISTS),
    ]
    is_whole = is_done or told.finish_reason is not None
    for name, had, full in pairs:
        if had != (full if is_whole else full[: len(had)]):
            return f"{name} {_first_difference(had, full)}"
    ending, wanted_ending = (
        (told.finish_reason, told.stop_reason),
        (wanted.finish_reason, wanted.stop_reason),
    )
    if is_whole and ending != wanted_ending:
        return f"ended with {ending} instead of {wanted_ending}"
    return ""


def _first_difference(had: Any, full: Any) -> str:
    """Say where two texts or lists part."""
    at = next((i for i, (a, b) in enumerate(zip(had, full, strict=False)) if a != b), None)
    if at is None:
        return f"has {len(had)} instead of {len(full)}: ...{had[-20:]!r}, ...{full[-20:]!r}"
    begin = max(at - 10, 0)
    return f"differs at {at}: {had[begin : at + 20]!r} instead of {full[begin : at + 20]!r}"
