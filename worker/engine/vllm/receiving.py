"""Reception of the engine core's outputs in a callback of the event loop, and their conversion.

vLLM's own task awaits each message from pyzmq's asyncio socket. Its futures and further turns of
the event loop cost more CPU than the decoding, above all with a single stream. These parts of vLLM
are private, so this module fits one version of it.
"""

import asyncio
import logging
from typing import Any

from worker.engine.base import EngineStats, EngineStep, SequenceEnd, SequenceOutput, TokenScores
from worker.engine.vllm.pooling import pooled_output

_log = logging.getLogger(__name__)
_ENDS = {
    "stop": SequenceEnd.STOP,
    "repetition": SequenceEnd.REPETITION,
    "length": SequenceEnd.LENGTH,
    "abort": SequenceEnd.ABORTED,
    "error": SequenceEnd.ERROR,
}


def receive_outputs(client: Any) -> None:
    """Receive for `client` in the running event loop, before vLLM's own task starts to.

    Leaves a client for several engines, which also handles messages about them, to vLLM.
    """
    from vllm.v1.engine.core_client import AsyncMPClient

    if type(client) is AsyncMPClient:
        receiver = _Receiver(client)
        # vLLM cancels this task when the engine has died or is closed.
        client.resources.output_queue_task = asyncio.create_task(receiver.run())


class _Receiver:
    """Puts outputs into the queue from which `get_output_async` takes them."""

    def __init__(self, client: Any) -> None:
        import zmq
        from vllm.v1.engine import core_client

        # Not the client itself, which vLLM closes when nothing refers to it.
        resources = client.resources
        self._queue = client.outputs_queue
        self._calls = client.utility_results
        self._decode = client.decoder.decode
        self._check_alive = resources.validate_alive
        self._end_call = core_client._process_utility_output
        self._dead_error = core_client.EngineDeadError
        self._socket: Any = zmq.Socket.shadow(resources.output_socket.underlying)
        self._no_wait, self._empty_error = zmq.NOBLOCK, zmq.Again

    async def run(self) -> None:
        """Receive until cancelled."""
        loop, descriptor = asyncio.get_running_loop(), self._socket.FD
        loop.add_reader(descriptor, self._receive)
        try:
            # The descriptor reports only messages that arrive after the socket was empty.
            self._receive()
            await asyncio.Event().wait()
        finally:
            loop.remove_reader(descriptor)
            self._queue.put_nowait(self._dead_error())

    def _receive(self) -> None:
        """Receive all messages that have arrived. `get_output_async` raises what fails here."""
        while True:
            try:
                frames = self._socket.recv_multipart(self._no_wait, copy=False)
            except self._empty_error:
                return
            except Exception as error:
                self._queue.put_nowait(error)
                return
            try:
                self._check_alive(frames)
                outputs = self._decode(frames)
                if outputs.utility_output:
                    self._end_call(outputs.utility_output, self._calls)
                elif outputs.outputs or outputs.scheduler_stats:
                    self._queue.put_nowait(outputs)
            except Exception as error:
                self._queue.put_nowait(error)


def step_of(outputs: Any) -> EngineStep:
    """Convert the output of one vLLM step (`EngineCoreOutputs`)."""
    return EngineStep([_output(each) for each in outputs.outputs], _stats(outputs.scheduler_stats))


def _stats(stats: Any) -> EngineStats | None:
    if stats is None:
        return None
    waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
    return EngineStats(stats.num_running_reqs, waiting, stats.kv_cache_usage)


def _output(output: Any) -> SequenceOutput:
    try:
        return _converted(output)
    except Exception:  # One sequence's output must not end all jobs.
        _log.exception("Cannot convert an output of the engine")
        return SequenceOutput(output.request_id, [], SequenceEnd.ERROR)


def _converted(output: Any) -> SequenceOutput:
    reason, prefill = output.finish_reason, output.prefill_stats
    prompt_scores = output.new_prompt_logprobs_tensors
    if reason is prefill is prompt_scores is output.new_logprobs is None:
        return SequenceOutput(output.request_id, output.new_token_ids)
    if output.pooling_output is not None:
        return pooled_output(output)
    stop = output.stop_reason
    return SequenceOutput(
        output.request_id,
        output.new_token_ids,
        None if reason is None else _ENDS[str(reason)],
        stop if isinstance(stop, int) else None,
        None if output.new_logprobs is None else _scores(output.new_logprobs),
        None if prompt_scores is None else _scores(prompt_scores),
        None if prefill is None else prefill.num_cached_tokens,
        None if prefill is None else prefill.num_prompt_tokens,
        None if prompt_scores is None else prompt_scores[2].tolist(),
    )


def _scores(logprobs: Any) -> list[TokenScores]:
    """Pair token ids with log-probabilities; column 0 is the actual token."""
    return [
        list(zip(ids, values, strict=True))
        for ids, values in zip(logprobs[0].tolist(), logprobs[1].tolist(), strict=True)
    ]
