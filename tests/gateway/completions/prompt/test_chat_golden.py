"""Templates are rendered exactly as transformers renders them."""

from datetime import UTC, datetime
from functools import cache
from typing import Any

import pytest

from contract.messages import ContentFormat
from gateway.completions.prompt.conversation import for_template, tools_for_template
from gateway.completions.prompt.templates.template import ChatTemplate, RefusedMessagesError
from tests.gateway.completions.prompt.chatting import CHATS, SOURCES, SPECIAL_TOKENS, TOOL, form_of
from tests.support.cases import all_cases

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "history": {"add_generation_prompt": False},
    "tools": {"tools": tools_for_template([TOOL])},
    "arguments": {"enable_thinking": False, "reasoning_effort": "high"},
}


@pytest.fixture(scope="module")
def reference() -> Any:
    """What renders templates in transformers, which takes seconds to import."""
    return pytest.importorskip("transformers.utils.chat_template_utils")


@cache
def template_of(name: str) -> ChatTemplate:
    """Return a template, compiled once."""
    return ChatTemplate(SOURCES[name])


def messages_for(name: str, chat: str) -> list[dict[str, Any]]:
    """Return a chat as the template of that name takes it."""
    return for_template(
        list(CHATS[chat]),
        form_of(name).content_format,
        image_token="",
        tool_parser="mistral" if name == "ids" else "",
        has_developer_role=template_of(name).has_developer_role,
    )


@all_cases("variant", VARIANTS)
@all_cases("name", SOURCES)
def test_texts_are_those_of_transformers(reference: Any, name: str, variant: str) -> None:
    template = template_of(name)
    differing, rendered = [], 0
    for chat in CHATS:
        variables: dict[str, Any] = {
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
            **SPECIAL_TOKENS,
            **VARIANTS[variant],
        }
        messages = messages_for(name, chat)
        try:
            [expected], _ = reference.render_jinja_template(
                [messages], chat_template=SOURCES[name], **variables
            )
            rendered += 1
        except Exception as error:  # A template fails as it likes.
            expected = type(error)
        try:
            given: Any = template.render(
                {**variables, "messages": messages},
                now=datetime.now(UTC).astimezone(),
                most_characters=10**6,
            )
        except RefusedMessagesError:
            given = None
        if given != (None if isinstance(expected, type) else expected):
            differing.append((chat, expected, given))
    assert differing == []
    assert rendered >= len(CHATS) // 2


def test_conversations_have_the_form_that_vllm_gives_them() -> None:
    calls = messages_for("chatml_tools", "calls")
    arguments = [call["function"]["arguments"] for call in calls[1]["tool_calls"]]
    assert arguments == [{"city": "Zürich"}, {"city": "<Oslo>"}]
    assert calls[1]["content"] == ""
    assert [message["content"] for message in calls[2:]] == ["sun", "rain"]
    parts = messages_for("demo", "calls")
    assert [message["content"] for message in parts] == [
        [{"type": "text", "text": CHATS["one"][0]["content"]}],
        [],
        "sun",
        "rain",
    ]
    assert messages_for("chatml_tools", "parts")[0]["content"] == "a\nb"
    thought = messages_for("chatml_tools", "reasoning")[1]
    assert thought["reasoning"] == thought["reasoning_content"] == "2 + 2\nis 4"
    assert messages_for("chatml_tools", "name")[0]["name"] == "ann"


@all_cases("form", ContentFormat)
def test_developer_messages_become_system_messages_if_the_template_needs_it(
    form: ContentFormat,
) -> None:
    def converted(chat: str, *, has_developer_role: bool) -> list[dict[str, Any]]:
        return for_template(
            list(CHATS[chat]),
            form,
            image_token="",
            tool_parser="",
            has_developer_role=has_developer_role,
        )

    [first, *others] = converted("developers", has_developer_role=False)
    assert first == {"role": "system", "content": "Be brief. \n\nBe kind."}
    assert [message["role"] for message in others] == ["user", "assistant", "user"]
    assert converted("developer", has_developer_role=False)[0]["role"] == "system"
    kept = converted("developers", has_developer_role=True)
    assert [message["role"] for message in kept][3] == "developer"


def test_tools_have_their_fields_in_the_order_of_vllm() -> None:
    assert tools_for_template([]) is None
    [tool] = tools_for_template([TOOL]) or []
    assert list(tool) == ["type", "function"]
    assert list(tool["function"]) == ["name", "description", "parameters"]
    assert tool["function"]["description"] is None
    strict = {"type": "function", "function": {"strict": True, "name": "f", "x": 1}}
    [tool] = tools_for_template([strict]) or []
    assert tool["function"] == {
        "name": "f",
        "description": None,
        "parameters": None,
        "strict": True,
    }


def test_calls_have_the_ids_that_a_model_knows() -> None:
    def ids(tool_parser: str) -> list[str]:
        messages = for_template(
            list(CHATS["calls"]),
            ContentFormat.STRING,
            image_token="",
            tool_parser=tool_parser,
            has_developer_role=True,
        )
        called = [call["id"] for call in messages[1]["tool_calls"]]
        assert [message["tool_call_id"] for message in messages[2:]] == called
        return called

    assert ids("hermes") == ["call_aaaaaaaaa", "call_bbbbbbbbb"]
    assert ids("mistral") == ["aaaaaaaaa", "bbbbbbbbb"]
    assert ids("kimi_k2") == ["functions.weather:0", "functions.weather:1"]
