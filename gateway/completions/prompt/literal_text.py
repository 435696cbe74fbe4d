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


@lru_cache(maxsize=256)
def _special_texts(tokenizer: Tokenizer, allowed: tuple[str, ...]) -> re.Pattern[str]:
    added = tokenizer.get_added_tokens_decoder().values()
    texts = {each.content for each in added if len(each.content) > 1 and each.content.strip()}
    # The longest first, as the tokenizer takes them.
    ordered = sorted(texts.difference(allowed), key=len, reverse=True)
    flags = re.NOFLAG if tokenizer.normalizer is None else re.IGNORECASE
    return re.compile("|".join(map(re.escape, [*ordered, MARK])), flags)


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
    borders = [index for index, token_id in enumerate(ids) if token_id in added]
    found: list[int] = []
    begin, first = 0, 0
    for border in [*borders, len(ids)]:
        end = encoding.offsets[border][0] if border < len(ids) else len(text)
        stretch = text[begin:end]
        if MARK in stretch:
            [inside] = inner.encode_batch_fast([unmarked(stretch)], add_special_tokens=False)
            found += inside.ids
        else:
            found += ids[first:border]
        if border < len(ids):
            found.append(ids[border])
            begin, first = encoding.offsets[border][1], border + 1
    return found


def _protected(value: Any, special: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return special.sub(_marked, value)
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
    text = match[0]
    return MARK * 2 if text == MARK else text[0] + MARK + text[1:]
