"""The model's template turns chats into prompts, and the response's opening counts."""

import contextlib
import json
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import ConnectionError as RedisConnectionError
from tokenizers import Tokenizer

from contract.messages import ChatFormat, ContentFormat
from gateway.completions.prompt.chat import MAX_OPENING_TOKENS, RenderedChat, render_chat
from gateway.completions.prompt.chat_templates import ChatTemplates
from gateway.completions.prompt.conversation import image_count
from gateway.completions.prompt.literal_text import unmarked
from gateway.completions.prompt.preparation import prepare
from gateway.dialects.chat.messages import ROLES, read_messages
from gateway.dialects.request import ChatRequest, Reasoning
from gateway.records.errors import (
    BadRequestError,
    ContextLengthExceededError,
    InvalidParameterError,
    StoreUnavailableError,
    UnsupportedParameterError,
)
from tests.gateway.completions.prompt.building import (
    at_once,
    card_of,
    encoder_of,
    request_of,
    tiny_tokenizer,
)
from tests.gateway.completions.prompt.chatting import ANSWER, ASK, CHATS, SOURCES, TOOL, form_of
from tests.support.cases import all_cases
from tests.support.examples import examples

T = TypeVar("T")

TOKENIZER = tiny_tokenizer()
MARKS: dict[str, Any] = {
    "reasoning_parser": "qwen3",
    "reasoning_start": "<think>",
    "reasoning_end": "</think>",
}
UNMARKED = Reasoning("<think>", "</think>", is_open=False)
OPEN = Reasoning("<think>", "</think>", is_open=True)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return TOKENIZER


@cache
def store(source: str) -> ChatTemplates:
    async def fetch(digest: str) -> bytes:
        del digest
        return zlib.compress(json.dumps({"default": source}).encode())

    async def try_out(source: str) -> str:
        del source
        return ""

    return ChatTemplates(fetch, try_out)


async def render(
    messages: list[dict[str, Any]],
    name: str = "chatml_tools",
    *,
    source: str = "",
    window: int = 4096,
    image_token: str = "",
    form: ChatFormat | None = None,
    marks: dict[str, Any] = MARKS,
    **fields: Any,
) -> RenderedChat:
    card = card_of(
        TOKENIZER,
        context_window=window,
        image_token=image_token,
        chat=form or form_of(name, **marks),
    )
    chat = ChatRequest(messages=messages, **fields)
    request = request_of("", chat=chat)
    return await render_chat(
        request, card, store(source or SOURCES[name]), encoder_of(TOKENIZER), at_once
    )


async def test_a_chat_becomes_a_text_and_tokens(tokenizer: Tokenizer) -> None:
    chat = await render(CHATS["turns"], "roles")
    assert chat.text == (
        "<|system|>Be brief. \n<|user|>Hi <b>& 'you'\n ☺ \n<|assistant|> Hello </s>"
        "<|user|>Hi <b>& 'you'\n ☺ \n<|assistant|>"
    )
    assert chat.opening_tokens == 1
    card = card_of(tokenizer, context_window=4096)
    request = request_of(chat.text, chat=ChatRequest(messages=[]), adds_special_tokens=False)
    [prompt] = (await prepare(request, tokenizer, card, at_once)).prompts
    assert tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == chat.text
    assert prompt.token_ids[-1] == tokenizer.token_to_id("<|assistant|>")


@all_cases(
    ("name", "chat", "arguments", "opening", "reasoning"),
    [
        ("chatml_tools", "turns", {}, "<|im_start|>assistant\n", UNMARKED),
        (
            "chatml_tools",
            "reasoning in content",
            {"enable_thinking": False},
            "<|im_start|>assistant\n<think>\n\n</think>\n\n",
            None,
        ),
        ("thinking", "reasoning in content", {}, "<|Assistant|><think>\n", OPEN),
        ("strict_turns", "turns", {}, "<start_of_turn>model\n", UNMARKED),
        ("ids", "one", {}, "", UNMARKED),
    ],
)
async def test_opening_is_what_the_template_puts_before_a_response(
    tokenizer: Tokenizer,
    name: str,
    chat: str,
    arguments: dict[str, Any],
    opening: str,
    reasoning: Reasoning | None,
) -> None:
    rendered = await render(CHATS[chat], name, template_arguments=arguments)
    assert rendered.text.endswith(opening)
    assert rendered.opening_tokens == len(tokenizer.encode(opening, add_special_tokens=False).ids)
    assert rendered.reasoning == reasoning


