"""Reception of the engine core's outputs in a callback of the event loop.

vLLM's own task awaits each message from pyzmq's asyncio socket. Its futures and further turns of
the event loop cost more CPU than the decoding, above all with a single stream. These parts of vLLM
are private, so this module fits one version of it.
"""

import asyncio
from typing import Any


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
