"""Bounded decoding of a request's image files. Slow: call it in a thread."""

from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING

from worker.engine.base import InvalidRequestError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
MAX_PIXELS = 16_000_000
"""Maximum width times height, checked before decoding."""
MAX_PIXELS_TOGETHER = 64_000_000
"""Maximum pixels of all images of a request; each takes three bytes while decoding."""
MAX_SIDE = 16_384
"""Maximum width and height: a thin line of few pixels may be as harmful as a large image."""

_TOO_LARGE = f"must have at most {MAX_PIXELS} pixels and {MAX_SIDE} on a side."


def read_images(files: Sequence[bytes], params: Sequence[str]) -> list["Image"]:
    """Decode image files to RGB, of animations the first frame.

    Raises InvalidRequestError, which names the first invalid one by its entry in `params`.
    """
    images: list[Image] = []
    room = MAX_PIXELS_TOGETHER
    for content, param in zip(files, params, strict=True):
        images.append(_read(content, param, room))
        room -= images[-1].width * images[-1].height
    return images


def _read(content: bytes, param: str, room: int) -> "Image":
    from PIL import Image

    try:
        with Image.open(BytesIO(content), formats=FORMATS) as image:
            _check_size(image.width, image.height, param)
            if image.width * image.height > room:
                raise _refusal(
                    param,
                    "is one too many: all images together must have at most "
                    f"{MAX_PIXELS_TOGETHER} pixels.",
                )
            return image.convert("RGB")
    except InvalidRequestError:
        raise
    except Image.DecompressionBombError:
        raise _refusal(param, _TOO_LARGE) from None
    except Exception:  # A hostile file may cause any error in a decoder.
        raise _refusal(
            param, f"is damaged or not an image in one of these formats: {', '.join(FORMATS)}."
        ) from None


def _check_size(width: int, height: int, param: str) -> None:
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise _refusal(param, f"{_TOO_LARGE} Given: {width} x {height}.")


def _refusal(param: str, wrong: str) -> InvalidRequestError:
    return InvalidRequestError(f"'{param}' {wrong}", param=param)