async def test_template_may_open_every_response() -> None:
    source = "{{ messages[0].content }}<think>"
    rendered = await render([ASK], source=source)
    assert (rendered.opening_tokens, rendered.reasoning) == (1, OPEN)


async def test_unknown_opening_is_bounded() -> None:
    source = "{% if not add_generation_prompt %}{{ raise_exception('') }}{% endif %}" + "x1" * 999
    assert (await render([ASK], source=source)).opening_tokens == MAX_OPENING_TOKENS


async def test_model_without_parsers_has_no_opening() -> None:
    rendered = await render([ASK], marks={})
    assert (rendered.opening_tokens, rendered.reasoning) == (0, None)


@all_cases(
    ("name", "content", "end", "reasoning"),
    [
        ("chatml_tools", "The ans ", "assistant\n<think>\n\n</think>\n\nThe ans ", None),
        ("roles", "The ans ", "<|assistant|>The ans ", None),
        ("roles", "<think>hm", "<|assistant|><think>hm", OPEN),
        ("roles", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab", None),
        ("roles", "", "<|assistant|>", UNMARKED),
        ("roles", None, "<|assistant|>", UNMARKED),
        ("strict_turns", "The ans ", "model\nThe ans", None),
    ],
)
async def test_the_last_message_is_continued(
    tokenizer: Tokenizer, name: str, content: Any, end: str, reasoning: Reasoning | None
) -> None:
    messages = [ASK, {"role": "assistant", "content": content}]
    rendered = await render(messages, name, continues_last_message=True)
    history = (await render([ASK], name)).text
    common = history if name == "roles" else history.rpartition("<")[0]
    assert rendered.text.startswith(common.removesuffix("<|assistant|>"))
    assert rendered.text.endswith(end)
    assert rendered.reasoning == reasoning
    assert rendered.finds_reasoning == (reasoning is not None)
    opened = tokenizer.encode(rendered.text, add_special_tokens=False).ids
    tail = tokenizer.decode(
        opened[len(opened) - rendered.opening_tokens :], skip_special_tokens=False
    )
    assert tail.endswith(end)
    assert "Hi" not in tail


async def test_message_that_the_template_drops_is_not_continued() -> None:
    source = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(
        InvalidParameterError, match=r"'messages\[1\]' cannot be continued"
    ) as caught:
        await render([ASK, ANSWER], source=source, continues_last_message=True)
    assert caught.value.param == "messages[1]"


async def test_error_raised_by_the_template_is_reported() -> None:
    with pytest.raises(InvalidParameterError) as caught:
        await render([ASK, ASK], "strict_turns")
    assert caught.value.message == (
        "'messages' was rejected by the model's chat template: Conversation roles must alternate "
        "user/assistant/user/assistant/...."
    ).replace("....", ".")
    assert caught.value.param == "messages"


async def test_only_client_variables_that_the_template_reads_are_set() -> None:
    arguments = {
        "reasoning_effort": "high",
        "nothing": 1,
        "messages": [],
        "add_generation_prompt": False,
        "bos_token": "x",
        "strftime_now": "x",
        "raise_exception": "x",
    }
    rendered = await render([ASK], "developers", template_arguments=arguments)
    assert "Reasoning: high" in rendered.text
    assert rendered.text.endswith("<|start|>assistant")
    assert set(rendered.ignored_template_arguments) == arguments.keys() - {"reasoning_effort"}


@all_cases(
    ("name", "role", "expected"),
    [
        ("chatml_tools", "system", "<|im_start|>system\nBe kind.<|im_end|>\n"),
        ("roles", "developer", "<|system|>Be kind.\n"),
        ("strict_turns", "system", "user\nHi <b>& 'you'\n ☺ \nBe kind.\nHi <b>& 'you'\n ☺<"),
        ("strict_turns", "developer", "user\nHi <b>& 'you'\n ☺ \nBe kind.\nHi <b>& 'you'\n ☺<"),
    ],
)
async def test_later_system_message_keeps_its_place(name: str, role: str, expected: str) -> None:
    first = {"role": "system", "content": "Be brief."}
    later = {"role": role, "content": "Be kind."}
    messages = [first, ASK, ANSWER, ASK, later]
    rendered = await render([*messages, ASK], name, keeps_system_places=True)
    assert expected in rendered.text
    # The prompt of a conversation grows at its end.
    beginning = (await render(messages[:2], name, keeps_system_places=True)).text
    assert rendered.text.startswith(beginning.removesuffix("<think>\n"))
    assert "system\nBe kind" not in rendered.text or name == "chatml_tools"


async def test_tools_are_described_to_the_model() -> None:
    rendered = await render([ASK], tools=[TOOL])
    assert (
        '\n{"type": "function", "function": {"name": "weather", "description": null, '
        in rendered.text
    )


async def test_rendering_does_not_change_the_messages() -> None:
    chat = CHATS["calls"]
    before = json.dumps(chat)
    await render(chat, form=form_of("", tool_parser="kimi_k2"))
    assert json.dumps(chat) == before


@all_cases(
    ("source", "expected"),
    [
        ("{{ f.arguments | tojson }}", '{"city": "<B'),
        ("{{ f | tojson }}", '{"name": "f", "arguments": {"city": "<B}'),
        ("{{ f.arguments if f.arguments is string else f.arguments | tojson }}", '{"city": "<B'),
        ("{{ f.arguments }}", '{"city": "<B'),
        (
            "{% for k, v in f.arguments | items %}{{ k }}={{ v }}{% endfor %}",
            'arguments={"city": "<B',
        ),
        ("{% for k, v in f.arguments.items() %}{{ v }}{% endfor %}", '{"city": "<B'),
        ("{% for k in f.arguments %}{{ f.arguments[k] | string }}{% endfor %}", '{"city": "<B'),
    ],
)
async def test_arguments_that_were_cut_off_are_rendered_as_they_are(
    source: str, expected: str
) -> None:
    function = {"name": "f", "arguments": '{"city": "<B'}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": function}]}
    source = "{% set f = messages[0].tool_calls[0].function %}" + source
    assert (await render([call], source=source)).text == expected


async def test_half_a_character_is_refused() -> None:
    function = {"name": "f", "arguments": {"a": "\ud800"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": function}]}
    with pytest.raises(InvalidParameterError, match="surrogate"):
        await render([ASK, call])


async def test_a_template_that_writes_nothing_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="must not be empty"):
        await render([ASK], source="{{ '' }}")


# --- images ---------------------------------------------------------------------------------------

IMAGE = {"type": "image"}
IMAGE_CALL = {"id": "a", "function": {"name": "f", "arguments": {"a": "<image>"}}}


def with_parts(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@all_cases(
    ("form", "source", "expected"),
    [
        (ContentFormat.PARTS, SOURCES["parts"], "USER: a<|vision|><image><|/vision|>b\nASSISTANT:"),
        (ContentFormat.STRING, "{{ messages[0].content }}", "<image>\na\nb"),
    ],
)
async def test_images_are_marked_in_the_way_of_the_template(
    form: ContentFormat, source: str, expected: str
) -> None:
    messages = with_parts({"type": "text", "text": "a"}, IMAGE, {"type": "text", "text": "b"})
    rendered = await render(
        messages, source=source, image_token="<image>", form=ChatFormat("d", content_format=form)
    )
    assert rendered.text == expected


@all_cases(
    "given",
    [
        {"messages": [{"role": "user", "content": "see <image>"}]},
        {"messages": with_parts(IMAGE, {"type": "text", "text": "<image>"})},
        {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [IMAGE_CALL]}]},
        {"messages": [ASK], "tools": [{"function": {"name": "<image>"}}]},
        {"messages": [ASK], "template_arguments": {"x": "<image>"}, "source": "a{{ x }}"},
    ],
)
async def test_the_text_of_an_image_token_is_text(given: dict[str, Any]) -> None:
    source = given.pop("source", "")
    name = "parts" if given["messages"][0] is not ASK else "chatml_tools"
    chat = await render(**given, name=name, source=source, image_token="<image>")
    images = sum(map(image_count, given["messages"]))
    assert chat.text.count("<image>") == images
    assert unmarked(chat.text).count("<image>") == images + 1


async def test_images_are_counted_in_the_prompt() -> None:
    with pytest.raises(
        InvalidParameterError, match="model's image token except for its images"
    ) as caught:
        await render(with_parts(IMAGE), source="{{ messages[0].role }}", image_token="<image>")
    assert caught.value.param == "messages"


async def test_the_prompt_of_a_chat_keeps_marks_that_are_no_image_tokens(
    tokenizer: Tokenizer,
) -> None:
    card = card_of(tokenizer, context_window=99, image_token="<|tool|>")
    request = request_of(
        "a<image>b<|tool|>",
        chat=ChatRequest(messages=[]),
        images=[[b"1"]],
        adds_special_tokens=False,
    )
    [prompt] = (await prepare(request, tokenizer, card, at_once)).prompts
    assert prompt.token_ids.count(tokenizer.encode("<|tool|>").ids[0]) == 1


# --- random chats ---------------------------------------------------------------------------------

TEXTS = st.text(max_size=20) | st.sampled_from(
    ["<think>", "</think>", "CONTINUE_FINAL_MESSAGE_TAG ", "{{ 1 }}", "<tool_call>", "\0", " "]
)
CONTENTS = (
    st.none() | TEXTS | st.lists(st.builds(lambda text: {"type": "text", "text": text}, TEXTS))
)
FUNCTIONS = st.fixed_dictionaries(
    {
        "name": TEXTS,
        "arguments": st.dictionaries(TEXTS, st.none() | TEXTS | st.lists(TEXTS)).map(json.dumps),
    }
)
CALLS = st.lists(st.fixed_dictionaries({"id": TEXTS, "function": FUNCTIONS}), max_size=3)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(ROLES), "content": CONTENTS},
    optional={
        "name": TEXTS,
        "tool_calls": CALLS,
        "tool_call_id": TEXTS,
        "reasoning_content": st.none() | TEXTS,
    },
)


