"""Deliver plain deltas from the reply reader to the client's connection, in one pass.

This is the hot path of the gateway: it runs once for every token. It does everything that
`Replies`, `JobOutput`, `Generation`, `OwnedResponse` and `StreamedCompletion` would do one after
another (docs/decisions/0035-write-from-the-reply-reader.md).
"""

from contract.messages import Delta
from gateway.dispatch.generation import Generation
from gateway.dispatch.output import JobOutput
from gateway.http.connection import DirectConnection
from gateway.responses.journal import encode_message
from gateway.stream.sse import ChunkRenderer


class PlainDelivery:
    """Takes the deltas of one stream while its task waits for replies."""

    __slots__ = ("_connection", "_generation", "_renderer")

    def __init__(
        self, generation: Generation, renderer: ChunkRenderer, connection: DirectConnection
    ) -> None:
        self._connection = connection
        self._generation = generation
        self._renderer = renderer

    def take(self, prompt_index: int, output: JobOutput, delta: Delta, now: float) -> bool:
        """Apply, record, render and write a delta, as `gateway.dispatch.generation.Take`."""
        connection, generation = self._connection, self._generation
        if (
            delta.finish_reason is not None
            or connection.is_paused
            or not 0 <= delta.choice < len(output.choices)
        ):
            return False
        choice = output.choices[delta.choice]
        received = choice.token_ids
        last_at = choice.last_tokens_at
        if not (delta.token_ids and last_at) or delta.start != len(received):
            return False
        try:
            received.fromlist(delta.token_ids)
        except OverflowError:
            return False
        event = self._renderer.render_plain(prompt_index, delta)
        if event is None:
            del received[delta.start :]
            return False
        tokens = len(delta.token_ids)
        choice.last_tokens_at = now
        output.latency.observe((now - last_at) / tokens)
        generation.received_tokens[prompt_index] += tokens
        if generation.journal is not None:
            generation.journal.append(encode_message(prompt_index, delta))
        if event:
            connection.write(event)
        return True
