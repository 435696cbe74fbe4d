"""Messages of a chat: what templates get, and which errors name the refused place."""

from typing import Any

from gateway.dialects.profile import Profile
from gateway.dialects.request import ImageSource
from tests.gateway.dialects.chat_reading import (
    PNG,
    PNG_URI,
    USER,
    chat,
    chat_refusal,
    image,
    read_chat,
    text,
)
from tests.gateway.dialects.reading import EVERY_PROFILE, LLAMACPP, VLLM
from tests.support.cases import all_cases


def user(*parts: Any) -> dict[str, Any]:
    """Return a message of parts."""
    return {"role": "user", "content": list(parts)}


BROKEN_ARGUMENTS = [
    '{"city',
    '{"city": "Be\\',
    "[1]",
    "null",
    '"a"',
    '{"a": "\\x"}',
    '{"a": NaN}',
    '{"a": 1} 2',
    '{"a":' * 100 + "1" + "}" * 100,
]
"""What a model may write in place of a JSON object."""


def call(arguments: Any = '{"city": "Bern"}', **more: Any) -> dict[str, Any]:
    """Return a tool call as in an assistant's message."""
    function = {"name": "weather", "arguments": arguments}
    return {"id": "call_1", "type": "function", "function": function} | more


def calling(*calls: Any, **more: Any) -> dict[str, Any]:
    """Return a message of the assistant with calls."""
    return {"role": "assistant", "tool_calls": list(calls)} | more


CALLED = {
    "id": "call_1",
    "function": {"arguments": {"city": "Bern"}, "name": "weather"},
    "type": "function",
}


@all_cases("role", ["system", "developer", "user", "assistant"])
@all_cases("content", ["Hello", "", [text(), text("b")]])
def test_text_reaches_the_template_unchanged(role: str, content: Any) -> None:
    message = {"role": role, "content": content}
    assert chat(messages=[message]).messages == [message]


def test_name_of_the_author_reaches_the_template() -> None:
    message = {"role": "user", "content": "Hello", "name": "Ada"}
    assert chat(messages=[message]).messages == [message]


