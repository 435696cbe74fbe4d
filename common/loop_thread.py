"""A thread with an event loop of its own."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any


class LoopThread:
    """A daemon thread whose event loop the work of other threads does not block."""

    def __init__(
        self,
        run: Callable[[], Coroutine[Any, Any, None]],
        *,
        name: str,
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Do not start yet. If `run` fails, `on_failure` is called in the thread."""
        self.is_closing = False
        self._run = run
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the thread. Call it once."""
        self._thread.start()

    async def aclose(self) -> None:
        """Cancel `run` and wait for the end of the thread, if it was started."""
        self.is_closing = True
        if self._loop is not None and self._work is not None:
            with suppress(RuntimeError):  # It may have ended.
                self._loop.call_soon_threadsafe(self._work.cancel)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    def _main(self) -> None:
        try:
            asyncio.run(self._begin())
        except asyncio.CancelledError:
            pass
        except Exception as error:
            self._on_failure(error)

    async def _begin(self) -> None:
        self._loop, self._work = asyncio.get_running_loop(), asyncio.current_task()
        if not self.is_closing:
            await self._run()
