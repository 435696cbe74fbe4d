"""Images in base64 data URIs; a completion has one for each image mark in a prompt."""

import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from gateway.dialects.fields import Parameters, read_list
from gateway.dialects.json_types import schema_of
from gateway.dialects.request import Prompt
from gateway.records.errors import invalid, must, shown

IMAGE_MARK = "<image>"
"""Marks the place of an image in a prompt's text."""

MAX_IMAGES = 100
"""Maximum images per request, all prompts together."""
MAX_IMAGE_BYTES = 4 * 2**20
"""Maximum size of one decoded image file."""

SIGNATURES: Mapping[str, tuple[bytes, ...]] = {
    "image/jpeg": (b"\xff\xd8\xff",),
    "image/png": (b"\x89PNG\r\n\x1a\n",),
    "image/webp": (b"RIFF",),
    "image/gif": (b"GIF87a", b"GIF89a"),
}
"""File signatures of each supported media type."""

_FILES = f'list[match("^data:image/(jpeg|png|webp|gif);base64,"), :{MAX_IMAGES}]'


class ImageParameters(Parameters):
    """Images for the model."""

    images: Any = Field(
        default=None,
        description="Images as data URIs (`data:image/png;base64,...`; JPEG, PNG, WebP or GIF), "
        f"one for each `{IMAGE_MARK}` in the prompt's text, in order; for several prompts, a list "
        f"of such lists. At most {MAX_IMAGES} images of at most {MAX_IMAGE_BYTES // 2**20} MiB. "
        "The model must support images.",
        json_schema_extra=schema_of(f"{_FILES} | list[{_FILES}] | None"),
    )


def read_images(body: ImageParameters, prompts: list[Prompt]) -> list[list[bytes]]:
    """Return the image files of each prompt. Raises InvalidParameterError."""
    if body.images is None or body.images == []:
        return [[] for _ in prompts]
    per_prompt = _per_prompt(body.images, prompts)
    total = sum(len(uris) for uris in per_prompt)
    if total > MAX_IMAGES:
        raise must("images", f"have at most {MAX_IMAGES} images", total)
    for index, (uris, prompt) in enumerate(zip(per_prompt, prompts, strict=True)):
        _check_marks(len(uris), prompt, "prompt" if len(prompts) == 1 else f"prompt[{index}]")
    return [
        [_decoded(uri, param) for uri, param in zip(uris, params, strict=True)]
        for uris, params in zip(per_prompt, image_params(per_prompt), strict=True)
    ]


def image_params(per_prompt: Sequence[Sequence[Any]]) -> list[list[str]]:
    """Return the places in the body of each prompt's images."""
    if len(per_prompt) == 1:
        return [[f"images[{index}]" for index, _ in enumerate(per_prompt[0])]]
    return [
        [f"images[{prompt}][{index}]" for index, _ in enumerate(images)]
        for prompt, images in enumerate(per_prompt)
    ]


def _per_prompt(value: object, prompts: list[Prompt]) -> list[list[Any]]:
    # A prompt may not contain more marks than images are allowed. So the outer list has the same
    # limit, unless it has one entry per prompt.
    entries = read_list(value, "images", most=max(MAX_IMAGES, len(prompts)))
    is_nested = any(isinstance(entry, list) for entry in entries)
    if not is_nested and len(prompts) == 1:
        return [entries]
    if not is_nested or len(entries) != len(prompts):
        raise invalid(
            "images",
            f"must have one array for each of the {len(prompts)} prompts. Given: {len(entries)} "
            f"{'arrays' if is_nested else 'images'}.",
        )
    return [read_list(entry, "images", most=MAX_IMAGES) for entry in entries]


def _check_marks(images: int, prompt: Prompt, path: str) -> None:
    pieces = [prompt] if isinstance(prompt, str) else prompt
    marks = sum(piece.count(IMAGE_MARK) for piece in pieces if isinstance(piece, str))
    if marks != images:
        raise invalid(
            "images",
            f"must have as many images as '{path}' has {IMAGE_MARK} marks. Given: {images} "
            f"images, {marks} marks.",
        )


def decoded_image(uri: str, path: str, *, param: str) -> bytes:
    """Return the file in the data URI at `path`.

    Raises InvalidParameterError, which names `param`.
    """
    head, comma, data = uri.partition(";base64,")
    media_type = head.removeprefix("data:")
    if not comma or media_type == head or media_type not in SIGNATURES:
        types = ", ".join(SIGNATURES)
        raise must(
            path,
            f"be a data URI 'data:TYPE;base64,DATA' with a TYPE of {types}",
            uri[:80],
            param=param,
        )
    if len(data) > MAX_IMAGE_BYTES // 3 * 4 + 4:
        raise invalid(
            path,
            f"must be an image of at most {MAX_IMAGE_BYTES} bytes. Given: {len(data) // 4 * 3} "
            "bytes.",
            param=param,
        )
    try:
        content = binascii.a2b_base64(data, strict_mode=True)
    except ValueError:
        raise must(path, "be encoded in base64", data[:80], param=param) from None
    if not content.startswith(SIGNATURES[media_type]):
        raise invalid(
            path,
            f"must be a file of its declared type. Given: {media_type}, first bytes "
            f"{shown(content[:8].hex())} in hexadecimal.",
            param=param,
        )
    return content


def _decoded(uri: object, path: str) -> bytes:
    if not isinstance(uri, str):
        raise must(path, "be a data URI", uri, param="images")
    return decoded_image(uri, path, param="images")
