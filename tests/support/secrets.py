"""A scan for keys, tokens and other secrets in all output of the processes, plain or encoded.

It finds secrets that the caller names, and anything in the form of an API key (with a valid
checksum) or of a JWT. It also finds both as base64 in either alphabet, as hexadecimal digits and
percent-encoded, nested at most twice, at any position in a longer text.

Compressed data must be unpacked first: for Redis that means its append-only file, or DUMP without
compression.
"""

import base64
import binascii
import re
import string
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self
from urllib.parse import unquote_to_bytes

import msgspec

from gateway.auth.api_key import SECRET_CHARACTERS, ApiKey, MalformedKeyError

CHUNK_BYTES: Final = 8 << 20
OVERLAP_BYTES: Final = 64 << 10
"""Longer than any encoded secret, so that none is split between two chunks."""
DEPTH: Final = 2
ANCHOR_BYTES: Final = 8
"""Length of the searched part of a secret. Shorter secrets are refused."""

_ALPHABET = (string.ascii_letters + string.digits + "+/_-%").encode()
_TO_SPACES = bytes(byte if byte in _ALPHABET else 32 for byte in range(256))
_TO_STANDARD = bytes.maketrans(b"-_", b"+/")
_RUN = re.compile(rb"[A-Za-z0-9+/_%-]+")
_KEY = re.compile(rb"sk-[A-Za-z0-9]{12}-[A-Za-z0-9]{40}")
_JWT = re.compile(rb"(eyJ[A-Za-z0-9_-]+)\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]{20,}")
_BASE64 = re.compile(rb"[A-Za-z0-9+/_-]+")
_HEX = re.compile(rb"[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """A secret in the wrong place. Its repr does not show the secret."""

    source: str
    offset: int
    what: str


def scan_for_secrets(
    sources: Mapping[str, bytes | str | Path], secrets: Iterable[str] = ()
) -> list[Finding]:
    """Return every place in texts and files, by their names, that contains a secret.

    Raises ValueError for a secret that is too short to be distinguished from chance.
    """
    wanted = _Wanted.from_secrets(secrets)
    found: set[Finding] = set()
    for name, source in sources.items():
        for start, chunk in _chunks(source):
            for offset, what in _scan(chunk, wanted):
                found.add(Finding(name, start + offset, what))
    return sorted(found)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The secrets of a scan, prepared for the search."""

    needles: Mapping[bytes, list[tuple[bytes, int]]]
    """By anchor: secrets that contain it, and its position in the secret."""
    least_run: int
    """No shorter run of letters and digits contains one of them."""
    least_encoded: int
    """No shorter run contains any secret as base64, which is the shortest encoding."""

    @classmethod
    def from_secrets(cls, secrets: Iterable[str]) -> Self:
        needles: defaultdict[bytes, list[tuple[bytes, int]]] = defaultdict(list)
        least_run = shortest = SECRET_CHARACTERS
        for secret in secrets:
            needle = _secret_part(secret).encode()
            run = max(_RUN.finditer(needle), key=lambda run: len(run.group()), default=None)
            if run is None or len(run.group()) < ANCHOR_BYTES:
                raise ValueError(f"A secret must have {ANCHOR_BYTES} letters or digits in a row.")
            needles[run.group()[:ANCHOR_BYTES]].append((needle, run.start()))
            least_run = min(least_run, len(run.group()))
            shortest = min(shortest, len(needle))
        return cls(needles, least_run, shortest * 4 // 3)


def _chunks(source: bytes | str | Path) -> Iterator[tuple[int, bytes]]:
    if isinstance(source, Path):
        with source.open("rb") as file:
            size = source.stat().st_size
            for start in range(0, max(size, 1), CHUNK_BYTES):
                file.seek(start)
                yield start, file.read(CHUNK_BYTES + OVERLAP_BYTES)
        return
    data = source.encode("utf-8", "replace") if isinstance(source, str) else source
    for start in range(0, max(len(data), 1), CHUNK_BYTES):
        yield start, data[start : start + CHUNK_BYTES + OVERLAP_BYTES]


def _secret_part(secret: str) -> str:
    """Return the secret part: a key's prefix and a token's header and claims are no secrets."""
    if _KEY.fullmatch(secret.encode()):
        return secret[-SECRET_CHARACTERS:]
    if _JWT.fullmatch(secret.encode()):
        return secret.rpartition(".")[2]
    return secret


def _scan(data: bytes, wanted: _Wanted, depth: int = DEPTH) -> Iterator[tuple[int, str]]:
    """Return where in the data a secret begins, or the run of characters that encodes one."""
    yield from _forms(data)
    runs = list(_long_runs(data, min(wanted.least_run, wanted.least_encoded)))
    yield from _known(data, runs, wanted)
    if depth:
        encoded = [(start, text) for start, text in runs if len(text) >= wanted.least_encoded]
        for disguise, view in _views(encoded, wanted.least_encoded).items():
            for offset, what in _scan(view.data, wanted, depth - 1):
                yield view.origin(offset), f"{what}, {disguise}"


def _long_runs(data: bytes, least: int) -> Iterator[tuple[int, bytes]]:
    # Two calls in C do the splitting; only the few long runs are searched one by one.
    place = 0
    for run in data.translate(_TO_SPACES).split():
        if len(run) >= least:
            place = data.index(run, place)
            yield place, run
            place += len(run)


def _known(
    data: bytes, runs: Iterable[tuple[int, bytes]], wanted: _Wanted
) -> Iterator[tuple[int, str]]:
    needles, none = wanted.needles, ()
    for start, run in runs:
        if len(run) < wanted.least_run or not needles:
            continue
        for place in range(len(run) - ANCHOR_BYTES + 1):
            for needle, begin in needles.get(run[place : place + ANCHOR_BYTES], none):
                offset = start + place - begin
                if offset >= 0 and data.startswith(needle, offset):
                    yield offset, f"known secret of {len(needle)} characters"


def _forms(data: bytes) -> Iterator[tuple[int, str]]:
    for match in _KEY.finditer(data):
        try:
            key = ApiKey.parse(match.group().decode())
        except MalformedKeyError:
            continue
        yield match.start(), f"API key {key.prefix}"
    for match in _JWT.finditer(data):
        if _is_header(match.group(1)):
            yield match.start(), "JWT"


def _is_header(text: bytes) -> bool:
    try:
        header = msgspec.json.decode(base64.urlsafe_b64decode(text + b"=" * (-len(text) % 4)))
    except (binascii.Error, msgspec.DecodeError, UnicodeDecodeError):
        return False
    return isinstance(header, dict) and "alg" in header


class _View:
    """The decoded form of many runs of characters in one encoding; wrong guesses give noise."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._starts: list[int] = []
        self._origins: list[int] = []
        self._size = 0

    @property
    def data(self) -> bytes:
        return b"\n".join(self._parts)

    def add(self, origin: int, decoded: bytes) -> None:
        self._parts.append(decoded)
        self._starts.append(self._size)
        self._origins.append(origin)
        self._size += len(decoded) + 1

    def origin(self, offset: int) -> int:
        """Return where the run begins from which this byte was decoded."""
        return self._origins[bisect_right(self._starts, offset) - 1]


def _views(runs: Iterable[tuple[int, bytes]], least: int) -> dict[str, _View]:
    views = {"percent-encoded": _View(), "base64": _View(), "hexadecimal": _View()}
    for start, run in runs:
        if b"%" in run:
            views["percent-encoded"].add(start, unquote_to_bytes(run))
        for match in _BASE64.finditer(run):
            text = match.group()
            if len(text) >= least:
                _add_base64(views["base64"], start, text.translate(_TO_STANDARD))
        for match in _HEX.finditer(run):
            if len(match.group()) >= least:
                _add_hex(views["hexadecimal"], start, match.group())
    return views


def _add_base64(view: _View, origin: int, text: bytes) -> None:
    # Other characters may precede it, so any of four positions may be its first.
    for skipped in range(4):
        whole = text[skipped : len(text) - (len(text) - skipped) % 4]
        view.add(origin, binascii.a2b_base64(whole) + _rest(text, skipped))


def _add_hex(view: _View, origin: int, digits: bytes) -> None:
    for skipped in range(2):
        view.add(
            origin, binascii.unhexlify(digits[skipped : len(digits) - (len(digits) - skipped) % 2])
        )


def _rest(text: bytes, skipped: int) -> bytes:
    """Return the bytes in the last two or three characters of base64 without padding."""
    rest = (len(text) - skipped) % 4
    return binascii.a2b_base64(text[-rest:] + b"=" * (4 - rest)) if rest > 1 else b""