@all_cases(
    ("given", "expected"),
    [
        (calling(call()), {"content": None, "tool_calls": [CALLED]}),
        (calling(call({"city": "Bern"})), {"content": None, "tool_calls": [CALLED]}),
        (calling(call(index=0), content=""), {"content": "", "tool_calls": [CALLED]}),
        ({"content": "a", "tool_calls": []}, {"content": "a"}),
        ({"content": "a", "tool_calls": None, "function_call": None}, {"content": "a"}),
        ({"refusal": "I will not."}, {"content": "I will not."}),
        ({"content": "a", "refusal": "b"}, {"content": "a"}),
        (
            {"content": [text(), {"type": "refusal", "refusal": "No."}]},
            {"content": [text(), text("No.")]},
        ),
        (
            {"content": "a", "reasoning_content": "Hm."},
            {"content": "a", "reasoning": "Hm.", "reasoning_content": "Hm."},
        ),
        (
            {"content": "a", "reasoning": "Hm.", "reasoning_content": None},
            {"content": "a", "reasoning": "Hm.", "reasoning_content": "Hm."},
        ),
        (
            {"reasoning": "Hm."},
            {"content": None, "reasoning": "Hm.", "reasoning_content": "Hm."},
        ),
    ],
)
def test_assistant_message_gets_the_form_of_templates(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    request = read_chat(messages=[USER, {"role": "assistant"} | given])
    assert request.chat
    assert request.chat.messages == [USER, {"role": "assistant"} | expected]
    assert request.ignored_parameters == ()


@all_cases("arguments", ["", " \n", None, "{}", {}])
def test_call_without_arguments_gets_empty_arguments(arguments: Any) -> None:
    [message] = chat(messages=[calling(call(arguments))]).messages
    assert message["tool_calls"][0]["function"]["arguments"] == {}


@all_cases("arguments", BROKEN_ARGUMENTS)
def test_arguments_that_are_no_object_stay_a_text(arguments: str) -> None:
    for messages in (
        [calling(call(arguments))],
        [calling(function_call={"name": "weather", "arguments": arguments})],
    ):
        [message] = chat(messages=messages).messages
        assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_order_of_arguments_is_kept() -> None:
    [message] = chat(messages=[calling(call('{"z": 1, "a": {"y": 2, "b": 3}}'))]).messages
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert list(arguments) == ["z", "a"]
    assert list(arguments["a"]) == ["y", "b"]


@all_cases("content", ["one\ntwo", [text("one"), text("two")]])
def test_result_of_a_tool_is_one_text(content: Any) -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": content, "name": "weather"}
    request = read_chat(messages=[result])
    assert request.chat
    assert request.chat.messages == [
        {"role": "tool", "content": "one\ntwo", "tool_call_id": "call_1", "name": "weather"}
    ]
    assert request.ignored_parameters == ()


def test_call_of_a_function_and_its_result_become_those_of_a_tool() -> None:
    function_call = {"name": "weather", "arguments": '{"city": "Bern"}'}
    given = [
        USER,
        {"role": "assistant", "content": None, "function_call": function_call},
        {"role": "function", "name": "weather", "content": "sunny"},
    ]
    messages = chat(messages=given).messages
    assert messages[1:] == [
        {"role": "assistant", "content": None, "tool_calls": [CALLED | {"id": "call00001"}]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call00001", "name": "weather"},
    ]


def test_result_of_an_uncalled_function_has_no_id() -> None:
    result = {"role": "function", "name": "weather", "content": None}
    assert chat(messages=[result]).messages == [{"role": "tool", "content": "", "name": "weather"}]


def test_images_are_extracted_in_order() -> None:
    url = "https://example.com/cat.png"
    messages = [
        user(text(), image(), text("b"), image(url, detail="low")),
        user({"type": "image_url", "image_url": PNG_URI}, {"type": "image_url", "image_url": url}),
    ]
    request = read_chat(messages=messages)
    assert request.chat
    shown = {"type": "image"}
    assert request.chat.messages == [
        user(text(), shown, text("b"), shown),
        user(shown, shown),
    ]
    assert request.chat.image_sources == [
        ImageSource(file=PNG, param="messages[0].content[1].image_url.url"),
        ImageSource(url=url, param="messages[0].content[3].image_url.url"),
        ImageSource(file=PNG, param="messages[1].content[0].image_url"),
        ImageSource(url=url, param="messages[1].content[1].image_url"),
    ]
    assert request.images == [[]]


@all_cases("url", ["http://localhost/", "file:///etc/passwd", "", "image", "HTTP://x"])
def test_other_urls_are_left_to_the_image_fetcher(url: str) -> None:
    [source] = chat(messages=[user(image(url))]).image_sources
    assert source == ImageSource(url=url, param="messages[0].content[0].image_url.url")


@all_cases(
    ("url", "message"),
    [
        ("data:text/html;base64,AAAA", "must be a data URI 'data:TYPE;base64,DATA' with a TYPE of"),
        ("DATA:image/png;base64,AAAA", "must be a data URI 'data:TYPE;base64,DATA' with a TYPE of"),
        ("data:image/png,AAAA", "must be a data URI 'data:TYPE;base64,DATA' with a TYPE of"),
        ("data:image/png;base64,!!!!", 'must be encoded in base64. Given: "!!!!".'),
        ("data:image/png;base64,AAAA", "must be a file of its declared type. Given: "),
        ("data:image/png;base64," + "A" * 6_000_000, "must be an image of at most 4194304 bytes."),
        (5, "must be a string. Given: 5."),
    ],
)
def test_wrong_image_is_named_by_its_place(url: Any, message: str) -> None:
    error = chat_refusal(messages=[USER, user(text(), image(url))])
    path = "messages[1].content[1].image_url.url"
    assert error.message.startswith(f"'{path}' {message}")
    assert error.param == path


def test_too_many_images_are_refused() -> None:
    assert len(chat(messages=[user(*[image()] * 50)] * 2).image_sources) == 100
    error = chat_refusal(messages=[user(*[image()] * 50)] * 2 + [user(image())])
    assert error.message == (
        "'messages' must have at most 100 images. Given: one more in "
        "'messages[2].content[0].image_url.url'."
    )


@all_cases("key", ["partial", "continue_final_message"])
def test_last_message_of_the_assistant_may_be_continued(key: str) -> None:
    last = {"role": "assistant", "content": "It is"}
    if key == "partial":
        found = chat(messages=[USER, last | {"partial": True}])
    else:
        found = chat(
            messages=[USER, last], continue_final_message=True, add_generation_prompt=False
        )
    assert found.continues_last_message
    assert found.messages == [USER, last]
    assert not chat(messages=[USER, last | {"partial": False}]).continues_last_message


@all_cases(
    ("parameters", "message"),
    [
        (
            {"messages": [USER], "continue_final_message": True},
            (
                "'messages[0].role' must be assistant if the response continues the message. "
                'Given: "user".'
            ),
        ),
        (
            {"messages": [calling(call(), partial=True)]},
            (
                "'messages[0]' must have content and no tool calls if the response continues "
                "the message."
            ),
        ),
        (
            {"messages": [calling(call(), content="a", partial=True)]},
            (
                "'messages[0]' must have content and no tool calls if the response continues "
                "the message."
            ),
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "partial": True}, USER]},
            "'messages[0].partial' is only allowed in the last message. Given: true.",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "partial": 1}]},
            "'messages[0].partial' must be a boolean. Given: 1.",
        ),
        (
            {
                "messages": [{"role": "assistant", "content": "a", "partial": True}],
                "add_generation_prompt": True,
            },
            "'add_generation_prompt' must not be true if the last message is continued.",
        ),
        (
            {
                "messages": [{"role": "assistant", "content": "a", "partial": True}],
                "continue_final_message": False,
            },
            "'continue_final_message' must not be false if the last message has 'partial'.",
        ),
        (
            {"add_generation_prompt": False},
            "'add_generation_prompt' false is only supported with 'continue_final_message'.",
        ),
    ],
)
def test_message_that_cannot_be_continued_is_refused(
    parameters: dict[str, Any], message: str
) -> None:
    assert chat_refusal(**parameters).message == message


