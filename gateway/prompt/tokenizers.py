"""Tokenizers, fetched from Redis where the workers publish them, and the encoding of prompts."""

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tokenizers import Tokenizer

from gateway.dialects.request import Prompt
from gateway.errors import InvalidParameterError, ServiceUnavailableError

THREAD_CHARACTERS = 8_192
"""Longer texts are encoded in a thread, since the event loop would stand still for milliseconds."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the engine takes it."""

    token_ids: list[int]
    text: str | None
    """The text the client sent; None if it sent token ids."""


class PromptEncoder:
    """Turns prompts into token ids exactly as the model's own tokenizer does."""

    def __init__(
        self, tokenizer: Tokenizer, *, vocabulary_size: int, bos_token_id: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._bos_token_id = bos_token_id

    async def encode(self, prompt: Prompt, *, param: str) -> EncodedPrompt:
        """Return the token ids of one prompt. Raise InvalidParameterError naming `param`."""
        if isinstance(prompt, str):
            return EncodedPrompt(await self._encode_text(prompt, param=param), prompt)
        if all(isinstance(piece, int) for piece in prompt):
            ids = [piece for piece in prompt if isinstance(piece, int)]
            self._check_ids(ids, param=param)
            return EncodedPrompt(ids, None)
        return EncodedPrompt(await self._encode_mixed(prompt, param=param), None)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids, special tokens shown."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    async def _encode_text(self, text: str, *, param: str) -> list[int]:
        ids = await self._token_ids(text, special=True)
        if ids:
            return ids
        if self._bos_token_id is None:
            raise InvalidParameterError(
                f"'{param}' must not be empty: this model has no begin-of-text token to start from.",
                param="prompt",
            )
        return [self._bos_token_id]

    async def _encode_mixed(self, pieces: list[str | int], *, param: str) -> list[int]:
        # The begin-of-text token belongs before the first piece, and only if that piece is text.
        ids: list[int] = []
        for position, piece in enumerate(pieces):
            if isinstance(piece, str):
                ids += await self._token_ids(piece, special=position == 0)
            else:
                ids.append(piece)
        self._check_ids(ids, param=param)
        return ids

    async def _token_ids(self, text: str, *, special: bool) -> list[int]:
        if len(text) <= THREAD_CHARACTERS:
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)
        encoding = await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=special)
        return list(encoding.ids)

    def _check_ids(self, ids: list[int], *, param: str) -> None:
        if not ids:
            raise InvalidParameterError(f"'{param}' must not be empty.", param="prompt")
        if min(ids) < 0 or max(ids) >= self._vocabulary_size:
            position, wrong = next(
                (i, t) for i, t in enumerate(ids) if not 0 <= t < self._vocabulary_size
            )
            raise InvalidParameterError(
                f"'{param}[{position}]' must be a token id from 0 to {self._vocabulary_size - 1}. "
                f"Given: {wrong}.",
                param="prompt",
            )


class TokenizerStore:
    """The tokenizers of all served models, each fetched once by its digest."""

    def __init__(self, fetch: Callable[[str], Awaitable[bytes | None]]) -> None:
        self._fetch = fetch
        self._tokenizers: dict[str, Tokenizer] = {}
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

    async def _load(self, digest: str) -> Tokenizer:
        compressed = await self._fetch(digest)
        if compressed is None:
            raise ServiceUnavailableError(
                "The model's tokenizer is not published yet.", retry_after_seconds=1.0
            )
        return await asyncio.to_thread(_build, compressed)


def _build(compressed: bytes) -> Tokenizer:
    tokenizer = Tokenizer.from_str(zlib.decompress(compressed).decode())
    # A file may ask for truncation or padding; here the context rule alone decides.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
