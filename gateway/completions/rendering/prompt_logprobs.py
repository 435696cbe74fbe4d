"""Log-probabilities of prompts: encoded once for all choices, and limited in size.

The echoed ones (`echo` with `logprobs`) are in the `logprobs` of choices. `prompt_logprobs` are a
member of their own: a list with null for the first token and an object for each other token.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from contract.messages import PromptScored, TokenLogprob, decode_logprobs
from gateway.completions.queue.generation import Reply, Turn
from gateway.completions.rendering.completion import Completion
from gateway.completions.rendering.logprobs import LOGPROB_FLOOR, LogprobLists, placed
from gateway.dialects.request import GenerationRequest
from gateway.records.errors import invalid

MAX_BYTES = 64 * 1024 * 1024
"""Limit of the log-probabilities of all prompts of a response: each choice repeats them."""

_json = msgspec.json.Encoder().encode


class EncodedPrompt(msgspec.Struct, frozen=True):
    """The JSON of a prompt's log-probabilities."""

    echoed: dict[str, bytes] = {}
    """The lists of the echoed tokens for `LogprobLists.before`; empty if there are none."""
    scores: bytes = b""
    """The value of `prompt_logprobs`; empty if it was not requested."""

    @property
    def size(self) -> int:
        """The size of all parts in bytes."""
        return len(self.scores) + sum(map(len, self.echoed.values()))


class PromptLogprobs:
    """Prepares the log-probabilities of a request's prompts for its choices."""

    def __init__(self, completion: Completion) -> None:
        self._completion = completion
        self._bytes = 0
        self._prepared: dict[int, EncodedPrompt] = {}

    async def prepare(self, replies: Sequence[Reply], turn: Turn) -> None:
        """Encode the log-probabilities of long prompts in a thread, for later calls of `encode`."""
        for reply in replies:
            message = reply.message
            if isinstance(message, PromptScored) and len(message.logprobs) > 1:
                async with turn():
                    self._prepared[reply.prompt_index] = await asyncio.to_thread(
                        self._encoded, reply.prompt_index, message
                    )

    def encode(self, prompt_index: int, scored: PromptScored) -> EncodedPrompt:
        """Return the log-probabilities of a prompt.

        Raises InvalidParameterError if they would make the response too large.
        """
        encoded = self._prepared.pop(prompt_index, None)
        if encoded is None:
            encoded = self._encoded(prompt_index, scored)
        self._bytes += self._completion.request.n * encoded.size
        if self._bytes > MAX_BYTES:
            is_echoed = self._completion.request.prompt_logprobs is None
            param = "logprobs" if is_echoed else "prompt_logprobs"
            raise invalid(
                param,
                f"of prompts must take at most {MAX_BYTES} bytes in all choices. Given: at least "
                f"{self._bytes}.",
            )
        return encoded

    def _encoded(self, prompt_index: int, scored: PromptScored) -> EncodedPrompt:
        request = self._completion.request
        token_ids = self._completion.prompt_token_ids[prompt_index]
        logprobs = [entry for part in scored.logprobs for entry in decode_logprobs(part)]
        scores, echoed = b"", {}
        if request.prompt_logprobs is not None:
            scores = _json(_scores(logprobs, token_ids, most=request.prompt_logprobs))
        if request.echoes_logprobs:
            text = self._completion.prompt_texts[prompt_index]
            echoed = _echoed(request, logprobs, token_ids, text)
        return EncodedPrompt(echoed, scores)


def _echoed(
    request: GenerationRequest,
    logprobs: list[TokenLogprob],
    token_ids: Sequence[int],
    text: str,
) -> dict[str, bytes]:
    start = 0 if request.echo_last is None else max(len(logprobs) - request.echo_last, 0)
    shown, shown_ids = placed(logprobs[start:], text), token_ids[start:]
    most = request.logprobs or 0
    if (request.prompt_logprobs or 0) > most:
        shown = [_limited(*each, most=most) for each in zip(shown, shown_ids, strict=True)]
    lists = LogprobLists()
    lists.extend(shown, shown_ids, request, base=0)
    return {} if lists.is_empty else lists.encoded()


def _scores(
    logprobs: list[TokenLogprob], token_ids: Sequence[int], *, most: int
) -> list[dict[int, dict[str, Any]] | None]:
    """Return vLLM's `prompt_logprobs`, with at most `most` likeliest tokens at each place."""
    return [
        None
        if entry.logprob is None
        else {
            token: {
                "logprob": max(logprob, LOGPROB_FLOOR),
                "rank": rank,
                "decoded_token": text,
            }
            for token, rank, text, logprob in _ranked(entry, token_id)
            if token == token_id or rank <= most
        }
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]


def _ranked(entry: TokenLogprob, token_id: int) -> Iterator[tuple[int, int, str, float]]:
    """Return the id, rank, text and log-probability of a token, and of its alternatives."""
    yield token_id, entry.rank, entry.token, entry.logprob or 0.0
    rank = 0
    for other, (text, logprob) in zip(entry.top_ids, entry.top or [], strict=False):
        if other != token_id:
            rank += 1
            rank += rank == entry.rank
            yield other, rank, text, logprob


def _limited(entry: TokenLogprob, token_id: int, *, most: int) -> TokenLogprob:
    """Return a token with at most `most` likeliest tokens."""
    if entry.top is None:
        return entry
    kept = {token for token, rank, _, _ in _ranked(entry, token_id) if rank <= most} | {token_id}
    top = [
        (token, each)
        for token, each in zip(entry.top_ids, entry.top, strict=False)
        if token in kept
    ]
    return msgspec.structs.replace(
        entry, top=[each for _, each in top], top_ids=[token for token, _ in top]
    )