ASSISTANT = {"role": "assistant", "content": "It is"}


@all_cases(
    ("parameters", "continues"),
    [
        ({}, True),
        ({"continue_final_message": False}, False),
        ({"add_generation_prompt": True}, False),
        ({"messages": [ASSISTANT, USER]}, False),
        ({"messages": [USER, calling(call())]}, False),
    ],
)
def test_llamacpp_continues_the_last_message_of_the_assistant_by_default(
    parameters: dict[str, Any], *, continues: bool
) -> None:
    body = {"messages": [USER, ASSISTANT]} | parameters
    assert chat(LLAMACPP, **body).continues_last_message is continues
    assert not chat(**body).continues_last_message


def test_llamacpp_continues_one_message_of_the_assistant_only() -> None:
    messages = [USER, ASSISTANT, ASSISTANT]
    assert chat_refusal(LLAMACPP, messages=messages).message == (
        "'messages[2]' must not follow another assistant message if the response continues it. "
        "Merge the two messages, or set 'continue_final_message' to false."
    )
    assert chat(messages=messages, continue_final_message=True).continues_last_message


LONG = "a" * 257
WRONG: list[tuple[Any, str, str]] = [
    ("Hello", "", "'messages' must be an array. Given: \"Hello\"."),
    ([], "", "'messages' must have at least one message. Given: []."),
    ([USER] * 100_001, "", "'messages' must have at most 100000 entries. Given: 100001."),
    (["Hello"], "[0]", 'must be an object. Given: "Hello".'),
    ([USER, None], "[1]", "must be an object. Given: null."),
    ([{"role": "bot", "content": "a"}], "[0].role", "must be one of system, developer, user, "),
    ([{"role": ["user"], "content": "a"}], "[0].role", "must be one of system, developer, user, "),
    ([{"role": "user", "content": 5}], "[0].content", "must be a string or an array of parts."),
    ([user()], "[0].content", "must have 1 to 1024 parts. Given: 0."),
    ([user(*[text()] * 1025)], "[0].content", "must have 1 to 1024 parts. Given: 1025."),
    ([user("a")], "[0].content[0]", 'must be an object. Given: "a".'),
    ([user(text(), text(5))], "[0].content[1].text", "must be a string. Given: 5."),
    (
        [user({"type": "input_audio", "input_audio": {}})],
        "[0].content[0].type",
        'must be one of text, image_url, file in a message of this role. Given: "input_audio".',
    ),
    (
        [{"role": "system", "content": [image()]}],
        "[0].content[0].type",
        'must be one of text in a message of this role. Given: "image_url".',
    ),
    (
        [user({"type": []})],
        "[0].content[0].type",
        "must be one of text, image_url, file in a message",
    ),
    ([user(image(detail="tiny"))], "[0].content[0].image_url.detail", "must be one of auto, low, "),
    (
        [user({"type": "image_url", "image_url": 5})],
        "[0].content[0].image_url",
        "must be a string.",
    ),
    ([USER | {"name": 5}], "[0].name", "must be a string. Given: 5."),
    ([USER | {"name": LONG}], "[0].name", "must have 1 to 256 characters. Given: 257 characters."),
    ([{"role": "assistant", "content": "a", "reasoning": 5}], "[0].reasoning", "must be a string."),
    (
        [{"role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": "c"}],
        "[0].reasoning",
        (
            "'messages[0].reasoning_content' and 'messages[0].reasoning' are the same "
            "parameter and must be equal."
        ),
    ),
    ([calling(audio={"id": "x"})], "[0].audio", "is not supported. Send its text in 'messages'."),
    ([calling(call(), tool_calls={})], "[0].tool_calls", "must be an array. Given: {}."),
    ([calling(*[call()] * 129)], "[0].tool_calls", "must have at most 128 entries. Given: 129."),
    ([calling(5)], "[0].tool_calls[0]", "must be an object. Given: 5."),
    (
        [calling(call(type="other"))],
        "[0].tool_calls[0].type",
        'must be one of function, custom. Given: "other".',
    ),
    ([calling(call(id=LONG))], "[0].tool_calls[0].id", "must have 1 to 256 characters."),
    ([calling(call(function=5))], "[0].tool_calls[0].function", "must be an object. Given: 5."),
    (
        [USER, calling(call(), call(5))],
        "[1].tool_calls[1].function.arguments",
        "must be a string or an object. Given: 5.",
    ),
    (
        [calling(call(), function_call={"name": "f"})],
        "[0].function_call",
        "cannot be combined with 'tool_calls'.",
    ),
    (
        [{"role": "tool", "tool_call_id": "a", "content": [image()]}],
        "[0].content[0].type",
        "must be one of text in a message of this role.",
    ),
]


