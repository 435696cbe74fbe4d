"""Styles of JSON: white space and escapes, which are lost when clients get an input as its values.

A prompt stays in the cache only if it repeats what the model wrote, so the id of a call names the
style of its input. A stream sends the id first: it waits for the beginning of the input.
"""

import json
import re
from typing import Any, Final

from gateway.dialects.wire import written_object

MOST_CHARACTERS: Final = 64
"""Characters of an input that decide its style."""

_BEGIN: Final = re.compile(r'\{(?:\n( {1,8}|\t))?"(?:[^"\\]|\\.)*":(.)', re.DOTALL)
_CHARACTERS: Final = re.compile(r"\\u([0-9a-f]{4})|\\[^u]|[^\x00-\x7f]")
_STYLED_ID: Final = re.compile(r"(?:toolu|call)_[0-9a-f]{24}([cst1-8])(u?)")
_COMPACT, _SPACED, _TABS, _ESCAPED = "cstu"


def style_of(text: str, *, is_whole: bool) -> str | None:
    """Return what the id of a call adds for the style of its input; empty without a known style.

    None means that more of the text decides. More text never changes a style.
    """
    text, is_whole = text[:MOST_CHARACTERS], is_whole or len(text) >= MOST_CHARACTERS
    begun, layout = _BEGIN.match(text), ""
    if begun is not None and begun[1]:
        layout = _TABS if begun[1] == "\t" else str(len(begun[1]))
    elif begun is not None:
        layout = _SPACED if begun[2] == " " else _COMPACT
    for found in _CHARACTERS.finditer(text if begun else ""):
        if found[1] and int(found[1], 16) >= 0x80:
            return layout + _ESCAPED
        if not found[0].startswith("\\"):
            return layout
    return layout if is_whole else None


def restyled(value: dict[str, Any], call_id: str) -> dict[str, Any]:
    """Return an input as the model wrote it, if the id of its call names the style."""
    named = _STYLED_ID.fullmatch(call_id)
    if not value or named is None:
        return value
    layout, is_escaped = named[1], bool(named[2])
    indent = int(layout) if layout.isdecimal() else "\t" if layout == _TABS else None
    separators = (",", ":") if layout == _COMPACT else None
    text = json.dumps(value, ensure_ascii=is_escaped, indent=indent, separators=separators)
    return written_object(value, text)
