"""Tokenizers: fetch what workers publish in Redis, and encode prompts."""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, cast

import msgspec
from tokenizers import Encoding, Tokenizer

from common.tasks import in_background
from gateway.completions.prompt import literal_text
from gateway.completions.prompt.fast_tokenizers import FastTokenizer
from gateway.completions.prompt.segments import (
    LEAST_CHARACTERS,
    KnownSegments,
    SegmentCache,
    Segmenter,
)
from gateway.dialects.request import Prompt
from gateway.records.errors import InvalidParameterError, ServiceUnavailableError

LIKELY_BYTES_PER_TOKEN: Final = 4
"""A text with fewer bytes per token of the window is encoded as a whole."""
SLICE_CHARACTERS: Final = 16_384
"""Characters per slice when a longer text is encoded to determine whether it is too long."""
TORN_TOKENS: Final = 16
"""An upper bound on the tokens added by cutting a text at both ends of a slice."""
PIECES_AT_ONCE: Final = 1_024
"""Maximum texts of a prompt per encoding call: encodings need more memory than their ids."""


@dataclass(frozen=True, eq=False)
class PromptEncoder:
    """Encodes prompts to token ids exactly as the model's own tokenizer does.

    The methods are synchronous, and long texts take long: see
    `gateway.platform.concurrency.large_work`.
    """

    tokenizer: Tokenizer
    vocabulary_size: int
    bos_token_id: int | None
    inner: Tokenizer | None = None
    """Encodes what `literal_text` protects; None if nothing is protected."""
    known: KnownSegments | None = None
    """None encodes every text as a whole."""

    def encode(
        self, prompt: Prompt, *, param: str, adds_special_tokens: bool = True
    ) -> Sequence[int]:
        """Return the token ids of one prompt, at least one; packed if `known` has encoded them.

        Raises InvalidParameterError, which names `param`.
        """
        if isinstance(prompt, str):
            is_known = len(prompt) >= LEAST_CHARACTERS and not adds_special_tokens
            ids = (
                self.known.encode(prompt, self.tokenizer, self.inner)
                if is_known and self.known is not None
                else self.text_ids(prompt, adds_special_tokens=adds_special_tokens)
            )
            return ids or self._empty(param, adds_special_tokens=adds_special_tokens)
        ids = self.piece_ids(prompt, param=param, adds_special_tokens=adds_special_tokens)
        if not ids:
            raise InvalidParameterError(f"'{param}' must not be empty.", param="prompt")
        return ids

    def text_ids(self, text: str, *, adds_special_tokens: bool) -> list[int]:
        """Return the token ids of a text; empty if the text is empty and no token is added."""
        if self.inner is not None and literal_text.MARK in text:
            ids = literal_text.token_ids(text, self.tokenizer, self.inner)
            return self._with_added(ids) if adds_special_tokens else ids
        fast = None if self.known is None else self.known.fast
        if fast is not None and len(text) >= LEAST_CHARACTERS:
            ids = list(fast.encode_batch([text])[0].ids)
            return self._with_added(ids) if adds_special_tokens else ids
        [encoding] = self._encode_batch([text], adds_special_tokens=adds_special_tokens)
        return list(encoding.ids)

    def _with_added(self, ids: list[int]) -> list[int]:
        """Put the tokenizer's own tokens around the ids of a text."""
        bare, whole = (self.text_ids("a", adds_special_tokens=adds) for adds in (False, True))
        size = len(bare)
        start = next(at for at in range(len(whole)) if whole[at : at + size] == bare)
        return [*whole[:start], *ids, *whole[start + size :]]

    def piece_ids(
        self, pieces: list[str | int], *, param: str, adds_special_tokens: bool
    ) -> list[int]:
        """Return the ids of mixed token ids and texts. Raise InvalidParameterError on a bad id."""
        if not _has_text(pieces):
            self.check_ids(cast("list[int]", pieces), param=param)
            return cast("list[int]", pieces)
        ids: list[int] = []
        if adds_special_tokens and isinstance(pieces[0], str):
            # The begin-of-text token precedes the first piece, and only if that piece is text.
            ids += self.text_ids(pieces[0], adds_special_tokens=True)
            pieces = pieces[1:]
        for start in range(0, len(pieces), PIECES_AT_ONCE):
            several = pieces[start : start + PIECES_AT_ONCE]
            texts = [piece for piece in several if isinstance(piece, str)]
            encodings = iter(self._encode_batch(texts, adds_special_tokens=False) if texts else ())
            for piece in several:
                if isinstance(piece, str):
                    ids += next(encodings).ids
                else:
                    ids.append(piece)
        self.check_ids(ids, param=param)
        return ids

    def end_of(self, prompt: Prompt, *, tokens: int) -> Prompt:
        """Return the end of a prompt far longer than `tokens` tokens; others are unchanged.

        The end has more than `tokens` tokens, and its last tokens equal the last tokens of the
        whole prompt.
        The rest is not encoded: encoding takes a hundred times the memory of the text.
        """
        if isinstance(prompt, str):
            if not _is_far_longer([prompt], tokens):
                return prompt
            start, _ = self._start_of_end(prompt, tokens)
            return prompt[start:]
        if not _is_far_longer(prompt, tokens):
            return prompt
        end: list[str | int] = []
        for piece in reversed(prompt):
            if tokens < 0:
                return end[::-1]
            start = 0
            if isinstance(piece, str):
                start, tokens = self._start_of_end(piece, tokens)
                end.append(piece[start:])
            else:
                end.append(piece)
                tokens -= 1
        is_whole = len(end) == len(prompt) and not start
        return prompt if is_whole else end[::-1]

    def start_of(self, prompt: Prompt, *, tokens: int) -> Prompt:
        """Return the start of a prompt far longer than `tokens` tokens; others are unchanged.

        The start has more than `tokens` tokens, and its first tokens equal the first tokens of the
        whole prompt.
        """
        pieces: list[str | int] = [prompt] if isinstance(prompt, str) else prompt
        if not _is_far_longer(pieces, tokens):
            return prompt
        start: list[str | int] = []
        for piece in pieces:
            if tokens < 0:
                break
            if isinstance(piece, str):
                end, tokens = self._end_of_start(piece, tokens)
                start.append(piece[:end])
            else:
                start.append(piece)
                tokens -= 1
        return str(start[0]) if isinstance(prompt, str) else start

    def _end_of_start(self, text: str, tokens: int) -> tuple[int, int]:
        """Return an offset after a text's first `tokens` tokens, and the number still missing."""
        if len(text) <= SLICE_CHARACTERS:
            return len(text), tokens - len(self.text_ids(text, adds_special_tokens=False))
        end = 0
        tokens += TORN_TOKENS
        while end < len(text) and tokens >= 0:
            start, end = end, min(len(text), end + SLICE_CHARACTERS)
            found = len(self.text_ids(text[start:end], adds_special_tokens=False))
            tokens -= max(0, found - TORN_TOKENS)
        return end, tokens

    def _start_of_end(self, text: str, tokens: int) -> tuple[int, int]:
        """Return an offset before a text's last `tokens` tokens, and the number still missing."""
        if len(text) <= SLICE_CHARACTERS:
            return 0, tokens - len(self.text_ids(text, adds_special_tokens=False))
        start = len(text)
        tokens += TORN_TOKENS
        while start > 0 and tokens >= 0:
            end, start = start, max(0, start - SLICE_CHARACTERS)
            found = len(self.text_ids(text[start:end], adds_special_tokens=False))
            tokens -= max(0, found - TORN_TOKENS)
        return start, tokens

    def _encode_batch(self, texts: list[str], *, adds_special_tokens: bool) -> list[Encoding]:
        # Only the library's batch functions let other threads run meanwhile. This one also skips
        # the position of each token in the text, which makes it twice as fast as `encode`.
        return self.tokenizer.encode_batch_fast(texts, add_special_tokens=adds_special_tokens)

    def begin_ids(self) -> list[int]:
        """Return the begin-of-text token if the tokenizer adds it to texts, else an empty list."""
        bos = self.bos_token_id
        added = self.text_ids("", adds_special_tokens=True)
        return [bos] if bos is not None and bos in added else []

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids, including special tokens."""
        [text] = self.tokenizer.decode_batch([token_ids], skip_special_tokens=False)
        return str(text)

    def check_ids(self, ids: list[int], *, param: str) -> None:
        """Raise InvalidParameterError for the first id that is not in the vocabulary."""
        if not ids or (min(ids) >= 0 and max(ids) < self.vocabulary_size):
            return
        position, wrong = next(
            (i, t) for i, t in enumerate(ids) if not 0 <= t < self.vocabulary_size
        )
        raise InvalidParameterError(
            f"'{param}[{position}]' must be a token id from 0 to {self.vocabulary_size - 1}. "
            f"Given: {wrong}.",
            param=param.partition("[")[0],
        )

    def _empty(self, param: str, *, adds_special_tokens: bool) -> list[int]:
        if not adds_special_tokens:
            raise InvalidParameterError(
                f"'{param}' must not be empty if 'add_special_tokens' is false.", param="prompt"
            )
        if self.bos_token_id is None:
            raise InvalidParameterError(
                f"'{param}' must not be empty: this model has no begin-of-text token.",
                param="prompt",
            )
        return [self.bos_token_id]


def _is_far_longer(pieces: Sequence[str | int], tokens: int) -> bool:
    """Whether texts have far more bytes than so few tokens usually have."""
    if not _has_text(pieces):
        return False
    most = tokens * LIKELY_BYTES_PER_TOKEN + SLICE_CHARACTERS
    size = 0
    for piece in pieces:
        if isinstance(piece, str):
            size += len(piece) if piece.isascii() else len(piece.encode())
    return size > most


def _has_text(pieces: Sequence[str | int]) -> bool:
    # A list may have many token ids, so collect their types without a Python loop.
    return str in set(map(type, pieces))


class TokenizerStore:
    """The tokenizers of all served models; each digest is fetched once."""

    def __init__(
        self,
        fetch: Callable[[str], Awaitable[bytes | None]],
        segments: SegmentCache | None = None,
        *,
        is_fast: bool = False,
    ) -> None:
        """Create an empty store; without a cache of segments, all texts are encoded as a whole.

        If it `is_fast`, fastokens encodes long texts of models for which it is exact.
        """
        self._fetch = fetch
        self._is_fast = is_fast
        self._fast: dict[str, FastTokenizer | None] = {}
        self._segments = segments
        self._tokenizers: dict[str, Tokenizer] = {}
        self._segmenters: dict[str, Segmenter | None] = {}
        self._literal: dict[tuple[str, bool], Tokenizer] = {}
        self._lock = asyncio.Lock()

    async def get(self, digest: str) -> Tokenizer:
        """Return a tokenizer by the SHA-256 of its file.

        Raises ServiceUnavailableError if it no longer exists.
        """
        tokenizer = self._tokenizers.get(digest)
        if tokenizer is not None:
            return tokenizer
        async with self._lock:
            if digest not in self._tokenizers:
                file = await self.file(digest)
                self._tokenizers[digest], self._segmenters[digest] = await asyncio.to_thread(
                    _build, file
                )
                if self._is_fast:
                    in_background(self._speed_up(digest))
            return self._tokenizers[digest]

    async def _speed_up(self, digest: str) -> None:
        tokenizer = self._tokenizers[digest]
        self._fast[digest] = await asyncio.to_thread(FastTokenizer.of, tokenizer, digest[:12])

    def known(self, digest: str, tenant_id: str, isolation_key: str) -> KnownSegments | None:
        """Return what encodes a tenant's texts with a tokenizer of `get`, each segment once.

        None if this would not be exact.
        """
        segmenter = self._segmenters.get(digest)
        if segmenter is None or self._segments is None:
            return None
        fast = self._fast.get(digest)
        return KnownSegments(self._segments, segmenter, digest, tenant_id, isolation_key, fast)

    async def get_literal(self, digest: str, *, is_inner: bool = False) -> Tokenizer:
        """Return a copy of a tokenizer that treats the text of an added token as ordinary text.

        It `is_inner` if its texts follow others, so that they begin no prompt.
        """
        tokenizer = await self.get(digest)
        key = digest, is_inner
        async with self._lock:
            if key not in self._literal:
                # A copy, because the option belongs to the tokenizer and other calls use it
                # meanwhile.
                self._literal[key] = await asyncio.to_thread(
                    _literal_copy, tokenizer, is_inner=is_inner
                )
            return self._literal[key]

    async def file(self, digest: str) -> bytes:
        """Return a tokenizer.json, fetched again.

        Raises ServiceUnavailableError if it no longer exists.
        """
        compressed = await self._fetch(digest)
        if compressed is None:
            raise ServiceUnavailableError(
                "The model's tokenizer is not published yet.", retry_after_seconds=1.0
            )
        return await asyncio.to_thread(zlib.decompress, compressed)


def _build(file: bytes) -> tuple[Tokenizer, Segmenter | None]:
    tokenizer = Tokenizer.from_str(file.decode())
    # A file may enable truncation or padding; only the context rule applies here.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, Segmenter.of(tokenizer)


def _literal_copy(tokenizer: Tokenizer, *, is_inner: bool) -> Tokenizer:
    file = msgspec.json.decode(tokenizer.to_str(), type=dict[str, msgspec.Raw])
    # Files call some marks not special, such as those of infill. Runs of spaces are text.
    added = msgspec.json.decode(file["added_tokens"])
    spaces = [each for each in added if each["content"].isspace()]
    file["added_tokens"] = msgspec.Raw(msgspec.json.encode(spaces))
    if is_inner:
        # SentencePiece's space before the first word of a prompt.
        pre_tokenizer = bytes(file["pre_tokenizer"]).replace(
            b'"prepend_scheme":"first"', b'"prepend_scheme":"never"'
        )
        file["pre_tokenizer"] = msgspec.Raw(pre_tokenizer)
    return Tokenizer.from_str(msgspec.json.encode(file).decode())
