"""Which prefixes are in vLLM's cache, from the events that it publishes about its blocks.

The engine core's process publishes them on a ZeroMQ socket, with a number for each message. The
worker reads them when it needs them. A block's event has its tokens and its parent, so the digest
of a prefix that ends with it continues the parent's hash.
"""

import asyncio
import itertools
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from contract.affinity import DIGEST_BYTES, boundaries
from contract.prompts import packed, prefix_hash
from worker.engine.base import Held

_MESSAGES_AT_ONCE: Final = 50
"""Messages that are applied in one step of about a millisecond."""


@dataclass(eq=False, slots=True)
class _Block:
    """A cached block."""

    running: Any
    """The hash of the prefix that ends with the block."""
    tokens: int
    """Tokens of that prefix."""
    digest: bytes | None
    """Its digest, if it ends at a boundary."""
    copies: int = 1
    """Sequences that start at once may each store the same block."""


class CachedPrefixes:
    """The blocks of one engine."""

    def __init__(self, block_tokens: int) -> None:
        """`block_tokens` is the size of a block."""
        self._block_tokens = block_tokens
        self._boundaries = frozenset(boundaries(block_tokens))
        self._blocks: dict[Any, _Block] = {}

    def clear(self, held: Held) -> None:
        """Drop all blocks."""
        for block in self._blocks.values():
            if block.digest is not None:
                held.remove(block.digest)
        self._blocks.clear()

    def apply(self, event: Any, held: Held) -> None:
        """Apply one of vLLM's events: `BlockStored`, `BlockRemoved` or `AllBlocksCleared`."""
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            self.clear(held)
        elif event.group_idx or event.medium not in (None, "GPU"):
            return  # Blocks of other layers or in other memory do not make up a prefix.
        elif kind == "BlockRemoved":
            for block_hash in event.block_hashes:
                self._remove(block_hash, held)
        elif event.kv_cache_spec_sliding_window is None:
            self._store(event, held)

    def _store(self, event: Any, held: Held) -> None:
        size, hashes = self._block_tokens, event.block_hashes
        extra_keys = event.extra_keys or [None] * len(hashes)
        # A part of a block, or some blocks are left out.
        if len(event.token_ids) != size * len(hashes) or event.block_size != size:
            return
        if event.parent_block_hash is None:
            parent: _Block | None = _root(extra_keys[0], event.lora_name)
        else:
            parent = self._blocks.get(event.parent_block_hash)
        content = packed(event.token_ids).tobytes()
        width = len(content) // len(hashes)
        for number, (block_hash, keys) in enumerate(zip(hashes, extra_keys, strict=True)):
            # A block with text only has no other keys.
            is_plain = not keys or tuple(keys) == (event.lora_name,)
            if parent is None or (parent.tokens and not is_plain):
                return
            block = self._blocks.get(block_hash)
            if block is None:
                running = parent.running.copy()
                running.update(content[number * width : (number + 1) * width])
                tokens = parent.tokens + size
                is_end = tokens in self._boundaries
                digest = running.digest()[:DIGEST_BYTES] if is_end else None
                block = self._blocks[block_hash] = _Block(running, tokens, digest)
                if digest is not None:
                    held.add(digest)
            else:
                block.copies += 1
            parent = block

    def _remove(self, block_hash: Any, held: Held) -> None:
        block = self._blocks.get(block_hash)
        if block is None:
            return
        block.copies -= 1
        if not block.copies:
            del self._blocks[block_hash]
            if block.digest is not None:
                held.remove(block.digest)


def _root(keys: Any, lora_name: str | None) -> _Block | None:
    """Return the empty prefix; None if the first block has more than text."""
    rest = [each for each in keys or () if each != lora_name]
    if not rest:
        return _Block(prefix_hash(""), 0, None)
    if len(rest) > 1 or not isinstance(rest[0], str):
        return None
    return _Block(prefix_hash(rest[0]), 0, None)


class _Nothing:
    """Holds no digest."""

    def add(self, digest: bytes) -> None:
        """Ignore a digest."""

    def remove(self, digest: bytes) -> None:
        """Ignore a digest."""


class CacheEvents:
    """The subscription to the events of one engine."""

    def __init__(self, endpoint: str, message: Any) -> None:
        """Subscribe before the engine starts.

        Args:
            endpoint: The address of its socket.
            message: vLLM's type of messages, `KVEventBatch`.
        """
        import zmq

        self._decode = msgspec.msgpack.Decoder(message).decode
        self._socket: Any = zmq.Context.instance().socket(zmq.SUB)
        self._socket.set_hwm(0)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)
        self._no_wait, self._empty_error = zmq.NOBLOCK, zmq.Again
        self._number = -1

    def begin(self, block_tokens: int) -> None:
        """Set the size of a block, which is known when the engine has started."""
        self._prefixes = CachedPrefixes(block_tokens)

    async def read(self, held: Held) -> None:
        """Apply the messages that have arrived. Other tasks run after some of them."""
        for count in itertools.count(1):
            try:
                _, number, content = self._socket.recv_multipart(self._no_wait)
            except self._empty_error:
                return
            expected, self._number = self._number + 1, int.from_bytes(number, "big")
            if self._number != expected:
                # Removed blocks may be among what was lost.
                self._prefixes.clear(held)
            for event in self._decode(content).events:
                self._prefixes.apply(event, held)
            if not count % _MESSAGES_AT_ONCE:
                await asyncio.sleep(0)

    async def clear(self) -> None:
        """Drop all blocks, and the messages that have arrived.

        vLLM reports with its next step that it has cleared its cache.
        """
        nothing = _Nothing()
        await self.read(nothing)
        self._prefixes.clear(nothing)

    def close(self) -> None:
        """Unsubscribe."""
        self._socket.close(linger=0)
