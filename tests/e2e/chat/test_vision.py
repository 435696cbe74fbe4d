"""Images in the messages of chats, on a vision model."""

from functools import partial
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.e2e.at_once import at_once, each_at_once
from tests.e2e.chat.chats import Message, assistant, chat, chat_both_ways, counts, text_of, user
from tests.e2e.examples import ids_of
from tests.e2e.images import AROUND_IMAGE, picture
from tests.e2e.seeds.calling import example
from tests.e2e.seeds.calling import text_of as completed_text
from tests.support.deployment import SEEING
from tests.support.stack import Stack
from tests.support.vision_model import IMAGE_TOKEN, TOKENS_OF_IMAGE

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SEVERAL = 8
"""Of the model's prompt."""
FEW: dict[str, Any] = {"model": SEEING, "max_tokens": 8}
RED, BLUE = picture("red"), picture("blue", "png")


@pytest.fixture(scope="module")
def seeing(seeing_stack: Stack, client: OpenAI) -> OpenAI:
    """The official client, while the model is served."""
    return client


def image(url: str, **more: Any) -> Message:
    """Return a part of a message."""
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(written: str) -> Message:
    """Return a part of a message."""
    return {"type": "text", "text": written}


def first_logprob(client: OpenAI, *parts: Message) -> float:
    """Return the log-probability of the first token, which depends on the images."""
    # In dialect openai, a token that is no content, such as half a character, has none.
    dialect = {"X-Api-Dialect": "vllm"}
    options = FEW | {"max_tokens": 1, "extra_headers": dialect}
    answer = chat(client, [user(list(parts))], logprobs=True, **options)
    [choice] = answer.choices
    assert choice.logprobs is not None
    [token] = choice.logprobs.content or []
    return token.logprob


def test_images_and_their_order_matter(seeing: OpenAI) -> None:
    pairs = [(RED, RED), (RED, BLUE), (BLUE, RED), (BLUE, BLUE)]
    seen = at_once(
        *(
            partial(
                first_logprob, seeing, text("Compare "), image(one), text(" with "), image(other)
            )
            for one, other in pairs
        )
    )

    assert len({*seen}) == len(pairs)


def test_formats_are_served(seeing: OpenAI) -> None:
    kinds = ("png", "jpeg", "webp", "gif")
    seen = at_once(
        *(
            partial(first_logprob, seeing, text("Look: "), image(picture("green", kind)))
            for kind in kinds
        )
    )

    assert len(seen) == len(kinds)


@each_at_once("number", [1, pytest.param(2, marks=pytest.mark.long), SEVERAL])
def test_images_are_counted(seeing: OpenAI, number: int) -> None:
    parts = [text("Look: "), *[image(RED)] * number]
    without, answer = at_once(
        lambda: chat(seeing, "Look: ", **FEW), lambda: chat_both_ways(seeing, [user(parts)], **FEW)
    )

    assert counts(answer.usage)[0] == counts(without.usage)[0] + number * (
        TOKENS_OF_IMAGE + AROUND_IMAGE
    )


def test_images_that_exceed_the_window_are_refused_in_openais_words(seeing: OpenAI) -> None:
    parts = [text("Look: "), *[image(RED)] * SEVERAL]
    whole = counts(chat(seeing, [user(parts)], **FEW).usage)[0]
    window = seeing.models.retrieve(SEEING).to_dict()["context_window"]
    assert isinstance(window, int)
    # Only the worker knows how many tokens an image takes.
    most = window - whole + 1
    with pytest.raises(BadRequestError) as caught:
        chat(seeing, [user(parts)], **FEW | {"max_tokens": most})

    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")
    assert (
        f"This model's maximum context length is {window} tokens. However, you requested "
        f"{window + 1} tokens ({whole} in the messages, {most} in the completion)."
    ) in caught.value.message


def test_chat_equals_the_completion_of_its_rendered_prompt(seeing: OpenAI) -> None:
    parts = [text("Compare "), image(RED), text(" with "), image(BLUE)]
    answer = chat_both_ways(seeing, [user(parts)], **FEW)
    prompt = f"<|user|>Compare {IMAGE_TOKEN} with {IMAGE_TOKEN}\n</think><|assistant|>"
    images: dict[str, Any] = {"extra_body": {"images": [RED, BLUE]}}
    completion: Any = seeing.completions.create(prompt=prompt, temperature=0, **FEW, **images)

    assert text_of(answer) == completed_text(completion.to_dict())
    assert counts(answer.usage) == counts(completion.usage)
    assert counts(answer.usage)[0] == len(ids_of(prompt)) + 2 * (TOKENS_OF_IMAGE + AROUND_IMAGE - 1)


