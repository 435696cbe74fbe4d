"""Tool calls: which calls of the model a client receives, their ids, and OpenAI's format."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

import msgspec

from contract.messages import TEXT_ARGUMENT, CallPiece
from gateway.completions.structure.tools import parse_tool_calls

ID_BYTES = 12
_OPENING: Final = re.compile(rf'\s*\{{\s*"{TEXT_ARGUMENT}"\s*:\s*"')
_WHOLE: Final = re.compile(
    r'(?:[^"\\]+|\\[^u]|\\u(?:[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|(?![dD][89abAB])[0-9a-fA-F]{4}))*"
)
"""The characters of a JSON string that are complete."""
_MOST_UNREAD: Final = 4_096
"""Characters that are kept until more of the JSON shows what they mean."""


@dataclass(eq=False, slots=True, kw_only=True)
class ReturnedCalls:
    """Chooses the calls that a client receives, and numbers them without gaps."""

    allowed: tuple[str, ...]
    """Only calls of these tools are returned, if there are any."""
    returns_one: bool
    _indexes: dict[int, int | None] = field(default_factory=dict)
    """Index in the response of each call that the model wrote; None if it is not returned."""

    def of(self, pieces: list[CallPiece]) -> list[CallPiece]:
        """Return the pieces for the client, at most one for each call."""
        returned: list[CallPiece] = []
        for piece in merged(pieces):
            if piece.index not in self._indexes:
                self._indexes[piece.index] = self._new_index(piece)
            if (index := self._indexes[piece.index]) is not None:
                returned.append(msgspec.structs.replace(piece, index=index))
        return returned

    def grown(self, pieces: list[CallPiece], index: int) -> str:
        """Return what pieces add to the call of this index; empty if they may do anything else."""
        piece = pieces[0]
        is_only = len(pieces) == 1 and self._indexes.get(piece.index) == index
        return piece.arguments if is_only else ""

    def _new_index(self, first: CallPiece) -> int | None:
        if self.allowed and first.name not in self.allowed:
            return None
        # Clients expect indexes without gaps.
        index = sum(each is not None for each in self._indexes.values())
        return None if self.returns_one and index else index


def merged(pieces: Iterable[CallPiece]) -> list[CallPiece]:
    """Merge the pieces of each call into one piece."""
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    for piece in pieces:
        names[piece.index] = names.get(piece.index) or piece.name
        arguments.setdefault(piece.index, []).append(piece.arguments)
    return [CallPiece(index, name, "".join(arguments[index])) for index, name in names.items()]


def decoded(arguments: str, otherwise: Any = None) -> Any:
    """Return arguments as JSON; `otherwise` if the model has not written all of them."""
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return otherwise


def derived_id(prefix: str, request_id: str, *place: int) -> str:
    """Return the id of a part of a response. Every replay of the response produces the same id."""
    text = ":".join([request_id, *map(str, place)]).encode()
    return prefix + blake2b(text, digest_size=ID_BYTES).hexdigest()


def call_id(request_id: str, choice: int, call: int) -> str:
    """Return the id of a call in OpenAI's format."""
    return derived_id("call_", request_id, choice, call)


def custom_call(id_: str, name: str, text: str) -> dict[str, Any]:
    """Return a whole call of a tool that gets a text."""
    return {"id": id_, "type": "custom", "custom": {"name": name, "input": text}}


def function_call(id_: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a whole call."""
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_calls_in(text: str, request_id: str, choice: int) -> list[dict[str, Any]]:
    """Return the calls in the text of a completion's choice. The text is not changed."""
    return [
        function_call(call_id(request_id, choice, index), call.name, call.arguments)
        for index, call in enumerate(parse_tool_calls(text))
    ]


class TextArgument:
    """Reads a text from the JSON of a call's arguments while the JSON arrives."""

    def __init__(self) -> None:
        self._unread = ""
        self.is_open = False
        """Whether the text has begun."""
        self.text = ""
        """The text so far."""

    def add(self, piece: str) -> str:
        """Add JSON. Return what it adds to the text."""
        if len(self._unread) > _MOST_UNREAD:
            return ""  # It has another form, which is read at its end.
        self._unread += piece
        if not self.is_open:
            found = _OPENING.match(self._unread)
            if found is None:
                return ""
            self.is_open, self._unread = True, self._unread[found.end() :]
        found = _WHOLE.match(self._unread)
        new = "" if found is None else decoded(f'"{found[0]}"', "")
        if new:
            self._unread = self._unread[len(found[0] if found else "") :]
            self.text += new
        return new

    def finish(self, arguments: str) -> str:
        """Return the rest of the text, if all arguments have arrived."""
        text = text_argument(arguments)
        rest = text[len(self.text) :] if text.startswith(self.text) else ""
        self.text += rest
        return rest


def text_argument(arguments: str) -> str:
    """Return the text in a call's arguments; the arguments themselves if they have another form."""
    value = decoded(arguments)
    if isinstance(value, dict) and isinstance(value.get(TEXT_ARGUMENT), str):
        text: str = value[TEXT_ARGUMENT]
        return text
    reader = TextArgument()
    reader.add(arguments)
    return reader.text if reader.is_open else arguments
