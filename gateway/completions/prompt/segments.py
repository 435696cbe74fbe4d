"""Encode a prompt in segments, so that the next turn of a session encodes only what is new in it.

A tokenizer first splits a text at its added tokens, and everything later sees one piece at a time:
normalizer, pre-tokenizer, model. So the ids of a text are those of its segments, if each segment
but the first begins with an added token that the tokenizer finds there whatever is before it. Its
token belongs to a segment because what follows may depend on it: a token may take the spaces after
it, and SentencePiece puts a space before the first word of a text only.
"""

import hashlib
import os
import re
import string
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from threading import Lock
from typing import Final, NamedTuple, Self

import msgspec
from tokenizers import AddedToken, Tokenizer

from gateway.completions.prompt import literal_text
from gateway.completions.prompt.fast_tokenizers import FastTokenizer

LEAST_CHARACTERS: Final = 4_096
"""A shorter text is encoded as a whole."""
SHORTEST_SEGMENT: Final = 64
"""Characters from the token before to the token that begins a segment. It depends on these two
places alone, so that a change of a text moves only the segments beside it."""
LONGEST_JOINED: Final = 2_048
"""Characters of a segment after which any of its tokens begins the next one."""
ENTRY_BYTES: Final = 256
"""Memory of a segment in the cache in addition to its ids."""
_SEGMENTS_AT_ONCE: Final = 32
"""Segments per encoding call: encodings need more memory than their ids."""
_KEY_BYTES: Final = 16
_FREED_SHARE: Final = 16
"""A full cache frees this part of its bytes, so that it looks for the largest tenant rarely."""
_PROBES: Final = ("", "a", " b", "\n\n c\t", "é́ ☺", "1 23.", "  ", "▁d", "E-f\n")


class SegmentCache:
    """Token ids of segments in memory, by tenant; the least recently used ones are dropped.

    All methods are safe to call from several threads.
    """

    def __init__(self, *, most_bytes: int, most_bytes_of_tenant: int) -> None:
        """Create an empty cache. A tenant has at most `most_bytes` too."""
        self.bytes = 0
        """Approximate memory of all segments."""
        self._most = most_bytes
        self._most_of_tenant = min(most_bytes_of_tenant, most_bytes)
        self._shares: dict[str, _Share] = {}
        self._lock = Lock()
        self.secret: Final = os.urandom(32)
        """Key of the digests that name segments."""

    def get(self, tenant_id: str, names: Iterable[bytes]) -> dict[bytes, bytes]:
        """Return the packed ids of those segments that the tenant has, by name."""
        with self._lock:
            share = self._shares.get(tenant_id)
            return {} if share is None else share.use(names)

    def put(self, tenant_id: str, segments: Mapping[bytes, bytes]) -> None:
        """Add segments. Those of other tenants stay unless they have more bytes than this one."""
        with self._lock:
            share = self._shares.setdefault(tenant_id, _Share())
            for name, ids in segments.items():
                self.bytes += share.add(name, ids)
            self._shrink(tenant_id, self._most_of_tenant)
            while self.bytes > self._most:
                largest = max(self._shares, key=lambda each: self._shares[each].bytes)
                left = self._shares[largest].bytes - self._most // _FREED_SHARE - 1
                self._shrink(largest, max(left, 0))

    def _shrink(self, tenant_id: str, most: int) -> None:
        share = self._shares[tenant_id]
        self.bytes -= share.shrink(most)
        if not share.segments:
            del self._shares[tenant_id]


class _Share:
    """The segments of one tenant."""

    __slots__ = ("bytes", "segments")

    def __init__(self) -> None:
        self.bytes = 0
        self.segments: OrderedDict[bytes, bytes] = OrderedDict()
        """By name, the one used last at the end."""

    def use(self, names: Iterable[bytes]) -> dict[bytes, bytes]:
        found = {name: self.segments[name] for name in names if name in self.segments}
        for name in found:
            self.segments.move_to_end(name)
        return found

    def add(self, name: bytes, ids: bytes) -> int:
        """Return the bytes that this takes."""
        added = 0 if name in self.segments else len(ids) + ENTRY_BYTES
        self.segments[name] = ids
        self.bytes += added
        return added

    def shrink(self, most: int) -> int:
        """Return the bytes that this frees."""
        before = self.bytes
        while self.bytes > most:
            _, ids = self.segments.popitem(last=False)
            self.bytes -= len(ids) + ENTRY_BYTES
        return before - self.bytes