@examples(default=30, long=80)
@given(
    messages=st.lists(MESSAGES, min_size=1, max_size=5),
    name=st.sampled_from(sorted(SOURCES)),
    tool_parser=st.sampled_from(["hermes", "mistral", "kimi_k2"]),
    continues=st.booleans(),
)
async def test_any_chat_becomes_a_text_or_is_refused(
    messages: list[dict[str, Any]], name: str, tool_parser: str, *, continues: bool
) -> None:
    with contextlib.suppress(BadRequestError):
        read = read_messages(messages).messages
        rendered = await render(
            read,
            form=form_of(name, tool_parser=tool_parser, **MARKS),
            source=SOURCES[name],
            continues_last_message=continues and read[-1]["role"] == "assistant",
        )
        assert rendered.text.encode()


# --- bounds ---------------------------------------------------------------------------------------


@all_cases(
    "fields",
    [
        {"messages": [{"role": "user", "content": "a" * 200_000}]},
        {"messages": [{"role": "user", "content": ""}] * 200_000},
        {
            "messages": [ASK],
            "tools": [{"function": {"name": "f", "parameters": {"a": "b" * 200_000}}}],
        },
        {"messages": [ASK], "template_arguments": {"x": "b" * 200_000}},
        {"messages": [ASK], "source": "{{ messages[0].content * 9999 }}"},
    ],
    ids=["text", "messages", "tool", "argument", "rendered"],
)
async def test_rendering_stops_when_the_prompt_cannot_fit(fields: dict[str, Any]) -> None:
    with pytest.raises(
        ContextLengthExceededError, match="you requested at least 101 tokens"
    ) as caught:
        await render(**fields, window=100)
    assert (caught.value.param, caught.value.n_ctx) == ("messages", 100)


