"""Hostile audio files end with an outcome, and never take more memory than a decoder may have."""

import asyncio
import io
import random
import struct
import subprocess
import sys
import wave
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import av
import msgspec
import pytest

from contract.messages import AUDIO_RATE
from gateway.completions.prompt.audio import Outcome, decoder
from gateway.platform.settings import Settings
from gateway.records.errors import InvalidParameterError, TenantQueueFullError
from tests.support.patience import PATIENCE_SECONDS
from tests.support.speech_model import sound

MOST_SECONDS = 100

MEASURED = """
import sys
status = open("/proc/self/status")
import resource
limit = resource.setrlimit
resource.setrlimit = lambda kind, most: kind == resource.RLIMIT_NOFILE or limit(kind, most)
from gateway.completions.prompt.audio import program
try:
    program.main()
finally:
    sys.stderr.write(next(each.split()[1] for each in open("/proc/self/status") if "VmHWM" in each))
"""
"""The program, which then writes its peak of resident memory in KiB."""


def decoded(content: bytes) -> Outcome:
    """Return what became of a file, whose decoder must take little memory."""
    limits = decoder.command(len(content), MOST_SECONDS, 30)[4:]
    program = [sys.executable, "-P", "-c", MEASURED, *limits]
    done = subprocess.run(program, input=content, capture_output=True, check=False, env={})
    assert done.returncode == 0, done.stderr
    # Python and ffmpeg take 40 MiB.
    assert int(done.stderr) * 1024 < 64 * 2**20 + 4 * len(content)
    return msgspec.json.decode(done.stdout.partition(b"\n")[0], type=Outcome)


def pcm(rate: int, data: bytes, *, channels: int = 1, width: int = 2) -> bytes:
    """Return a WAV file of these samples."""
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(data)
    return content.getvalue()


def encoded(
    container: str,
    codec: str,
    form: str,
    seconds: int,
    *,
    rate: int = 16_000,
    packet: int = 1024,
    film: int = 0,
) -> bytes:
    """Return a file of silence; of a `film`, with a picture that has so many pixels squared."""
    content, samples = io.BytesIO(), seconds * rate
    opened: Any = av.open(content, "w", format=container)
    with opened as file:
        stream = file.add_stream(codec, rate=rate, layout="mono")
        if film:
            size = {"width": film, "height": film}
            pictures = file.add_stream("mpeg4", rate=1, pix_fmt="yuv420p", **size)
            picture = av.VideoFrame(format="yuv420p", **size)
            file.mux([*pictures.encode(picture), *pictures.encode(None)])
        for start in range(0, samples, packet):
            frame = av.AudioFrame(form, "mono", min(packet, samples - start))
            for plane in frame.planes:
                plane.update(bytes(plane.buffer_size))
            frame.sample_rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return content.getvalue()


def patched(content: bytes, mark: bytes, at: int, *values: int) -> bytes:
    """Return a file with big-endian numbers from `at` bytes after the last `mark` on."""
    start, numbers = content.rindex(mark) + at, struct.pack(f">{len(values)}I", *values)
    return content[:start] + numbers + content[start + len(numbers) :]


def counted(samples: int) -> bytes:
    """Return an MP4 file whose header claims so many samples."""
    content = encoded("mp4", "aac", "fltp", 2)
    content = patched(content, b"stsz", 8, 1, samples)
    content = patched(content, b"stts", 8, 1, samples, 1024)
    return patched(content, b"stsc", 8, 1, 1, samples, 1)


TAG = b"ID3\x03\x00\x00" + bytes([5, 92, 54, 0])
"""The head of a tag of 12 MB."""
TOO_LONG = f"must have at most {MOST_SECONDS} seconds of audio. Given: at least "
RATE = "must have a sample rate from 1 to 768000 hertz. Given: "
MEMORY, DAMAGED = "bytes of memory to be decoded", "is damaged"