class Segmenter(NamedTuple):
    """Where a tokenizer's texts can be divided."""

    tokens: re.Pattern[str]
    """Finds the added tokens as the tokenizer does."""
    openings: frozenset[str]
    """Those of them that may begin a segment."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self | None:
        """Return the segmenter of a tokenizer; None if its texts must be encoded as a whole."""
        added = [each for each in tokenizer.get_added_tokens_decoder().values() if each.content]
        # Others are found in the normalized text of each piece.
        added = [each for each in added if not each.normalized]
        openings = frozenset(each.content for each in added if _opens(each))
        is_random = bool(getattr(tokenizer.model, "dropout", None))
        if not openings or is_random or tokenizer.encode_special_tokens:
            return None
        tokens = re.compile(literal_text.pattern_of(each.content for each in added))
        segmenter = cls(tokens, openings)
        return segmenter if segmenter._is_exact(tokenizer) else None

    def split(self, text: str) -> list[str]:
        """Return the segments of a text, in order."""
        starts, last = [0], -SHORTEST_SEGMENT
        for match in self.tokens.finditer(text):
            start = match.start()
            is_long = start - last >= SHORTEST_SEGMENT or start - starts[-1] >= LONGEST_JOINED
            if is_long and start and match[0] in self.openings:
                starts.append(start)
            last = start
        return [text[one:other] for one, other in pairwise([*starts, len(text)])]

    def _is_exact(self, tokenizer: Tokenizer) -> bool:
        """Whether segments have the ids of the whole, in a text with all kinds of neighbors."""
        openings = sorted(self.openings)[: len(_PROBES) * 4]
        segments = [
            opening + probe
            for shift in (0, 4)
            for index, opening in enumerate(openings)
            for probe in [_PROBES[(index + shift) % len(_PROBES)]]
        ]
        whole = tokenizer.encode_batch_fast(["".join(segments)], add_special_tokens=False)[0].ids
        parts = tokenizer.encode_batch_fast(segments, add_special_tokens=False)
        return whole == [token for part in parts for token in part.ids]


class KnownSegments(NamedTuple):
    """Encodes texts of one tenant with one tokenizer, each segment once."""

    cache: SegmentCache
    segmenter: Segmenter
    tokenizer_digest: str
    tenant_id: str
    isolation_key: str = ""
    """Separates what is known within the tenant, as the engine's caches are."""
    fast: FastTokenizer | None = None
    """Encodes long texts as the tokenizer does; None: the tokenizer encodes them."""

    def encode(self, text: str, tokenizer: Tokenizer, inner: Tokenizer | None) -> "array[int]":
        """Return the ids of a text, without the tokenizer's own special tokens around it.

        `inner` encodes what `literal_text` protects; if it is None, nothing is protected.
        """
        segments = self.segmenter.split(text)
        salted = hashlib.blake2b(digest_size=_KEY_BYTES, key=self.cache.secret)
        salt = (self.tokenizer_digest, self.tenant_id, self.isolation_key, inner is None)
        salted.update(msgspec.msgpack.encode(salt))
        names: list[bytes] = []
        for segment in segments:
            name = salted.copy()
            name.update(segment.encode())
            names.append(name.digest())
        known = self.cache.get(self.tenant_id, names)
        named = zip(names, segments, strict=True)
        if new := {name: segment for name, segment in named if name not in known}:
            encoded = self._encoded([*new.values()], tokenizer, inner)
            added = dict(zip(new, encoded, strict=True))
            self.cache.put(self.tenant_id, added)
            known |= added
        return array("I", b"".join([known[name] for name in names]))

    def _encoded(
        self, segments: Sequence[str], tokenizer: Tokenizer, inner: Tokenizer | None
    ) -> list[bytes]:
        found: list[bytes] = []
        for start in range(0, len(segments), _SEGMENTS_AT_ONCE):
            several = segments[start : start + _SEGMENTS_AT_ONCE]
            encodings = (
                tokenizer.encode_batch_fast(several, add_special_tokens=False)
                if self.fast is None
                else self.fast.encode_batch(several)
            )
            for segment, encoding in zip(several, encodings, strict=True):
                ids: list[int] = encoding.ids
                if inner is not None and literal_text.MARK in segment:
                    ids = literal_text.token_ids(segment, tokenizer, inner)
                found.append(array("I", ids).tobytes())
        return found


def _opens(token: AddedToken) -> bool:
    # What is before it must not decide whether it is found, nor it about what is before it.
    first = token.content[0]
    is_word = first not in string.punctuation or first == "_"
    return not (token.lstrip or token.single_word or is_word)
