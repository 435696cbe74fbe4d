"""Images in data URIs, and their marks in prompts."""

import base64
import time
from typing import Any

import pytest

from tests.gateway.dialects.reading import FIREWORKS, read, refusal
from tests.support.cases import all_cases

FILES = {
    "image/png": b"\x89PNG\r\n\x1a\n and so on",
    "image/jpeg": b"\xff\xd8\xff and so on",
    "image/webp": b"RIFF\x00\x00\x00\x00WEBP and so on",
    "image/gif": b"GIF89a and so on",
}
PNG = FILES["image/png"]


def uri(content: bytes = PNG, media_type: str = "image/png") -> str:
    """Return a data URI."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


@all_cases("media_type", FILES)
def test_image_of_every_type_is_decoded(media_type: str) -> None:
    request = read(FIREWORKS, prompt="<image> What?", images=[uri(FILES[media_type], media_type)])
    assert request.images == [[FILES[media_type]]]


@all_cases(
    ("prompt", "images", "expected"),
    [
        ("<image>a<image>", [uri(), uri()], [[PNG, PNG]]),
        ("<image>", [[uri()]], [[PNG]]),
        (["<image>", "a", "<image><image>"], [[uri()], [], [uri(), uri()]], [[PNG], [], [PNG] * 2]),
        ([1, "<image>", 2], [uri()], [[PNG]]),
        (["a", "b"], [[], []], [[], []]),
        ("a", [], [[]]),
        (["a", "b"], None, [[], []]),
        ("a <image> in plain text", None, [[]]),
    ],
)
def test_images_belong_to_their_prompts(prompt: Any, images: Any, expected: Any) -> None:
    assert read(prompt=prompt, images=images).images == expected


@pytest.mark.parametrize(
    ("prompt", "images", "message"),
    [
        ("a", [uri()], "as '<P>' has <image> marks. Given: 1 images, 0 marks."),
        ("<image>", [uri(), uri()], "as '<P>' has <image> marks. Given: 2 images, 1 marks."),
        ("<image><image>", [uri()], "as '<P>' has <image> marks. Given: 1 images, 2 marks."),
        ([1, 2], [uri()], "as '<P>' has <image> marks. Given: 1 images, 0 marks."),
    ],
)
def test_different_numbers_of_images_and_marks_are_refused(
    prompt: Any, images: list[str], message: str
) -> None:
    error = refusal(prompt=prompt, images=images)
    assert error.message == "'images' must have as many images " + message.replace("<P>", "prompt")
    assert error.param == "images"


def test_wrong_number_of_images_names_the_prompt() -> None:
    error = refusal(prompt=["<image>", "a"], images=[[uri()], [uri()]])
    assert "as 'prompt[1]' has <image> marks. Given: 1 images, 0 marks." in error.message


@all_cases(
    ("images", "given"),
    [
        ([uri()], "1 images"),
        ([uri(), uri()], "2 images"),
        ([[uri()]], "1 arrays"),
        ([[uri()], [], []], "3 arrays"),
    ],
)
def test_images_of_several_prompts_come_in_one_list_each(images: Any, given: str) -> None:
    error = refusal(prompt=["<image>", "<image>"], images=images)
    assert error.message == (
        f"'images' must have one array for each of the 2 prompts. Given: {given}."
    )


@all_cases(
    "image",
    [
        "http://localhost/image.png",
        "file:///etc/passwd",
        "image/png;base64,AAAA",
        "data:image/png,AAAA",
        "data:image/svg+xml;base64,AAAA",
        "data:text/plain;base64,AAAA",
        "data:;base64,AAAA",
        "",
    ],
)
def test_image_that_is_no_data_uri_of_a_served_type_is_refused(image: str) -> None:
    error = refusal(prompt="<image>", images=[image])
    assert error.message.startswith(
        "'images[0]' must be a data URI 'data:TYPE;base64,DATA' with a TYPE of image/jpeg, "
    )
    assert error.param == "images"


@all_cases("data", ["!!!!", "iVBORw0KGgo", "iVBO Rw0K", "iVBORw0KGgo=x", "é"])
def test_image_that_is_not_base64_is_refused(data: str) -> None:
    error = refusal(prompt="<image>", images=[f"data:image/png;base64,{data}"])
    assert error.message.startswith("'images[0]' must be encoded in base64. Given: ")


@all_cases("content", [b"", b"GIF89a", b"<svg>"])
def test_image_of_another_type_than_declared_is_refused(content: bytes) -> None:
    error = refusal(prompt="<image>", images=[uri(content)])
    assert error.message.startswith("'images[0]' must be a file of its declared type.")


def test_wrong_image_is_named_by_its_place() -> None:
    error = refusal(prompt="<image><image>", images=[uri(), "x"])
    assert error.message.startswith("'images[1]' must be a data URI")
    error = refusal(prompt=["<image>", "<image>"], images=[[uri()], [5]])
    assert error.message == "'images[1][0]' must be a data URI. Given: 5."


@all_cases("value", [5, "x", {}, True, [5], [[5]], [None], [{}]])
def test_images_of_a_wrong_type_are_refused(value: Any) -> None:
    assert refusal(prompt="<image>", images=value).param == "images"


def test_too_many_images_are_refused() -> None:
    assert read(prompt="<image>" * 100, images=[uri()] * 100)
    assert refusal(prompt="<image>" * 101, images=[uri()] * 101).message == (
        "'images' must have at most 100 entries. Given: 101."
    )
    prompts = ["<image>" * 51] * 2
    assert refusal(prompt=prompts, images=[[uri()] * 51] * 2).message == (
        "'images' must have at most 100 images. Given: 102."
    )


def test_too_large_image_is_refused_before_it_is_decoded() -> None:
    largest = PNG + bytes(4 * 2**20 - len(PNG))
    assert read(prompt="<image>", images=[uri(largest)]).images == [[largest]]
    started = time.process_time()
    error = refusal(prompt="<image>", images=["data:image/png;base64," + "A" * 8_000_000])
    assert time.process_time() - started < 0.2
    assert (
        error.message
        == "'images[0]' must be an image of at most 4194304 bytes. Given: 6000000 bytes."
    )


def test_echo_logprobs_with_images_are_refused() -> None:
    assert read(prompt="<image>", images=[uri()], echo=True)
    assert read(prompt="<image>", images=[uri()], logprobs=1)
    error = refusal(prompt="<image>", images=[uri()], echo=True, logprobs=1)
    assert error.message == (
        "'images' cannot be combined with 'echo' and 'logprobs': images have no log-probabilities."
    )


def test_infill_with_images_is_refused() -> None:
    error = refusal(prompt="<image>", images=[uri()], suffix="end")
    assert error.message == "'suffix' cannot be combined with 'images'."
