"""`context_management` of Messages: edits of a conversation that is too long."""

from dataclasses import replace
from typing import Any, Final

from gateway.dialects.chat.messages import read_object
from gateway.dialects.fields import (
    COUNT,
    integer,
    one_of,
    optional_object,
    read_list,
    read_strings,
    within,
)
from gateway.dialects.request import ChatRequest, ToolClearing
from gateway.dialects.unknown_members import name_once
from gateway.records.errors import invalid, must

CLEAR_TOOL_USES: Final = "clear_tool_uses_20250919"
CLEARED: Final = "[Old tool result content cleared]"
"""Replaces the result of a tool."""
TRIGGER_TOKENS: Final = 100_000
"""Tokens of a prompt above which results are cleared, unless the client names a trigger."""
KEPT_USES: Final = 3
"""Latest results that are kept, unless the client names their number."""
_MOST_EDITS: Final = 16
_MOST_NAMES: Final = 1024
_LONGEST_NAME: Final = 256


def read_clearing(value: object, ignored: list[str]) -> ToolClearing | None:
    """Return the edit that is served, if there is one, and name the others.

    Raises a BadRequestError.
    """
    management, path = optional_object(value, "context_management"), "context_management.edits"
    clearing = None
    for index, each in enumerate(read_list(management.get("edits"), path, most=_MOST_EDITS)):
        edit = read_object(each, f"{path}[{index}]")
        if (kind := edit.get("type")) != CLEAR_TOOL_USES:
            if edit.get("keep") != "all":  # That changes nothing.
                name_once(f"context_management.{kind or ''}".rstrip("."), ignored)
        elif clearing is not None:
            raise invalid(path, f"must have one edit of type {CLEAR_TOOL_USES}. Given: several.")
        else:
            clearing = _read(edit, f"{path}[{index}]")
    return clearing


def _read(edit: dict[str, Any], path: str) -> ToolClearing:
    kind, trigger = _amount(edit, "trigger", path, ("input_tokens", "tool_uses"))
    _, kept = _amount(edit, "keep", path, ("tool_uses",))
    _, at_least = _amount(edit, "clear_at_least", path, ("input_tokens",))
    inputs = edit.get("clear_tool_inputs")
    if not isinstance(inputs, bool | None):
        inputs = frozenset(_names(edit, "clear_tool_inputs", path))
    return ToolClearing(
        trigger=TRIGGER_TOKENS if trigger is None else trigger,
        is_triggered_by_uses=kind == "tool_uses",
        kept=KEPT_USES if kept is None else kept,
        at_least=at_least or 0,
        excluded=frozenset(_names(edit, "exclude_tools", path)),
        inputs=inputs or False,
    )


def _amount(
    edit: dict[str, Any], name: str, path: str, kinds: tuple[str, ...]
) -> tuple[str, int | None]:
    path = f"{path}.{name}"
    value = optional_object(edit.get(name), path)
    kind = one_of(value.get("type"), f"{path}.type", kinds) or kinds[0]
    if not value:
        return kind, None
    if (amount := integer(value.get("value"))) is None:
        raise must(f"{path}.value", "be an integer", value.get("value"))
    return kind, within(amount, f"{path}.value", COUNT)


def _names(edit: dict[str, Any], name: str, path: str) -> list[str]:
    place = f"{path}.{name}"
    return read_strings(edit.get(name), place, most=_MOST_NAMES, longest=_LONGEST_NAME)


def clear_tool_uses(chat: ChatRequest, edit: ToolClearing, tokens: int) -> tuple[ChatRequest, int]:
    """Return a chat of so many tokens without its older results, and how many were cleared."""
    names = {
        call["id"]: call["function"]["name"]
        for message in chat.messages
        for call in message.get("tool_calls", ())
    }
    results = [each for each in chat.messages if each["role"] == "tool"]
    if (len(results) if edit.is_triggered_by_uses else tokens) <= edit.trigger:
        return chat, 0
    older = results[: max(len(results) - edit.kept, 0)]
    ids = {
        each["tool_call_id"]
        for each in older
        if names.get(each["tool_call_id"]) not in edit.excluded
    }
    if not ids:
        return chat, 0

    def without_input(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        is_kept = call["id"] not in ids or (
            edit.inputs is not True and not (edit.inputs and function["name"] in edit.inputs)
        )
        return call if is_kept else {**call, "function": {**function, "arguments": {}}}

    messages = []
    for message in chat.messages:
        if message["role"] == "tool" and message["tool_call_id"] in ids:
            message = {**message, "content": CLEARED}  # noqa: PLW2901
        elif edit.inputs and "tool_calls" in message:
            calls = [without_input(call) for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}  # noqa: PLW2901
        messages.append(message)
    return replace(chat, messages=messages), len(ids)
