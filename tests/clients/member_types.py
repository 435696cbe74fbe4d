"""The members that OpenAI's and Anthropic's packages can send, read from their types.

As a program, it prints them as JSON for the packages of the Python that runs it:

    .venv/clients/python/bin/python tests/clients/member_types.py
"""

import json
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
)

from typing_extensions import is_typeddict

ROOTS: Final = {
    "completions": [("openai.types.completion_create_params", "CompletionCreateParamsStreaming")],
    "chats": [
        ("openai.types.chat.completion_create_params", "CompletionCreateParamsStreaming"),
    ],
    "responses": [
        ("openai.types.responses.response_create_params", "ResponseCreateParamsStreaming"),
        ("openai.types.responses.input_token_count_params", "InputTokenCountParams"),
    ],
    "messages": [
        ("anthropic.types.message_create_params", "MessageCreateParamsStreaming"),
        ("anthropic.types.message_count_tokens_params", "MessageCountTokensParams"),
        ("anthropic.types.beta.message_create_params", "MessageCreateParamsStreaming"),
        ("anthropic.types.beta.message_count_tokens_params", "MessageCountTokensParams"),
    ],
    "embeddings": [("openai.types.embedding_create_params", "EmbeddingCreateParams")],
    "transcriptions": [
        ("openai.types.audio.transcription_create_params", "TranscriptionCreateParamsStreaming")
    ],
    "translations": [("openai.types.audio.translation_create_params", "TranslationCreateParams")],
}
"""The types of bodies, by endpoint."""

Found = dict[str, set[str]]
"""Members by the place of their object, written as in `gateway.dialects.unknown_members`.

An object whose type is one of several is at `PLACE:TYPE`, and `content[]` is at any depth.
"""


def collect(roots: Iterable[tuple[str, str]]) -> Found:
    """Return the members of the bodies of one endpoint; the place of a body is empty."""
    found: Found = {}
    for module, name in roots:
        _walk(getattr(import_module(module), name), "", found, set())
    return found


def _walk(hint: Any, place: str, found: Found, seen: set[tuple[str, Any]]) -> None:
    for element, each in _objects(hint):
        at = _collapsed(place + element)
        if (at, each) in seen:
            continue
        seen.add((at, each))
        members = _members(each)
        kinds = _kinds(members)
        for kind in kinds or [""]:
            found.setdefault(f"{at}:{kind}" if kind else at, set()).update(members)
        prefix = at if len(kinds) != 1 else f"{at}:{kinds[0]}"
        for name, member in members.items():
            _walk(member, f"{prefix}.{name}".removeprefix("."), found, seen)


def _objects(hint: Any) -> Iterator[tuple[str, Any]]:
    """Yield the types of objects in a type, each after `[]` if they are in a list."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        for each in get_args(hint):
            yield from _objects(each)
    elif origin in (Annotated, Required, NotRequired):
        yield from _objects(get_args(hint)[0])
    elif is_typeddict(hint) or hasattr(hint, "model_fields"):
        yield "", hint
    elif origin is not None and origin is not Literal and not issubclass(origin, dict):
        for each in get_args(hint):
            yield from (("[]" + element, kind) for element, kind in _objects(each))


def _members(kind: Any) -> dict[str, Any]:
    if is_typeddict(kind):
        return typing.get_type_hints(kind, include_extras=True)
    return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}


def _kinds(members: dict[str, Any]) -> list[str]:
    """Return the values of the member that says which type an object has."""
    for name in ("type", "role"):
        values = [*_literals(members.get(name))]
        if values:
            return values
    return []


def _literals(hint: Any) -> Iterator[str]:
    origin = get_origin(hint)
    if origin is Literal:
        yield from get_args(hint)
    elif origin in (Annotated, Required, NotRequired):
        yield from _literals(get_args(hint)[0])
    elif origin in (Union, types.UnionType):
        for each in get_args(hint):
            yield from _literals(each)


def _collapsed(place: str) -> str:
    start, _, end = place.rpartition(".content[]")
    return f"content[]{end}" if start and "." not in end else place


if __name__ == "__main__":
    everything = {name: collect(roots) for name, roots in ROOTS.items()}
    json.dump(everything, sys.stdout, default=sorted)