FILES: dict[str, tuple[Callable[[], bytes], float | str]] = {
    "1 Hz in one packet": (
        lambda: encoded("matroska", "pcm_s16le", "s16", 60_000, rate=1, packet=60_000),
        TOO_LONG + "60000.000",
    ),
    "1 Hz in packets": (lambda: pcm(1, bytes(120_000)), TOO_LONG),
    "1 Hz within the bound": (lambda: pcm(1, bytes(200)), 100.0),
    "2 GHz": (lambda: pcm(2**31 - 1, bytes(12_000_000)), RATE + "2147483647"),
    "100 MHz": (lambda: pcm(100_000_000, bytes(24_000_000)), RATE),
    "the longest, in the largest file": (lambda: pcm(120_000, bytes(24_000_000)), 100.0),
    "one packet of 24 MB": (
        lambda: encoded("matroska", "pcm_s16le", "s16", 100, rate=120_000, packet=12_000_000),
        MEMORY,
    ),
    "hours of silence": (lambda: encoded("flac", "flac", "s16", 3_600), TOO_LONG),
    "64 channels": (lambda: pcm(16_000, bytes(12_800_000), channels=64), DAMAGED),
    "65,535 channels": (lambda: pcm(16_000, bytes(131_070), channels=65_535, width=1), DAMAGED),
    "a header of 4 GiB": (
        lambda: sound(1).replace(struct.pack("<I", 32_000), b"\xff" * 4),
        1.0,
    ),
    "a header of nothing": (lambda: sound(1).replace(struct.pack("<I", 32_000), bytes(4)), 1.0),
    "a WAV file in a WAV file": (lambda: pcm(16_000, sound(1)), 1.001375),
    "frames of 16 million samples": (
        lambda: patched(encoded("ipod", "alac", "s16p", 2), b"alac", 8, 2**24),
        MEMORY,
    ),
    "50 million samples in a header": (lambda: counted(50_000_000), "at least 0.1 seconds"),
    "a film": (lambda: encoded("mp4", "aac", "fltp", 1, film=8_000), 1.024),
    "a tag of 12 MB": (lambda: TAG + bytes(12_000_000) + encoded("mp3", "mp3", "s16p", 2), 2.0),
    "no audio": (lambda: b"\x89PNG\r\n\x1a\n" + bytes(100_000), DAMAGED),
}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_takes_bounded_memory(name: str) -> None:
    make, expected = FILES[name]
    outcome = decoded(make())
    seconds = sum(outcome.samples) / AUDIO_RATE
    if isinstance(expected, str):
        assert expected in outcome.refusal
    else:
        assert seconds == pytest.approx(expected, abs=0.2), outcome.refusal


def test_damaged_files_take_bounded_memory() -> None:
    chance = random.Random(7)
    whole = [
        encoded("mp4", "aac", "fltp", 2),
        encoded("webm", "libopus", "s16", 2, rate=48_000, packet=960),
        encoded("ogg", "libopus", "s16", 2, rate=48_000, packet=960),
        encoded("mp3", "mp3", "s16p", 2),
        encoded("flac", "flac", "s16", 2),
        encoded("ipod", "alac", "s16p", 2),
        pcm(8_000, bytes(32_000)),
    ]
    for content in whole:
        for _ in range(4):
            damaged = bytearray(content)
            for _ in range(chance.choice((1, 8, 64))):
                # Mostly in the header, which has the numbers.
                at = chance.randrange(chance.choice((200, len(content))))
                damaged[at] = chance.choice((0, 1, 127, 128, 255))
            decoded(bytes(damaged[: chance.choice((len(damaged), len(damaged) // 2))]))


async def test_a_decoder_that_dies_disturbs_no_other_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, command = sound(1), decoder.command

    def dying(file_bytes: int, most_seconds: int, clip_seconds: int) -> tuple[str, ...]:
        if file_bytes == len(whole):
            return command(file_bytes, most_seconds, clip_seconds)
        return "/bin/sh", "-c", "kill -SEGV $$"

    monkeypatch.setattr(decoder, "command", dying)
    audio = decoder.AudioDecoder(Settings())
    files = [("bad", b"x"), ("good", whole), ("bad", b"x"), ("good", whole)]
    async with asyncio.timeout(PATIENCE_SECONDS):
        found = await asyncio.gather(
            *(audio.decode(file, clip_seconds=30, tenant_id=tenant) for tenant, file in files),
            return_exceptions=True,
        )
    for (tenant, _), each in zip(files, found, strict=True):
        if tenant == "good":
            assert isinstance(each, decoder.Clips)
            assert each.lengths == [16_000]
        else:
            assert isinstance(each, InvalidParameterError)
            assert (each.param, each.message) == ("file", "'file' is damaged.")


async def test_the_bytes_of_waiting_files_are_bounded() -> None:
    whole = sound(1)
    audio = decoder.AudioDecoder(Settings(max_held_bytes_of_tenant=2 * len(whole)))
    found = await asyncio.gather(
        *(audio.decode(whole, clip_seconds=30, tenant_id="a") for _ in range(5)),
        return_exceptions=True,
    )
    # One is decoded, and two wait.
    assert [isinstance(each, TenantQueueFullError) for each in found] == [False] * 3 + [True] * 2
