r"""Translate regular expressions of JSON Schema, which are those of ECMA-262, for the compiler.

The compiler reads Rust's syntax and has no look-around. A look-ahead at one character before a set
has an equivalent: `(?!-)[a-z-]+` is `[[a-z-]&&[^-]][a-z-]*`. Anchors, `\d`, `\w` and `\p{...}` mean
the same to the compiler.
"""

import re
from collections.abc import Iterator
from typing import Final

from gateway.completions.structure.errors import RefusedError

LOOKS_AROUND: Final = re.compile(r"\(\?<?[=!]")
_HEX: Final = "[0-9a-fA-F]"
_TOKEN: Final = re.compile(
    rf"""
    (?P<look>\(\?<?[=!])
    | (?P<set>\[\^?(?:\\.|[^\]\\])*\])
    | (?P<escape>\\(?:
        u\{{{_HEX}+\}} | u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}} | u{_HEX}{{4}}
        | x{_HEX}{{2}} | c[A-Za-z] | [pP]\{{[^}}]*\}} | k<[^>]*> | [1-9]\d* | .))
    | (?P<count>\{{(?P<least>\d{{1,9}})(?:,(?P<most>\d{{0,9}}))?\}})
    | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_IN_SET: Final = re.compile(r"\\(?:u\{.*?\}|c[A-Za-z]|.)|.", re.DOTALL)
_OPERATORS: Final = frozenset("^$()|*+?{}")
_COUNTS: Final = {"+": ("1", ""), "*": ("0", ""), "?": ("0", "1")}
"""The least and the most characters; "" if there is no most."""
_BOUNDARIES: Final = frozenset("bB")
_STARTS: Final = frozenset("A")
_ENDS: Final = frozenset("zZ")
_LOOK_AROUND: Final = (
    "a regular expression must not use look-around. Describe the permitted texts, or use several "
    "patterns in 'allOf'"
)


def translated(expression: str) -> str:
    """Return an equivalent that the compiler reads, unless it is invalid. Raises RefusedError."""
    if "\0" in expression:
        raise RefusedError("a regular expression must not contain a NUL character")
    return "".join(_translated(list(_TOKEN.finditer(expression))))


def _translated(tokens: list[re.Match[str]]) -> Iterator[str]:
    place = 0
    while place < len(tokens):
        token = tokens[place]
        place += 1
        match token.lastgroup:
            case "look":
                text, place = _without_look(tokens, place - 1)
                yield text
            case "set":
                yield _set(token[0])
            case "escape":
                yield _escape(token[0])
            case "other" if token[0] == "{":
                yield r"\{"
            case _:
                yield token[0]


def _without_look(tokens: list[re.Match[str]], place: int) -> tuple[str, int]:
    """Return the equivalent of a look-ahead and of the set after it, and the place after both."""
    is_negative = tokens[place][0] == "(?!"
    if tokens[place][0] not in ("(?!", "(?="):
        raise RefusedError(_LOOK_AROUND)
    seen = []
    while True:
        seen.append(_one(tokens, place + 1))
        place += 2
        end = tokens[place][0] if place < len(tokens) else ""
        if end == ")":
            break
        if end != "|":
            raise RefusedError(_LOOK_AROUND)
    each = _one(tokens, place + 1)
    place += 2
    first = f"[{each}&&[{'^' * is_negative}{''.join(seen)}]]"
    count = tokens[place] if place < len(tokens) else None
    if count is None or (count[0] not in _COUNTS and count.lastgroup != "count"):
        return first, place
    least, most = _COUNTS.get(count[0]) or (count["least"], count["most"])
    place += 1
    further = "" if most is None else f"{int(most) - 1}" if most else ""
    rest = f"{each}{{{max(int(least) - 1, 0)}{'' if most is None else ',' + further}}}"
    if int(least):
        return first + rest, place
    # No character need follow, but then nothing may.
    if most == "0" or place == len(tokens) or tokens[place][0] != "$":
        raise RefusedError(_LOOK_AROUND)
    return f"(?:{first}{rest})?" if is_negative else first + rest, place


def _one(tokens: list[re.Match[str]], place: int) -> str:
    """Return the set of the one character that a token matches."""
    token = tokens[place] if place < len(tokens) else None
    match token and token.lastgroup, token[0] if token else "":
        case "set", text:
            return _set(text)
        case "escape", text if text[1] not in _BOUNDARIES | _STARTS | _ENDS:
            return f"[{_escape(text)}]"
        case "other", ".":
            return r"[^\n]"
        case "other", text if text not in _OPERATORS:
            return f"[{_in_set(text)}]"
        case _:
            raise RefusedError(_LOOK_AROUND)


def _set(text: str) -> str:
    start, within = ("[^", text[2:-1]) if text.startswith("[^") else ("[", text[1:-1])
    if not within and start == "[^":
        return r"[\s\S]"
    items: list[str] = []
    for found in _IN_SET.finditer(within):
        is_second = found[0] == "-" and items[-1:] == ["-"]
        items.append(r"\-" if is_second else _in_set(found[0]))
    return f"{start}{''.join(items)}]"


def _in_set(text: str) -> str:
    """Return a character of a set, or an escape. Rust has sets in sets, and operators on them."""
    if text == r"\b":
        return r"\x08"
    if text.startswith("\\") and text[1] not in _STARTS | _ENDS:
        return _escape(text)
    return f"\\{text}" if text in "[&~^]" else text


def _escape(text: str) -> str:
    kind, rest = text[1], text[2:]
    if kind in "k123456789":
        raise RefusedError("a regular expression must not use backreferences")
    if kind in _BOUNDARIES:
        raise RefusedError(
            rf"a regular expression must not use the word boundary \{kind}. Name the characters "
            "before and after the word"
        )
    if kind in _STARTS | _ENDS:
        return "^" if kind in _STARTS else "$"
    if kind == "c" and rest:
        return rf"\x{ord(rest) & 31:02x}"
    if kind == "0":
        return r"\x00"
    if kind == "u" and "\\" in rest:
        pair = "".join(chr(int(half, 16)) for half in rest.split(r"\u"))
        return rf"\u{{{ord(pair.encode('utf-16', 'surrogatepass').decode('utf-16')):x}}}"
    return kind if kind in "<>" else text
