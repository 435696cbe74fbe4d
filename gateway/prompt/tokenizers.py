"""Tokenizers, fetched from Redis where the workers publish them, and the encoding of prompts."""

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from tokenizers import Tokenizer

from gateway.dialects.request import Prompt
from gateway.errors import InvalidParameterError, ServiceUnavailableError

THREAD_CHARACTERS: Final = 8_192
"""Longer texts are encoded in a thread, since the event loop would stand still for milliseconds."""


T = TypeVar("T")


class PromptEncoder:
    """Turns prompts into token ids exactly as the model's own tokenizer does.

    Nothing here waits, and long texts take long: see THREAD_CHARACTERS.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocabulary_size: int, bos_token_id: int | None
    ) -> None:
        self.tokenizer = tokenizer
        self.vocabulary_size = vocabulary_size
        self._bos_token_id = bos_token_id

    def encode(self, prompt: Prompt, *, param: str, adds_special_tokens: bool = True) -> list[int]:
        """Return the token ids of one prompt, at least one. Raise InvalidParameterError naming `param`."""
        if isinstance(prompt, str):
            ids = self.text_ids(prompt, adds_special_tokens=adds_special_tokens)
            return ids or self._empty(param, adds_special_tokens=adds_special_tokens)
        ids = self.piece_ids(prompt, param=param, adds_special_tokens=adds_special_tokens)
        if not ids:
            raise InvalidParameterError(f"'{param}' must not be empty.", param="prompt")
        return ids

    def text_ids(self, text: str, *, adds_special_tokens: bool) -> list[int]:
        """Return the token ids of a text, none if it is empty and nothing is added."""
        # Only the batch functions of the library let other threads run meanwhile; this one does not work
        # out either where each token stands in the text, which makes it twice as fast as `encode`.
        [encoding] = self.tokenizer.encode_batch_fast(
            [text], add_special_tokens=adds_special_tokens
        )
        return list(encoding.ids)

    def piece_ids(
        self, pieces: list[str | int], *, param: str, adds_special_tokens: bool
    ) -> list[int]:
        """Return token ids with texts in between. Raise InvalidParameterError naming a wrong id."""
        ids: list[int] = []
        for position, piece in enumerate(pieces):
            if isinstance(piece, str):
                # The begin-of-text token belongs before the first piece, and only if that piece is text.
                special = adds_special_tokens and position == 0
                ids += self.text_ids(piece, adds_special_tokens=special)
            else:
                ids.append(piece)
        self.check_ids(ids, param=param)
        return ids

    def begin_ids(self) -> list[int]:
        """Return the begin-of-text token if the tokenizer puts it before a text, else nothing."""
        bos = self._bos_token_id
        added = self.text_ids("", adds_special_tokens=True)
        return [bos] if bos is not None and bos in added else []

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids, special tokens shown."""
        [text] = self.tokenizer.decode_batch([token_ids], skip_special_tokens=False)
        return str(text)

    def check_ids(self, ids: list[int], *, param: str) -> None:
        """Raise InvalidParameterError naming the first id that is not in the vocabulary."""
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
                f"'{param}' must not be empty where 'add_special_tokens' is false.", param="prompt"
            )
        if self._bos_token_id is None:
            raise InvalidParameterError(
                f"'{param}' must not be empty: this model has no begin-of-text token to start from.",
                param="prompt",
            )
        return [self._bos_token_id]


async def run_beside_loop(work: Callable[[], T], *, size: int) -> T:
    """Return what `work` returns: at once if `size` (characters and token ids) is small, else in a thread."""
    return work() if size <= THREAD_CHARACTERS else await asyncio.to_thread(work)


class TokenizerStore:
    """The tokenizers of all served models, each fetched once by its digest."""

    def __init__(self, fetch: Callable[[str], Awaitable[bytes | None]]) -> None:
        self._fetch = fetch
        self._tokenizers: dict[str, Tokenizer] = {}
        self._literal: dict[str, Tokenizer] = {}
        self._lock = asyncio.Lock()

    async def get(self, digest: str) -> Tokenizer:
        """Return a tokenizer by the SHA-256 of its file. Raise ServiceUnavailableError if it is gone."""
        tokenizer = self._tokenizers.get(digest)
        if tokenizer is not None:
            return tokenizer
        async with self._lock:
            if digest not in self._tokenizers:
                self._tokenizers[digest] = await self._load(digest)
            return self._tokenizers[digest]

    async def get_literal(self, digest: str) -> Tokenizer:
        """Return a copy of a tokenizer to which the text of a special token is a text like any other."""
        tokenizer = await self.get(digest)
        async with self._lock:
            if digest not in self._literal:
                # A copy, since the switch is the tokenizer's own and others are encoding meanwhile.
                self._literal[digest] = await asyncio.to_thread(_literal_copy, tokenizer)
            return self._literal[digest]

    async def file(self, digest: str) -> bytes:
        """Return a tokenizer.json, fetched anew. Raise ServiceUnavailableError if it is gone."""
        compressed = await self._fetch(digest)
        if compressed is None:
            raise ServiceUnavailableError(
                "The model's tokenizer is not published yet.", retry_after_seconds=1.0
            )
        return await asyncio.to_thread(zlib.decompress, compressed)

    async def _load(self, digest: str) -> Tokenizer:
        return await asyncio.to_thread(_build, await self.file(digest))


def _build(file: bytes) -> Tokenizer:
    tokenizer = Tokenizer.from_str(file.decode())
    # A file may ask for truncation or padding; here the context rule alone decides.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _literal_copy(tokenizer: Tokenizer) -> Tokenizer:
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.encode_special_tokens = True
    return copy
