"""The parameter `images` of the Fireworks document, on a vision model."""

from collections.abc import Iterator

import pytest

from tests.e2e.at_once import each_at_once
from tests.e2e.examples import ids_of
from tests.e2e.images import AROUND_IMAGE, picture
from tests.e2e.seeds.calling import Body, Caller, joined, text_of
from tests.support.deployment import SEEING
from tests.support.stack import Stack
from tests.support.vision_model import TOKENS_OF_IMAGE

pytestmark = pytest.mark.e2e

DIALECT = "fireworks"


@pytest.fixture(scope="module")
def seer(seeing_stack: Stack) -> Iterator[Caller]:
    """A key that may use only the vision model."""
    caller = Caller(seeing_stack.url, seeing_stack.key("documents", allowed_models=(SEEING,)))
    yield caller
    caller.close()


def asking(*images: str, prompt: str = "Look: <image> and <image>.") -> Body:
    body = {"model": SEEING, "prompt": prompt, "images": list(images), "max_tokens": 8}
    return body | {"temperature": 0}


def test_images_change_the_text(seer: Caller) -> None:
    def first_logprob(*images: str) -> float:
        answer = seer.complete(DIALECT, asking(*images) | {"logprobs": 0, "max_tokens": 1})
        [value] = answer["choices"][0]["logprobs"]["token_logprobs"]
        return float(value)

    red, blue = picture("red"), picture("blue", "png")
    seen = {first_logprob(*pair) for pair in ((red, red), (red, blue), (blue, red), (blue, blue))}
    assert len(seen) == 4


def test_images_are_counted_as_prompt_tokens(seer: Caller) -> None:
    body = asking(picture("red"), picture("green", "webp"))
    usage = seer.complete(DIALECT, body)["usage"]
    texts = "".join(body["prompt"].split("<image>"))

    assert usage["prompt_tokens"] > len(ids_of(texts)) + 2 * TOKENS_OF_IMAGE
    assert usage["prompt_tokens"] <= len(ids_of(body["prompt"])) + 2 * (
        TOKENS_OF_IMAGE + AROUND_IMAGE
    )


def test_images_work_in_streams_and_for_several_prompts(seer: Caller) -> None:
    body = asking(picture("red"), picture("red"))
    plain = text_of(seer.complete(DIALECT, body))
    each = [[picture("red"), picture("red")], [picture("blue")]]
    several = body | {"prompt": [body["prompt"], "<image>"], "images": each}

    assert joined(seer.stream(DIALECT, body)) == plain
    assert seer.complete(DIALECT, several)["choices"][0]["text"] == plain


@each_at_once("number", [0, 1, 3])
def test_number_of_images_must_match_the_marks(seer: Caller, number: int) -> None:
    error = seer.refused(DIALECT, asking(*[picture("red")] * number))

    assert "images" in error["message"]
    assert f"Given: {number}" in error["message"]
    assert "2" in error["message"]


@each_at_once(
    "image",
    ["http://127.0.0.1/a.png", "data:image/png;base64,AAAA", "data:text/plain;base64,AAAA", "x"],
)
def test_invalid_image_is_rejected(seer: Caller, image: str) -> None:
    error = seer.refused(DIALECT, asking(image, prompt="<image>"))

    assert "images" in error["message"]