async def test_deep_values_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(InvalidParameterError, match="RecursionError"):
        await render([ASK], tools=[{"function": {"name": "f", "parameters": deep}}])


async def test_too_long_a_prompt_names_the_messages(tokenizer: Tokenizer) -> None:
    request = request_of("a " * 99, chat=ChatRequest(messages=[]), adds_special_tokens=False)
    with pytest.raises(ContextLengthExceededError, match="in the messages") as caught:
        await prepare(request, tokenizer, card_of(tokenizer), at_once)
    assert caught.value.param == "messages"


async def test_chats_are_rendered_where_large_work_is_done(tokenizer: Tokenizer) -> None:
    class NotDoneError(Exception):
        pass

    async def beside(work: Callable[[], T], *, size: int = 0) -> T:
        del work
        raise NotDoneError(size)

    request = request_of("", chat=ChatRequest(messages=[ASK]))
    card = card_of(tokenizer, chat=form_of("roles"))
    with pytest.raises(NotDoneError):
        await render_chat(request, card, store(SOURCES["roles"]), encoder_of(tokenizer), beside)


async def test_lost_redis_is_no_client_error(tokenizer: Tokenizer) -> None:
    async def fetch(digest: str) -> bytes:
        raise RedisConnectionError(digest)

    async def try_out(source: str) -> str:
        return source

    request = request_of("", chat=ChatRequest(messages=[ASK]))
    card = card_of(tokenizer, chat=form_of("roles"))
    with pytest.raises(StoreUnavailableError):
        await render_chat(
            request, card, ChatTemplates(fetch, try_out), encoder_of(tokenizer), at_once
        )


async def test_model_without_a_template_refuses_chats(tokenizer: Tokenizer) -> None:
    request = request_of("", chat=ChatRequest(messages=[ASK]))
    with pytest.raises(UnsupportedParameterError, match="has no chat template"):
        await render_chat(request, card_of(tokenizer), store(""), encoder_of(tokenizer), at_once)
