"""Text is text: special tokens in a client's texts are not parsed when a chat is tokenized.

A tool result or a file may contain the text of a special token, such as the end of a message. As a
token it would let the file speak for the system. Before a template renders a chat, `protected`
breaks these texts with a mark, so that in the rendered prompt only the template's own special
tokens are parsed. `token_ids` encodes what was protected without special tokens.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

from tokenizers import Tokenizer

from gateway.dialects.wire import WrittenObject

MARK: Final = "\ufdd0"
"""A code point that is not a character. In the client's texts it is doubled."""

_MARKED: Final = re.compile(f"{MARK}({MARK}?)")


def pattern_of(texts: Iterable[str]) -> str:
    """Return a regular expression that finds the longest of several texts at a place.

    Texts with a common beginning share it, so that hundreds of tokens take no longer than one.
    """
    by_first: dict[str, list[str]] = {}
    for text in sorted(set(texts)):
        by_first.setdefault(text[:1], []).append(text[1:])
    is_end = by_first.pop("", None) is not None
    branches = [re.escape(first) + pattern_of(rest) for first, rest in by_first.items()]
    pattern = "|".join(branches)
    if len(branches) > 1 or (is_end and branches):
        pattern = f"(?:{pattern})"
    return f"{pattern}?" if is_end and branches else pattern


@lru_cache(maxsize=256)
def _special_texts(tokenizer: Tokenizer, allowed: tuple[str, ...]) -> re.Pattern[str]:
    added = tokenizer.get_added_tokens_decoder().values()
    texts = {each for each in added if len(each.content) > 1 and each.content.strip()}
    is_changed = tokenizer.normalizer is not None
    # Others are found in the normalized text, in which their case may be another.
    exact = {each.content for each in texts if not (is_changed and each.normalized)}
    others = {each.content for each in texts}.difference(exact, allowed)
    parts = [pattern_of(exact.difference(allowed)), f"(?i:{pattern_of(others)})" if others else ""]
    return re.compile("|".join(filter(None, parts)) or "(?!)")


def protected(value: Any, tokenizer: Tokenizer, *, allowed: Iterable[str] = ()) -> Any:
    """Return a JSON value whose texts contain no special tokens but the `allowed` ones.

    Values without special tokens are returned as they are, not copied.
    """
    return _protected(value, _special_texts(tokenizer, tuple(allowed)))


def unmarked(text: str) -> str:
    """Return a text as its client wrote it."""
    return _MARKED.sub(r"\1", text) if MARK in text else text


def token_ids(text: str, tokenizer: Tokenizer, inner: Tokenizer) -> list[int]:
    """Return the ids of a rendered text, without the tokenizer's own special tokens around it.

    `inner` encodes the text between two special tokens without parsing any.
    """
    # Unlike the batch functions for texts, it finds the places of the tokens.
    [encoding] = tokenizer.encode_batch([text], add_special_tokens=False)
    ids: list[int] = encoding.ids
    added = tokenizer.get_added_tokens_decoder()
    # The library makes a list of all places each time it is asked for them.
    offsets = [*encoding.offsets, (len(text), len(text))]
    borders = [index for index, token_id in enumerate(ids) if token_id in added]
    found: list[int] = []
    begin, first = 0, 0
    for border in [*borders, len(ids)]:
        end = offsets[border][0]
        stretch = text[begin:end]
        if MARK in stretch:
            [inside] = inner.encode_batch_fast([unmarked(stretch)], add_special_tokens=False)
            found += inside.ids
        else:
            found += ids[first:border]
        if border < len(ids):
            found.append(ids[border])
            begin, first = offsets[border][1], border + 1
    return found


def _protected(value: Any, special: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        # Doubled before others are added; a search for the tokens alone is ten times as fast.
        return special.sub(_marked, value.replace(MARK, MARK * 2) if MARK in value else value)
    if isinstance(value, dict):
        items = {_protected(k, special): _protected(v, special) for k, v in value.items()}
        if items == value:
            return value
        if isinstance(value, WrittenObject):
            return WrittenObject(items, _protected(value.text, special))
        return items
    if isinstance(value, list):
        entries = [_protected(each, special) for each in value]
        return value if entries == value else entries
    return value


def _marked(match: re.Match[str]) -> str:
    return match[0][0] + MARK + match[0][1:]
