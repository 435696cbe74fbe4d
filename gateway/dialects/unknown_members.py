"""Members of the objects inside of bodies: which are read, and which have no effect.

A member that a response or a client's history has, such as an id or a status, is accepted. Any
other member is rejected or named in a header, as a parameter of the body itself would be.
"""

import re
from itertools import islice
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

from gateway.dialects.parameters import MAX_NAMED, ROWS, Endpoints, RefusedParameter

_TABLE: Final = """
both: stream_options include_usage include_obfuscation continuous_usage_stats
both: repetition_detection max_pattern_size min_pattern_size min_count
both: prompt_cache_options | comparison_response_id
both: grammar type value
both: response_format type schema value json_schema grammar
both: response_format:wrapper name schema value strict
both: structured_outputs json json_object regex choice grammar
completions: prompt prompt_string
completions: tools[] type function
completions: tools[].function name description parameters strict
completions: tool_choice type function name
completions: tool_choice.function name
completions: input_extra[] filename text
chats: messages[]:user role content name
chats: messages[]:assistant role content name refusal reasoning reasoning_content tool_calls
  function_call partial | annotations
chats: messages[]:tool role content name tool_call_id
chats: messages[]:assistant.tool_calls[] id type function custom | index
chats: messages[]:assistant.tool_calls[].custom name input
chats: messages[]:assistant.tool_calls[].function name arguments
chats: messages[]:assistant.function_call name arguments
chats: content[]:text type text
chats: content[]:refusal type refusal
chats: content[]:file type file
chats: content[]:file.file filename file_data
chats: content[]:image_url type image_url
chats: content[]:image_url.image_url url
chats: tools[] type function custom
chats: tools[].custom name description format
chats: tools[].custom.format type syntax definition grammar
chats: tools[].custom.format.grammar syntax definition
chats: tools[].function name description parameters strict
chats: functions[] name description parameters strict
chats: tool_choice type function custom name allowed_tools mode tools
chats: tool_choice.custom name
chats: tool_choice.function name
chats: tool_choice.allowed_tools mode tools
chats: tool_choice.allowed_tools.tools[] type function custom name
chats: tool_choice.allowed_tools.tools[].custom name
chats: tool_choice.allowed_tools.tools[].function name
chats: tool_choice.tools[] type function custom name
chats: tool_choice.tools[].custom name
chats: tool_choice.tools[].function name
chats: function_call name
chats: thinking type budget_tokens
chats: reasoning effort enabled max_tokens exclude
responses: input[]:message type role content | id status phase
responses: input[]:agent_message type author content | id recipient
responses: input[]:reasoning type summary content encrypted_content | id status
responses: input[]:function_call type call_id namespace name arguments | id status caller async
responses: input[]:function_call_output type call_id output | id status caller namespace name
responses: input[]:custom_tool_call type call_id namespace name input | id status caller async
responses: input[]:custom_tool_call_output type call_id output | id status caller namespace name
responses: input[]:local_shell_call type call_id id action | status
responses: input[]:local_shell_call_output type call_id id output | status
responses: input[]:shell_call type call_id id action | status caller environment
responses: input[]:shell_call_output type call_id id output | status caller max_output_length
responses: input[]:tool_search_call type call_id arguments | id status execution
responses: input[]:tool_search_output type call_id tools | id status execution
responses: input[]:additional_tools type tools | id role
responses: content[]:input_text type text
responses: content[]:output_text type text | annotations logprobs
responses: content[]:text type text
responses: content[]:summary_text type text
responses: content[]:reasoning_text type text
responses: content[]:refusal type refusal
responses: content[]:input_file type filename file_data file_url | detail
responses: content[]:input_image type image_url
responses: tools[]:function type name description parameters strict | defer_loading
responses: tools[]:custom type name description format | defer_loading
responses: tools[]:namespace type name description tools
responses: tools[]:tool_search type description parameters execution
responses: tools[]:local_shell type
responses: tools[]:shell type
responses: tools[]:custom.format type syntax definition grammar
responses: tools[]:custom.format.grammar syntax definition
responses: tool_choice type namespace name mode tools
responses: tool_choice.tools[] type namespace name
responses: text format verbosity
responses: text.format type name schema strict
responses: reasoning effort summary generate_summary
responses: prompt_cache_options comparison_response_id
messages: messages[] role content clear_at | cache_control
messages: content[]:text type text | cache_control citations
messages: content[]:image type source | cache_control
messages: content[]:document type source title context | cache_control
messages: content[]:search_result type source title content | cache_control
messages: content[]:tool_reference type tool_name | cache_control
messages: content[]:tool_addition type tool tools | cache_control
messages: content[]:tool_addition.tool type name definition
messages: content[]:tool_removal type tool tools | cache_control
messages: content[]:tool_removal.tool type name
messages: content[]:tool_use type id name input | cache_control caller toolset_name
messages: content[]:tool_result type tool_use_id content is_error | cache_control toolset_name
messages: content[]:thinking type thinking signature | cache_control
messages: content[]:redacted_thinking type data | cache_control
messages: content[]:image.source type media_type data url
messages: content[]:document.source type media_type data content url
messages: tools[] type name description input_schema input_examples strict | cache_control
  defer_loading eager_input_streaming
messages: tool_choice type name disable_parallel_tool_use
messages: thinking type budget_tokens display
messages: output_config effort format
messages: output_config.format type schema
messages: output_format type schema
messages: metadata user_id
messages: diagnostics previous_message_id
messages: context_management edits
messages: context_management.edits[] type trigger keep clear_at_least exclude_tools
  clear_tool_inputs
messages: context_management.edits[].trigger type value
messages: context_management.edits[].keep type value
messages: context_management.edits[].clear_at_least type value
"""
"""Endpoints and objects, the members that are read, and those without effect after `|`.

An object whose members depend on its type or role is `PLACE:TYPE`. `content[]` is at any depth.
"""

