"""Log-probabilities of echoed prompts: encoded once for all choices, and limited in size."""

import asyncio
from collections.abc import Sequence

from contract.messages import PromptScored, decode_logprobs
from gateway.dispatch.generation import Reply, Turn
from gateway.errors import InvalidParameterError
from gateway.stream.completion import Completion
from gateway.stream.logprobs import LogprobLists, echo_base

MAX_BYTES = 64 * 1024 * 1024
"""Limit of the log-probabilities of all echoed prompts of a response: each choice repeats them."""


class PromptLogprobs:
    """Prepares the log-probabilities of a request's prompts for its choices."""

    def __init__(self, completion: Completion) -> None:
        self._completion = completion
        self._bytes = 0
        self._prepared: dict[int, dict[str, bytes]] = {}

    async def prepare(self, replies: Sequence[Reply], turn: Turn) -> None:
        """Encode the log-probabilities of long prompts in a thread, for later calls of `encode`."""
        for reply in replies:
            message = reply.message
            if isinstance(message, PromptScored) and len(message.logprobs) > 1:
                async with turn():
                    self._prepared[reply.prompt_index] = await asyncio.to_thread(
                        self._encoded, reply.prompt_index, message
                    )

    def encode(self, prompt_index: int, scored: PromptScored) -> dict[str, bytes]:
        """Return the lists of the echoed tokens for `LogprobLists.before`, empty if there are none.

        Raises InvalidParameterError if they would make the response too large.
        """
        encoded = self._prepared.pop(prompt_index, None)
        if encoded is None:
            encoded = self._encoded(prompt_index, scored)
        self._bytes += self._completion.request.n * sum(map(len, encoded.values()))
        if self._bytes > MAX_BYTES:
            raise InvalidParameterError(
                f"'logprobs' of echoed prompts must take at most {MAX_BYTES} bytes in all choices. "
                f"Given: at least {self._bytes}.",
                param="logprobs",
            )
        return encoded

    def _encoded(self, prompt_index: int, scored: PromptScored) -> dict[str, bytes]:
        request = self._completion.request
        logprobs = [entry for part in scored.logprobs for entry in decode_logprobs(part)]
        echoed = request.echo_last
        start = 0 if echoed is None else max(len(logprobs) - echoed, 0)
        lists = LogprobLists()
        lists.extend(
            logprobs[start:],
            base=echo_base(logprobs, self._completion.prompt_texts[prompt_index], start=start),
            token_ids=(
                self._completion.prompt_token_ids[prompt_index][start:]
                if request.return_token_ids
                else None
            ),
        )
        return lists.encoded() if lists.tokens else {}
