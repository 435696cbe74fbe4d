"""Image files: decoded within bounds; hostile ones are refused by name before they do harm."""

import struct
import time
import zlib
from io import BytesIO

import pytest
from PIL import Image

from tests.support.cases import all_cases
from worker.engine.base import InvalidRequestError
from worker.engine.vllm.prompts import (
    FORMATS,
    MAX_PIXELS,
    MAX_PIXELS_TOGETHER,
    most_pixels,
    read_images,
)


def image_file(
    file_format: str = "PNG", size: tuple[int, int] = (40, 30), color: str = "red"
) -> bytes:
    """Return an image of one colour as a file."""
    buffer = BytesIO()
    Image.new("RGB", size, color).save(buffer, file_format)
    return buffer.getvalue()


def png_that_claims(width: int, height: int, *more: tuple[bytes, bytes]) -> bytes:
    """Return a PNG of a few bytes whose header claims this size, with more chunks after it."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), *more, (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def webp_that_claims(width: int, height: int) -> bytes:
    """Return a WebP of one pixel whose extended header claims this canvas."""
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    header = b"VP8X" + struct.pack("<I", 10) + bytes(4) + sides
    body = b"WEBP" + header + image_file("WEBP", (1, 1))[12:]
    return b"RIFF" + struct.pack("<I", len(body)) + body


def gif_that_claims(width: int, height: int) -> bytes:
    """Return a GIF of one frame whose screen has this size."""
    screen = b"GIF89a" + struct.pack("<HH", width, height) + b"\x80\0\0" + bytes(6)
    return screen + b"\x2c" + struct.pack("<HHHH", 0, 0, 1, 1) + b"\0\x02\x02\x44\x01\0;"


def read(files: list[bytes]) -> list[Image.Image]:
    named = [f"image {number}" for number, _ in enumerate(files)]
    return read_images(files, named, most_pixels=most_pixels(window=2048))


@all_cases("file_format", FORMATS)
def test_each_format_becomes_rgb(file_format: str) -> None:
    (image,) = read([image_file(file_format)])
    assert (image.mode, image.size) == ("RGB", (40, 30))
    red, green, blue = image.getpixel((20, 15))  # type: ignore[misc]  # Three, being RGB.
    assert red > 240
    assert max(green, blue) < 20


@all_cases("mode", ["L", "LA", "P", "RGBA", "1", "I;16"])
def test_other_kinds_of_pixels_become_rgb(mode: str) -> None:
    buffer = BytesIO()
    Image.new(mode, (4, 4)).save(buffer, "PNG")
    assert read([buffer.getvalue()])[0].mode == "RGB"


def test_first_frame_of_an_animation_counts() -> None:
    buffer = BytesIO()
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    assert read([buffer.getvalue()])[0].getpixel((0, 0)) == (255, 0, 0)


def test_order_is_kept() -> None:
    files = [image_file(color=color) for color in ("red", "blue", "lime")]
    assert [image.getpixel((0, 0)) for image in read(files)] == [
        (255, 0, 0),
        (0, 0, 255),
        (0, 255, 0),
    ]


def compressed(megabytes: int) -> bytes:
    """Return compressed zeros, joined from parts: to compress them all takes a second."""
    part = bytes(1_000_000)
    compressor, checksum = zlib.compressobj(), 1
    # A part after a full flush does not depend on earlier ones.
    first, again = (
        compressor.compress(part) + compressor.flush(zlib.Z_FULL_FLUSH) for _ in range(2)
    )
    for _ in range(megabytes):
        checksum = zlib.adler32(part, checksum)
    last = b"\x03\0" + checksum.to_bytes(4, "big")
    return first + again * (megabytes - 1) + last


FIFTY_MEGABYTES = compressed(50)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "damaged or not an image"),
    "text": (b"hello", "damaged or not an image"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'></svg>", "JPEG, PNG, WEBP, GIF"),
    "bmp": (image_file("BMP"), "JPEG, PNG, WEBP, GIF"),
    "tiff": (image_file("TIFF"), "JPEG, PNG, WEBP, GIF"),
    "half a jpeg": (image_file("JPEG", (400, 400))[:900], "damaged"),
    "half a png": (image_file("PNG", (400, 400))[:200], "damaged"),
    "header of a webp": (image_file("WEBP")[:20], "damaged"),
    "bomb": (png_that_claims(2**31 - 1, 2**31 - 1), "at most 16000000 pixels"),
    "large bomb": (png_that_claims(20_000, 20_000), "at most 16000000 pixels"),
    "small bomb": (png_that_claims(4001, 4000), "Given: 4001 x 4000"),
    "webp bomb": (webp_that_claims(16_383, 16_383), "at most 16000000 pixels"),
    "gif bomb": (gif_that_claims(65_535, 65_535), "at most 16000000 pixels"),
    "text bomb": (
        png_that_claims(4, 4, (b"zTXt", b"k\0\0" + FIFTY_MEGABYTES)),
        "damaged",
    ),
    "profile bomb": (
        png_that_claims(4, 4, (b"iCCP", b"k\0\0" + FIFTY_MEGABYTES)),
        "damaged",
    ),
    "thin line": (png_that_claims(20_000, 1), "16384 on a side"),
    "no width": (png_that_claims(0, 10), "damaged"),
    "less than promised": (png_that_claims(4000, 4000), "damaged"),
}


@all_cases("name", HOSTILE)
def test_hostile_file_is_refused_by_its_place(name: str) -> None:
    content, message = HOSTILE[name]
    started = time.process_time()
    with pytest.raises(InvalidRequestError, match=message) as refused:
        read([image_file(), content])
    assert str(refused.value).startswith("'image 1' ")
    assert refused.value.param == "image 1"
    assert time.process_time() - started < 1.0


def test_largest_images_are_accepted_within_the_total_bound() -> None:
    side = int(MAX_PIXELS**0.5)
    largest = image_file("PNG", (side, side))
    most = MAX_PIXELS_TOGETHER[0] // MAX_PIXELS
    assert [image.size for image in read([largest])] == [(side, side)]
    with pytest.raises(InvalidRequestError, match=r"'image 4' is one too many: .* 64000000 pixels"):
        read([largest] * most + [image_file()])
    # A window that has room for a hundred screenshots has the pixels for them, within a bound.
    assert most_pixels(window=131_072) >= 100 * 1280 * 1024
    assert most_pixels(window=2_000_000) == MAX_PIXELS_TOGETHER[1]