_UNKNOWN: Final = RefusedParameter(Endpoints.NONE, (), "")
_LONGEST_LIST: Final = 100_000
"""Most objects that are read from a list."""


class Members(NamedTuple):
    """The members of a kind of object."""

    read: tuple[str, ...]
    without_effect: tuple[str, ...]
    """Members that clients and responses have in each history, and that are not named."""
    known: frozenset[str]
    rows: dict[str, RefusedParameter]
    """Members that are rejected, or named for some values only."""
    inner: dict[str, "Members"]
    """Objects, and lists of objects, that are members."""

    def check(self, value: object, path: str, ignored: list[str]) -> None:
        """Add the paths of members without effect to `ignored`.

        `value` is the object at `path`, or a list with such objects; other values have no members.
        `ignored` gets at most MAX_NAMED entries. Raises UnsupportedParameterError for a rejected
        member.
        """
        if isinstance(value, dict):
            if not value.keys() <= self.known:
                self._check_unread(value, path, ignored)
            for name in self.inner:
                if (given := value.get(name)) is not None:
                    self.inner[name].check(given, f"{path}.{name}", ignored)
        elif isinstance(value, list):
            known, inner = self.known, self.inner.keys()
            for index, each in enumerate(islice(value, _LONGEST_LIST)):
                # Most have nothing to check, and a call for each would take three times as long.
                if isinstance(each, dict) and not (
                    known.issuperset(each) and inner.isdisjoint(each)
                ):
                    self.check(each, f"{path}[{index}]", ignored)

    def _check_unread(self, value: dict[str, Any], path: str, ignored: list[str]) -> None:
        for name, given in value.items():
            if given is None or name in self.known:
                continue
            row = self.rows.get(name)
            if row is not None and row.endpoints:
                row.check(f"{path}.{name}", given)
            elif len(ignored) < MAX_NAMED and not (row or _UNKNOWN).accepts(given):
                ignored.append(f"{path}.{name}")


def name_once(name: str, ignored: list[str]) -> None:
    """Add a name to `ignored`, which gets at most MAX_NAMED entries."""
    if name not in ignored and len(ignored) < MAX_NAMED:
        ignored.append(name)


def _objects() -> dict[Endpoints, dict[str, Members]]:
    objects: dict[Endpoints, dict[str, Members]] = {}
    for line in re.split(r"\n(?! )", _TABLE.strip()):
        head, _, others = line.partition(" | ")
        endpoints, name, *read = head.split()
        endpoint, without_effect = Endpoints[endpoints[:-1].upper()], others.split()
        rows = {
            full.removeprefix(f"{name}."): row
            for full, row in ROWS
            if full.rpartition(".")[0] == name and (endpoint & row.endpoints or not row.endpoints)
        }
        known = frozenset((*read, *without_effect))
        members = Members(tuple(read), tuple(without_effect), known, rows, {})
        outer, _, member = name.rpartition(".")
        if outer:
            objects[endpoint][outer].inner[member.removesuffix("[]")] = members
        objects.setdefault(endpoint, {})[name] = members
    return objects


OBJECTS: Final = _objects()
"""Objects in bodies, by the endpoints of the bodies and by their names."""
_PARAMETERS: Final = {
    endpoints: {
        name.removesuffix("[]"): each
        for name, each in named.items()
        if name.removesuffix("[]").isidentifier()
    }
    for endpoints, named in OBJECTS.items()
}
"""The objects, and lists of objects, that are parameters."""


def unread_inside(body: BaseModel, endpoints: Endpoints) -> list[str]:
    """Return the paths of members without effect of the objects that are parameters of a body.

    Raises UnsupportedParameterError for a rejected member.
    """
    ignored: list[str] = []
    for name, members in _PARAMETERS[endpoints].items():
        if (value := getattr(body, name, None)) is not None:
            given = value.model_extra if isinstance(value, BaseModel) else value
            members.check(given, name, ignored)
    return ignored


def by_type(endpoints: Endpoints, place: str) -> dict[str, Members]:
    """Return the objects at a place whose members depend on their type, by their types."""
    named = OBJECTS[endpoints].items()
    return {name.split(":")[1]: each for name, each in named if name.startswith(f"{place}:")}
