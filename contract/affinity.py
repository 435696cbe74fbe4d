"""Affinity of jobs to workers: digests of what a job can reuse, and of what a worker holds.

A job carries digests of prefixes of its prompt, a worker publishes those of the prefixes in its
engine's cache. Both compute them at the same boundaries, so a claim compares digests only.

The boundaries are 64, 96, 128, 192, 256 tokens and so on, two for each doubling, as far as they are
multiples of the cache's blocks. A job carries the longest 12, which span the last 97 % of any
prompt.

A job can also name its session. The worker that served the session last is taken to hold the whole
prompt, also before it has published digests.

A job that has started names the exactness class of the engine that generated its last token. All
workers of the class hold its digest.
"""

import hashlib
import struct
from bisect import bisect_left
from functools import cache
from typing import Final

from contract.prompts import Digests, TokenIds, digests_at, prefix_hash

DIGEST_BYTES: Final = 8
MOST_PREFIXES: Final = 12
"""Maximum prefix digests of a job."""

MOST_HELD: Final = 16_384
"""Maximum digests that a worker publishes; the oldest ones are dropped."""

_FIRST_BOUNDARY: Final = 64
_DOUBLINGS: Final = 20
_ADDS: Final = 2**31
_SESSION: Final = 2**30
_CLASS: Final = 2**29
_RECORD: Final = struct.Struct(f">{DIGEST_BYTES}sI")
"""A digest, and the tokens that it saves. `_ADDS` marks what is independent of the prefixes,
`_SESSION` a session, and `_CLASS` an exactness class."""


@cache
def boundaries(block_tokens: int) -> tuple[int, ...]:
    """Return the boundaries of prefixes, in tokens, for a cache with blocks of this size."""
    doubled = (_FIRST_BOUNDARY * 2**n for n in range(_DOUBLINGS))
    steps = (step for each in doubled for step in (each, each + each // 2))
    return tuple(step for step in steps if step % block_tokens == 0)


def prefix_ends(tokens: int, block_tokens: int) -> tuple[int, ...]:
    """Return the boundaries at which a prompt of so many tokens has digests; () if it is short.

    `block_tokens` is the size of the cache's blocks; 0 if the model's workers publish no digests.
    """
    # An engine processes at least the last token.
    if not block_tokens or tokens <= _FIRST_BOUNDARY:
        return ()
    steps = boundaries(block_tokens)
    end = bisect_left(steps, tokens)
    return steps[max(end - MOST_PREFIXES, 0) : end]


def prefix_affinity(
    cache_salt: str, token_ids: TokenIds, block_tokens: int, digests: Digests | None = None
) -> bytes:
    """Return the digests of a prompt's prefixes, the longest first; empty for a short prompt.

    `digests` may have those at `prefix_ends` already.
    """
    ends = prefix_ends(len(token_ids), block_tokens)
    if not ends:
        return b""
    found = digests_at(cache_salt, token_ids, ends) if digests is None else digests
    return b"".join([_RECORD.pack(found[end], end) for end in reversed(ends)])


def prefixes_of(affinity: bytes) -> list[tuple[int, bytes]]:
    """Return the lengths in tokens and digests of a job's prefixes, the longest first."""
    records = _RECORD.iter_unpack(affinity)
    return [(tokens, digest) for digest, tokens in records if tokens < _CLASS]


def resource_digest(name: str) -> bytes:
    """Return the digest of something else than a prefix that a worker can hold, by its name."""
    return hashlib.blake2b(name.encode(), digest_size=DIGEST_BYTES).digest()


def resource_affinity(name: str, tokens: int) -> bytes:
    """Return the affinity of a job to workers that hold a resource, such as a loaded adapter.

    Append it to `GenerationJob.affinity`. It counts as `tokens` matching tokens, in addition to
    those of the longest prefix, but does not change what the job is charged.
    """
    return _RECORD.pack(resource_digest(name), _ADDS | tokens)


INEXACT: Final = "-inexact"
"""End of the name of an exactness class, while an engine does not return the results of the class.
"""


def class_digest(exactness_class: str) -> bytes:
    """Return the digest that all workers of an exactness class hold."""
    return resource_digest(f"class {exactness_class}")


def class_affinity(exactness_class: str) -> bytes:
    """Return the affinity of a job that has started to the workers of a class; empty if unknown.

    It must be the first part of `GenerationJob.affinity`. Engines that return the results of the
    class continue what an engine has begun that did not.
    """
    name = exactness_class.removesuffix(INEXACT)
    return _RECORD.pack(class_digest(name), _CLASS) if name else b""


def session_affinity(cache_salt: str, session: str, token_ids: TokenIds) -> bytes:
    """Return the affinity of a prompt to the worker that served its session last.

    It must be the last part of `GenerationJob.affinity`. It is empty without a session or for a
    short prompt. Only prompts with the same first tokens count as one session: others of an agent,
    such as for titles, share no cached blocks.
    """
    if not session or len(token_ids) <= _FIRST_BOUNDARY:
        return b""
    digest = prefix_hash(cache_salt)
    digest.update(token_ids[:_FIRST_BOUNDARY].tobytes())
    digest.update(session.encode(errors="surrogatepass"))
    return _RECORD.pack(digest.digest(), _SESSION)