def test_images_of_earlier_messages_have_an_effect(seeing: OpenAI) -> None:
    def answered(first: str, second: str) -> str:
        messages = [
            user([image(first), text("What is it?")]),
            assistant("A colour."),
            user([text("And this?"), image(second)]),
        ]
        answer = chat(seeing, messages, logprobs=True, **FEW)
        assert answer.choices[0].logprobs is not None
        return str([token.logprob for token in answer.choices[0].logprobs.content or []])

    reds, other, blues = at_once(
        lambda: answered(RED, RED), lambda: answered(BLUE, RED), lambda: answered(BLUE, BLUE)
    )
    assert reds != other != blues


def test_choices_share_images(seeing: OpenAI) -> None:
    parts = [text("Look: "), image(BLUE)]
    one, several = at_once(
        lambda: chat(seeing, [user(parts)], **FEW),
        lambda: chat_both_ways(seeing, [user(parts)], n=2, **FEW),
    )

    assert {choice.message.content for choice in several.choices} == {text_of(one)}
    assert counts(several.usage)[0] == counts(one.usage)[0]


def test_message_of_the_omlx_document_is_served(seeing: OpenAI) -> None:
    message = example("omlx_chat_image_message")
    [_, part] = message["content"]
    # The document's image is truncated, and so no base64.
    assert "base64" in refused(seeing, *message["content"]).message
    part["image_url"]["url"] = RED

    answer = chat(seeing, [message], extra_headers={"x-api-dialect": "omlx"}, **FEW)
    assert counts(answer.usage)[0] > TOKENS_OF_IMAGE + AROUND_IMAGE


@each_at_once("detail", ["auto", "low", "high"])
def test_detail_is_accepted(seeing: OpenAI, detail: str) -> None:
    assert chat(seeing, [user([image(RED, detail=detail)])], **FEW).choices


def refused(client: OpenAI, *parts: Any) -> BadRequestError:
    """Return the error of a message that must be rejected."""
    with pytest.raises(BadRequestError) as caught:
        chat(client, [user(list(parts))], **FEW)
    assert caught.value.type == "invalid_request_error"
    return caught.value


def test_langchain_sends_images(seeing: OpenAI) -> None:
    from langchain_openai import ChatOpenAI

    options: Any = {"api_key": seeing.api_key, "temperature": 0, "max_tokens": 8}
    model = ChatOpenAI(base_url=str(seeing.base_url), model=SEEING, **options)
    parts = [text("Compare "), image(RED), text(" with "), image(BLUE)]
    answer = model.invoke([user(parts)])

    expected = chat(seeing, [user(parts)], **FEW)
    assert answer.content == text_of(expected)
    assert answer.usage_metadata["input_tokens"] == counts(expected.usage)[0]


def test_too_many_images_are_refused(seeing: OpenAI) -> None:
    error = refused(seeing, *[image(RED)] * 101)

    assert (error.param or "").startswith("messages")
    assert "images" in error.message
    assert "100" in error.message


@each_at_once(
    "url, words",
    [
        ("data:text/plain;base64,AAAA", "image/png"),
        ("data:image/png;base64,AAAA", "declared type"),
        ("data:image/png;base64,!", "base64"),
        ("data:image/svg+xml;base64,AAAA", "image/png"),
        (RED.replace("jpeg", "png", 1), "declared type"),
        ("http://127.0.0.1:1/a.png", "fetches"),
        ("https://images.example.com/a.png", "fetches"),
        ("file:///etc/passwd", "http"),
        ("x", "http"),
    ],
)
def test_invalid_image_is_rejected(seeing: OpenAI, url: str, words: str) -> None:
    error = refused(seeing, text("Look: "), image(url))

    assert error.param == "messages[0].content[1].image_url.url"
    assert words in error.message


def test_image_that_cannot_be_decoded_is_refused(seeing: OpenAI) -> None:
    # It begins like a PNG, so only the worker detects the error.
    head = len("data:image/png;base64,")
    error = refused(seeing, image(BLUE[: head + 40]))

    assert "image" in error.message
    assert chat(seeing, [user([image(RED)])], **FEW).choices, "the model is served after that"


def test_detail_must_be_known(seeing: OpenAI) -> None:
    assert refused(seeing, image(RED, detail="all")).param == (
        "messages[0].content[0].image_url.detail"
    )


def test_image_token_in_text_is_text(seeing: OpenAI) -> None:
    parts = [text(f"Look: {IMAGE_TOKEN}"), image(RED)]
    one, other = at_once(
        *(lambda p=p: chat(seeing, [user(p)], **FEW) for p in (parts, [text("Look: "), parts[1]]))
    )
    tokens = counts(one.usage)[0] - counts(other.usage)[0]
    assert tokens > 1


def test_image_in_a_system_message_is_rejected(seeing: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        chat(seeing, [{"role": "system", "content": [image(RED)]}, user("Look.")], **FEW)

    assert caught.value.param == "messages[0].content[0].type"


def test_model_list_reports_vision(seeing: OpenAI) -> None:
    assert "images" in seeing.models.retrieve(SEEING).model_dump()["features"]