@all_cases("profile", EVERY_PROFILE)
def test_any_role_is_accepted_in_dialect_vllm_only(profile: Profile) -> None:
    message = {"role": "critic", "content": [text("Why?")], "name": "Ada", "tool_calls": [{}]}
    if profile is not VLLM:
        error = chat_refusal(profile, messages=[message])
        assert error.message.startswith("'messages[0].role' must be one of system, developer, ")
        return
    request = read_chat(VLLM, messages=[message])
    assert request.chat
    assert request.chat.messages == [
        {"role": "critic", "content": [{"type": "text", "text": "Why?"}], "name": "Ada"}
    ]
    assert request.ignored_parameters == ("messages[0].tool_calls",)
    for role, said in (("", "0 characters"), ("a" * 257, "257 characters"), (5, "5")):
        error = chat_refusal(VLLM, messages=[message | {"role": role}])
        assert error.param == "messages[0].role"
        assert error.message.endswith(f"Given: {said}.")


@all_cases(("messages", "place", "message"), WRONG)
def test_first_wrong_place_is_named(messages: Any, place: str, message: str) -> None:
    error = chat_refusal(messages=messages)
    path = f"messages{place}"
    assert error.param == path
    assert error.message.startswith(message if message.startswith("'") else f"'{path}' {message}")
    assert len(error.message) < 400


@all_cases(
    ("messages", "place"),
    [
        (None, ""),
        ([{"content": "a"}], "[0].role"),
        ([{"role": "user"}], "[0].content"),
        ([USER, {"role": "system", "content": None}], "[1].content"),
        ([{"role": "assistant"}], "[0].content"),
        ([{"role": "assistant", "tool_calls": []}], "[0].content"),
        ([{"role": "tool", "tool_call_id": "a"}], "[0].content"),
        ([{"role": "tool", "content": "a"}], "[0].tool_call_id"),
        ([{"role": "function", "content": "a"}], "[0].name"),
        ([user({"text": "a"})], "[0].content[0].type"),
        ([user({"type": "text"})], "[0].content[0].text"),
        ([user({"type": "image_url"})], "[0].content[0].image_url"),
        ([user({"type": "image_url", "image_url": {}})], "[0].content[0].image_url.url"),
        ([calling({"function": {"name": "f"}})], "[0].tool_calls[0].id"),
        ([calling({"id": "a"})], "[0].tool_calls[0].function"),
        ([calling({"id": "a", "function": {}})], "[0].tool_calls[0].function.name"),
    ],
)
def test_missing_place_is_named(messages: Any, place: str) -> None:
    error = chat_refusal(messages=messages)
    assert (error.param, error.code) == (f"messages{place}", "missing_required_parameter")


def test_entries_without_effect_are_named() -> None:
    messages = [
        USER | {"mood": "good", "annotations": [], "partial": True},
        user(text() | {"cache_control": {"type": "ephemeral"}}, image(width=5)),
        calling(call(extra=1)),
        {"role": "assistant", "content": "a", "audio": None, "function_call": None},
    ]
    assert read_chat(messages=messages).ignored_parameters == (
        "messages[0].mood",
        "messages[0].partial",
        "messages[1].content[0].cache_control",
        "messages[1].content[1].image_url.width",
        "messages[2].tool_calls[0].extra",
    )


def test_entries_without_effect_are_named_up_to_a_bound() -> None:
    messages = [USER | {f"e{number}": 1 for number in range(1000)}] * 10
    assert len(read_chat(messages=messages).ignored_parameters) == 32


def test_file_is_named_to_the_model() -> None:
    file = {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AAAA"}
    content: list[dict[str, Any]] = [{"type": "file", "file": file}]
    request = read_chat(messages=[{"role": "user", "content": content}])
    assert request.chat
    [part] = request.chat.messages[0]["content"]
    named = "a.pdf, application/pdf, 3 bytes"
    assert part["text"] == f"[A document, which this model cannot read: {named}]"
    assert request.ignored_parameters == ("messages.file",)
    for value, place in ({"filename": "a"}, ".file_data"), (5, ""):
        content[0]["file"] = value
        error = chat_refusal(messages=[{"role": "user", "content": content}])
        assert error.param == f"messages[0].content[0].file{place}"
