"""Process that decodes one audio file, of whatever content.

    python -m gateway.completions.prompt.audio.program \
        MEMORY_BYTES CPU_SECONDS MOST_SECONDS CLIP_SECONDS

It reads the file from standard input. To standard output it writes a line of JSON, the `Outcome`,
and then the samples of all clips (`contract.messages.AUDIO_RATE`). Memory and CPU time are limited,
and it can open no files.
"""

import os
import resource
import sys
from array import array
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from itertools import chain
from typing import Final

import av
import av.subtitles.stream  # Before no more files can be opened.
import msgspec

from contract.messages import AUDIO_RATE, SAMPLE_BYTES
from gateway.completions.prompt.audio import Outcome

FORMATS: Final = "aac,flac,matroska,webm,mov,mp4,m4a,mp3,mpeg,ogg,wav"
"""ffmpeg's names of the containers that are read. Others may name files to be opened, as playlists
do."""
LEAST_SECONDS: Final = 0.1
MOST_RATE: Final = 768_000
"""The highest sample rate: the filter of a resampler grows with it, up to gigabytes."""
_NICENESS: Final = 5
_QUIET_SECONDS: Final = 5
"""A cut is made within so many seconds before the end of the longest clip."""
_FRAME: Final = AUDIO_RATE // 10
"""Samples of the pieces whose loudness is compared."""


class RefusedAudioError(Exception):
    """The file cannot be transcribed. The message is that of `Outcome.refusal`."""


def decode(content: bytes, *, most_seconds: int) -> bytearray:
    """Return the samples of a file. Raises RefusedAudioError and MemoryError."""
    samples = bytearray()
    try:
        for piece in _pieces(content, most_seconds):
            samples += piece
    except MemoryError:
        raise
    except (av.FFmpegError, ValueError, IndexError):
        raise RefusedAudioError(
            f"is damaged, has no audio, or is in none of these formats: {FORMATS}"
        ) from None
    seconds = len(samples) / (AUDIO_RATE * SAMPLE_BYTES)
    if seconds < LEAST_SECONDS:
        raise RefusedAudioError(
            f"must have at least {LEAST_SECONDS} seconds of audio. Given: {seconds:.3f}"
        )
    return samples


def _pieces(content: bytes, most_seconds: int) -> Iterator[memoryview]:
    options = {"format_whitelist": FORMATS, "codec_whitelist": ",".join(_audio_codecs())}
    with av.open(BytesIO(content), mode="r", options=options) as container:
        frames = container.decode(container.streams.audio[0])
        resampler = av.AudioResampler("s16", "mono", AUDIO_RATE)
        given, made, rate = 0, 0, AUDIO_RATE
        # For None, a resampler returns what it has kept. It rejects frames of another rate.
        for frame in chain(frames, [None]):
            if frame is not None:
                given, rate = given + frame.samples, frame.sample_rate
                _check(given, rate, most_seconds)
            for each in resampler.resample(frame):
                made += each.samples
                yield memoryview(each.planes[0])[: each.samples * SAMPLE_BYTES]
        if made < (given / rate - LEAST_SECONDS) * AUDIO_RATE:
            raise MemoryError  # Without memory, a resampler drops samples and reports no error.


def _check(samples: int, rate: int, most_seconds: int) -> None:
    """Check frames before they are resampled: a few samples of a low rate become many.

    Raises RefusedAudioError.
    """
    if not 0 < rate <= MOST_RATE:
        raise RefusedAudioError(
            f"must have a sample rate from 1 to {MOST_RATE} hertz. Given: {rate}"
        )
    if samples > most_seconds * rate:
        raise RefusedAudioError(
            f"must have at most {most_seconds} seconds of audio. "
            f"Given: at least {samples / rate:.3f}"
        )


def _audio_codecs() -> Iterator[str]:
    """Yield ffmpeg's names of all audio decoders: it decodes no images to find the streams."""
    for name in av.codecs_available:
        with suppress(av.codec.codec.UnknownCodecError):
            if av.Codec(name, "r").type == "audio":
                yield name


def cut(samples: bytes | bytearray, *, clip_seconds: int) -> list[int]:
    """Return the samples of each clip: as few clips as possible, cut at quiet points."""
    left, longest = len(samples) // SAMPLE_BYTES, clip_seconds * AUDIO_RATE
    lengths: list[int] = []
    while left > longest:
        # Not earlier than needed: the rest must fit into clips that are as long.
        earliest = longest - min(_QUIET_SECONDS, clip_seconds // 2) * AUDIO_RATE
        start = sum(lengths) + earliest
        end = start + longest - earliest
        tail = array("h", bytes(samples[start * SAMPLE_BYTES : end * SAMPLE_BYTES]))
        places = range(0, len(tail) - _FRAME + 1, _FRAME)
        quietest = min(places, key=lambda at: sum(map(abs, tail[at : at + _FRAME])))
        lengths.append(earliest + quietest + _FRAME // 2)
        left -= lengths[-1]
    return [*lengths, left]


def main() -> None:
    """Limit this process, decode the file, and write the outcome."""
    memory_bytes, cpu_seconds, most_seconds, clip_seconds = map(int, sys.argv[1:])
    os.nice(_NICENESS)
    for kind, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 3),
    ):
        resource.setrlimit(kind, (limit, limit))
    content, samples = sys.stdin.buffer.read(), bytearray()
    try:
        samples = decode(content, most_seconds=most_seconds)
        outcome = Outcome(cut(samples, clip_seconds=clip_seconds))
    except RefusedAudioError as error:
        outcome, samples = Outcome(refusal=str(error)), bytearray()
    except MemoryError:
        refusal = f"needs more than {memory_bytes} bytes of memory to be decoded"
        outcome, samples = Outcome(refusal=refusal), bytearray()
    sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
    sys.stdout.buffer.write(samples)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
