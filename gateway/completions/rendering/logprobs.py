"""Log-probabilities: four parallel lists with text offsets in completions, objects in chats."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from contract.messages import Delta, TokenLogprob, decode_logprobs
from contract.pieces import REPLACEMENT
from gateway.dialects.request import GenerationRequest

LOGPROB_FLOOR = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""

_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class LogprobLists:
    """The `logprobs` object of a choice or chunk."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    token_ids: list[int] | None = None
    """A fifth list, as in Fireworks' API, if token ids were requested."""
    before: dict[str, bytes] | None = None
    """Encoded lists (see `encoded`) of the echoed prompt, which come first."""
    content: list["ScoredToken"] | None = None
    """The tokens as objects in place of all lists, or None."""

    def extend(
        self,
        logprobs: Sequence[TokenLogprob],
        token_ids: Sequence[int],
        request: GenerationRequest,
        *,
        base: int,
    ) -> None:
        """Append tokens; `base` is where their text starts in the returned text."""
        names_by_id, scored = request.names_tokens_by_id, zip(token_ids, logprobs, strict=False)
        if request.has_scored_objects:
            self.content = scored_tokens(
                scored, alternatives=request.logprobs or 0, names_by_id=names_by_id, base=base
            )
            return
        if names_by_id:
            logprobs = named_by_id(logprobs, token_ids)
        for entry, token_id in zip(logprobs, token_ids, strict=False):
            self.tokens.append(entry.token)
            self.token_logprobs.append(
                None if entry.logprob is None else max(entry.logprob, LOGPROB_FLOOR)
            )
            self.top_logprobs.append(None if entry.top is None else _by_key(entry, token_id))
            self.text_offset.append(base + entry.offset)
        if request.return_token_ids:
            self.token_ids = [*(self.token_ids or []), *token_ids]

    @property
    def is_empty(self) -> bool:
        """Whether there is no token, echoed or new."""
        return not self.tokens and not self.content and not self.before

    def body(self) -> dict[str, Any]:
        """Return the lists in the API's format."""
        lists = self._lists()
        if not self.before:
            return lists
        return {name: msgspec.Raw(b"[%b]" % items) for name, items in self.encoded().items()}

    def encoded(self) -> dict[str, bytes]:
        """Return the JSON of each list without its brackets, to be placed before other items."""
        before = self.before or {}
        return {name: _after(before.get(name, b""), items) for name, items in self._lists().items()}

    def _lists(self) -> dict[str, list[Any]]:
        if self.content is not None:
            return {"content": self.content}
        lists: dict[str, list[Any]] = {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
        if self.token_ids is not None:
            lists["token_ids"] = self.token_ids
        return lists


def named_by_id(logprobs: Sequence[TokenLogprob], token_ids: Sequence[int]) -> list[TokenLogprob]:
    """Return tokens with vLLM's names `token_id:N` instead of their texts."""
    return [
        TokenLogprob(
            token_name(token_id),
            entry.logprob,
            entry.offset,
            entry.top
            and [
                (token_name(other), logprob)
                for other, (_, logprob) in zip(entry.top_ids, entry.top, strict=True)
            ],
            entry.top_ids,
        )
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]


def token_name(token_id: int) -> str:
    """Return vLLM's name of a token."""
    return f"token_id:{token_id}"


def placed(entries: Sequence[TokenLogprob], text: str) -> list[TokenLogprob]:
    """Return the tokens of an echoed prompt with their parts of its text, which join to it.

    The tokens may have more text: the begin-of-text and infill tokens that the client did not send.
    The text may have more, such as an incomplete character at its end. A tokenizer may also
    normalize the text.
    """
    decoded = "".join([entry.token for entry in entries])
    if decoded == text:
        shift = entries[0].offset if entries else 0
        return [msgspec.structs.replace(each, offset=each.offset - shift) for each in entries]
    head, rest = decoded.find(text.rstrip(REPLACEMENT)), 0
    if head < 0:
        head, same = 0, _length_of_same_start(decoded, text)
        rest = _length_of_same_start(decoded[same:][::-1], text[same:][::-1])
    result: list[TokenLogprob] = []
    start = end = 0
    for number, entry in enumerate(entries, 1):
        end += len(entry.token)
        if number == len(entries):
            stop = len(text)
        elif rest and end >= len(decoded) - rest:
            stop = len(text) - len(decoded) + end
        else:
            stop = max(0, min(end - head, len(text) - rest))
        result.append(msgspec.structs.replace(entry, token=text[start:stop], offset=start))
        start = stop
    return result


def _length_of_same_start(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _after(before: bytes, items: list[Any]) -> bytes:
    separator = b"," if before and items else b""
    return before + separator + _json(items)[1:-1]


def _by_key(entry: TokenLogprob, token_id: int) -> dict[str, float]:
    """Return the alternatives of a token under distinct keys: texts if possible.

    A part of a character is called by its bytes, as in OpenAI's API. Of several tokens with the
    same text, one has that key: the token itself, or else the likeliest.
    """
    by_key: dict[str, float] = {}
    for (text, logprob), other in zip(entry.top or (), entry.top_ids, strict=True):
        key = text
        if other == token_id:
            key = entry.token
        elif part := entry.parts.get(other):
            key = "bytes:" + "".join(f"\\x{byte:02x}" for byte in part)
        if key in by_key or (other != token_id and key == entry.token):
            key = token_name(other)
        by_key[key] = max(logprob, LOGPROB_FLOOR)
    return by_key


class Alternative(msgspec.Struct, frozen=True):
    """A candidate token at a position."""

    token: str
    logprob: float
    bytes: list[int]
    """Of a part of a character its own bytes."""
    token_id: int | UnsetType = UNSET


class ScoredToken(msgspec.Struct, frozen=True):
    """A token of the response."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Alternative]
    """The likeliest tokens at its position, at most as many as requested."""
    token_id: int | UnsetType = UNSET
    text_offset: int | UnsetType = UNSET


def scored_tokens(
    scored: Iterable[tuple[int, TokenLogprob]],
    *,
    alternatives: int,
    names_by_id: bool = False,
    base: int | None = None,
) -> list[ScoredToken]:
    """Return tokens in the API's format, with at most `alternatives` top tokens each.

    With `names_by_id`, `bytes` are those of the token's text and of the names of top tokens, as in
    vLLM. With `base`, where their text starts, they have ids and offsets, as Fireworks has them.
    """
    return [
        ScoredToken(
            entry.token,
            # Only the first token of a prompt has no log-probability.
            max(entry.logprob or 0.0, LOGPROB_FLOOR),
            _bytes(original.token, original.parts.get(token_id)),
            [
                Alternative(
                    token,
                    max(logprob, LOGPROB_FLOOR),
                    _bytes(token, entry.parts.get(id_)),
                    UNSET if base is None else id_,
                )
                for (token, logprob), id_ in zip(
                    (entry.top or ())[:alternatives], original.top_ids[:alternatives], strict=True
                )
            ],
            UNSET if base is None else token_id,
            UNSET if base is None else base + original.offset,
        )
        for token_id, original in scored
        for entry in (named_by_id([original], [token_id]) if names_by_id else [original])
    ]


def encoded_tokens(
    scored: Iterable[tuple[int, TokenLogprob]], *, alternatives: int, names_by_id: bool = False
) -> bytes:
    """Return tokens in the API's format as JSON without brackets, to be placed in an array.

    Encode them when they arrive: the tokens of a whole response take a hundred times the memory,
    and would hold the event loop.
    """
    return _json(scored_tokens(scored, alternatives=alternatives, names_by_id=names_by_id))[1:-1]


class ContentTokens:
    """Finds the tokens whose texts join to the content of a choice.

    Others are marks, reasoning, calls, what a stop string has removed, and the end of the text.
    """

    def __init__(self) -> None:
        self._tokens: list[tuple[int, TokenLogprob]] = []
        """Tokens whose text has not arrived, or that have none in the content."""
        self._text = ""
        """Content at the beginning of the first of these tokens."""

    def take(self, delta: Delta) -> list[tuple[int, TokenLogprob]]:
        """Return the tokens of a delta's content, some of which may have arrived before it."""
        scored = zip(delta.token_ids, decode_logprobs(delta.logprobs), strict=False)
        tokens = [*self._tokens, *scored][delta.reasoning_tokens :]
        text, found, start = self._text + delta.text, list[tuple[int, TokenLogprob]](), 0
        for number, (token_id, entry) in enumerate(tokens, 1):
            if not text:
                break
            said = _beginning(text, entry.token, is_last=delta.finish_reason is not None)
            if said:
                # Tokens without text are parts of a character that this token completes.
                found += [each for each in tokens[start : number - 1] if not each[1].token]
                found.append((token_id, msgspec.structs.replace(entry, token=said)))
                text, start = text[len(said) :], number
            elif entry.token.startswith(text):
                break
        else:
            # Text never comes before its tokens.
            start, text = len(tokens), ""
        self._tokens, self._text = ([], "") if delta.calls else (tokens[start:], text)
        return found


def _beginning(text: str, token: str, *, is_last: bool) -> str:
    """Return what a text begins with of a token: all, what is left of it, or nothing.

    A stop string removes the end of the last token, and some parsers white space before content.
    """
    if is_last and token.startswith(text):
        return text
    return next((said for said in (token, token.lstrip()) if said and text.startswith(said)), "")


def logprobs_body(encoded: Iterable[bytes]) -> dict[str, Any]:
    """Return the `logprobs` object of a choice or chunk with encoded tokens."""
    return {"content": msgspec.Raw(b"[%b]" % b",".join(filter(None, encoded))), "refusal": None}


def _bytes(text: str, part: bytes | None) -> list[int]:
    return list(part or text.encode())
