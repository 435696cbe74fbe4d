"""Cache diagnostics: what a prompt changes of an earlier one, which its client names.

Redis keeps digests of the parts and tokens of a prompt for some minutes. They have a key and differ
between tenants. An id of another tenant or project is not found.
"""

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import dropwhile
from typing import Any, Final

import msgspec
from redis.exceptions import RedisError

from common.not_none import not_none
from contract import keys
from contract.affinity import prefixes_of
from contract.messages import GenerationJob
from contract.prompts import digests_at
from contract.scripts import CommandExecutor
from gateway.completions.admission.call import Call
from gateway.completions.admission.check import CheckedRequest
from gateway.dialects.request import CACHE_CHANGES, CacheDiagnosis, CacheMiss, CachePlace
from gateway.limits.stored_bytes import Holder, Storage, Use, allocated
from gateway.records.errors import RateLimitError, StoreUnavailableError

KEPT_MS: Final = 600_000
"""How long the digests of a prompt are kept."""
_DIGEST_BYTES: Final = 16
_KEY_BYTES: Final = 256
"""Memory of a key in Redis."""


class _Prompt(msgspec.Struct, frozen=True, array_like=True):
    """Digests of a prompt."""

    parts: list[bytes]
    """Of each part in CACHE_CHANGES."""
    count: int
    """Messages after the system prompt."""
    tokens: int
    prefix: bytes
    """Of all tokens; empty if they stand for images, too."""


@dataclass(eq=False)
class CacheDiagnostics:
    """Compares prompts with earlier ones of the same tenant and project."""

    _executor: CommandExecutor
    _storage: Storage

    async def diagnose(
        self, call: Call, checked: CheckedRequest, job: GenerationJob, *, salt: str, shown_id: str
    ) -> CheckedRequest:
        """Return a request with its diagnosis, which it asks for, and keep its digests.

        `salt` is the tenant's, and `shown_id` the id of the response. What cannot be compared or
        kept is no error: Redis does not respond, another release has written the digests, or the
        tenant stores too much.
        """
        request, execute = checked.request, self._executor.execute_command
        diagnosis = CacheDiagnosis(CacheMiss.UNAVAILABLE)
        if not call.is_kept:
            shown = diagnosis if request.compared_id else None
            request = msgspec.structs.replace(request, cache_diagnosis=shown)
            return msgspec.structs.replace(checked, request=request)
        with suppress(RedisError, StoreUnavailableError, RateLimitError, msgspec.MsgspecError):
            stored = await execute("GET", _key(call, not_none(request.compared_id)))
            compare = partial(_compare, checked, job, salt, stored)
            prompt, diagnosis = await call.beside(compare, size=len(job.prompt_token_ids))
            if diagnosis.miss is CacheMiss.NONE:
                diagnosis = await self._find(checked, job, diagnosis.tokens)
            content = msgspec.msgpack.encode(prompt)
            size = allocated([len(content)]) + _KEY_BYTES
            holder = Holder(job.tenant, call.principal.limits, f"diagnostics:{shown_id}")
            await self._storage.take(holder, size, live_ms=KEPT_MS, use=Use.OPTIONAL)
            await execute("SET", _key(call, shown_id), content, "PX", KEPT_MS)
        request = msgspec.structs.replace(
            request, cache_diagnosis=diagnosis if request.compared_id else None
        )
        return msgspec.structs.replace(checked, request=request)

    async def _find(
        self, checked: CheckedRequest, job: GenerationJob, common: int
    ) -> CacheDiagnosis:
        """Return how much of the first `common` tokens a worker holds."""
        model, block_tokens = checked.card.model, checked.card.cache_block_tokens
        if not block_tokens:
            return CacheDiagnosis(CacheMiss.NONE)
        prefixes = [(end, d) for end, d in prefixes_of(job.affinity) if end <= common]
        if not prefixes:
            return CacheDiagnosis(CacheMiss.NONE, common, CachePlace.NOT_CACHED)
        execute, digests = self._executor.execute_command, [digest for _, digest in prefixes]
        holders = await execute("HMGET", keys.holders(model), *digests)
        for (end, digest), holder in zip(prefixes, holders, strict=True):
            # The worker may have lost it since.
            if holder and await execute("SISMEMBER", keys.held(model, holder.decode()), digest):
                return CacheDiagnosis(CacheMiss.NONE, end, CachePlace.WORKER)
        return CacheDiagnosis(CacheMiss.NONE, prefixes[0][0], CachePlace.EVICTED)


def _key(call: Call, response_id: str) -> str:
    principal = call.principal
    name = f"{principal.project_id or ''} {response_id}"
    return keys.prompt_digests(principal.tenant_id, hashlib.sha256(name.encode()).hexdigest())


def _compare(
    checked: CheckedRequest, job: GenerationJob, salt: str, stored: bytes | None
) -> tuple[_Prompt, CacheDiagnosis]:
    chat, ids = not_none(checked.request.chat), job.prompt_token_ids
    before = None if stored is None else msgspec.msgpack.decode(stored, type=_Prompt)
    turns = list(dropwhile(lambda each: each["role"] in ("system", "developer"), chat.messages))
    system = chat.messages[: len(chat.messages) - len(turns)]
    model = checked.card.model, checked.adapter and checked.adapter.sha256
    parts = [_digest(salt, part) for part in (model, system, chat.tools, turns)]
    common = 0 if before is None else min(before.tokens, len(ids))
    prefixes = digests_at(job.cache_salt, ids, {common, len(ids)})
    prefix = b"" if job.images else prefixes[len(ids)]
    prompt = _Prompt(parts, len(turns), len(ids), prefix)
    if before is None:
        return prompt, CacheDiagnosis(CacheMiss.NOT_FOUND)
    repeated = [*parts[:-1], _digest(salt, turns[: before.count])]
    pairs = zip(CACHE_CHANGES, before.parts, repeated, strict=True)
    changed = [miss for miss, old, new in pairs if old != new]
    is_begun = common == before.tokens and before.prefix == prefixes[common]
    if is_begun and CacheMiss.MODEL not in changed:
        return prompt, CacheDiagnosis(CacheMiss.NONE, common)
    if not changed:
        # The template shows another parameter, or changes earlier messages, or there are images.
        return prompt, CacheDiagnosis(CacheMiss.UNAVAILABLE)
    return prompt, CacheDiagnosis(changed[0], common)


def _digest(salt: str, part: Any) -> bytes:
    content = msgspec.json.encode(part, order="deterministic")
    return hashlib.blake2b(content, key=salt.encode(), digest_size=_DIGEST_BYTES).digest()
