"""Redis keys: one constant or function for each key.

Keys that one script uses share a hash tag, so that every script works on Redis Cluster:

- `{m:MODEL}`: the keys of one model, some of them for each lane of its queue
- `{g:GATEWAY}`: the keys of one gateway
- `{r:REQUEST}`: the keys of one stored response, which clients may resume or retrieve
- `{b:NN}`: the quota keys of all tenants in one bucket
"""

import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from contract.tier import Lane

MODELS = "models"
"""Hash: model -> its latest WorkerCard. An announced model keeps its entry until it is removed."""

REMOVED_MODELS = "models:removed"
"""Set: removed models.

Gateways drop these models from their catalogues. Other models without an entry stay in the
catalogues, because Redis may have restarted empty.
"""

BUCKETS = 64
"""Buckets into which tenants are hashed; all quota keys of one tenant are in its bucket."""

KEY_EVENTS = "auth:events"
"""Stream: one entry for each key or tenant that gateways must drop from their caches.

The field `key` or `tenant` holds the id.
"""


@dataclass(frozen=True, slots=True)
class _Key:
    """A key of each model, gateway or response, which its hash tag names."""

    kind: Literal["m", "g", "r"]
    name: str

    def __call__(self, id_: str) -> str:
        return f"{{{self.kind}:{id_}}}:{self.name}"


@dataclass(frozen=True, slots=True)
class _LaneKey:
    """A key of each lane of a model's queue."""

    name: str

    def __call__(self, model: str, lane: Lane = Lane.REQUESTS) -> str:
        return f"{{m:{model}}}:{lane.value}{self.name}"


@dataclass(frozen=True, slots=True)
class _ModelKeys:
    """Keys of each model that end with an id, which scripts append to their prefix."""

    name: str

    def prefix(self, model: str) -> str:
        """Return the keys' common beginning."""
        return f"{{m:{model}}}:{self.name}:"

    def __call__(self, model: str, id_: str) -> str:
        return self.prefix(model) + id_


@dataclass(frozen=True, slots=True)
class _TenantKeys:
    """Keys of each tenant in each lane, which scripts append to their prefix."""

    name: str

    def prefix(self, model: str, lane: Lane = Lane.REQUESTS) -> str:
        """Return the keys' common beginning."""
        return f"{{m:{model}}}:{lane.value}{self.name}:"

    def __call__(self, model: str, tenant: str, lane: Lane = Lane.REQUESTS) -> str:
        return self.prefix(model, lane) + tenant


@dataclass(frozen=True, slots=True)
class _GlobalKeys:
    """Keys of no model and no tenant, by an id such as a digest."""

    name: str

    def __call__(self, id_: str) -> str:
        return f"{self.name}:{id_}"


class _BucketKeys:
    """A key of each bucket, or keys that end with the id of a subject or request."""

    def __init__(self, name: str) -> None:
        # Made once: every request uses these keys of its bucket.
        self._prefixes = [f"{bucket_prefix(bucket)}{name}" for bucket in range(BUCKETS)]

    def prefix(self, bucket: int) -> str:
        """Return the keys' common beginning."""
        return self._prefixes[bucket]

    def __call__(self, bucket: int, id_: str = "") -> str:
        return self._prefixes[bucket] + id_


def bucket_prefix(bucket: int) -> str:
    """Prefix of all quota keys of a bucket."""
    return f"{{b:{bucket:02d}}}:"


active_tenants = _LaneKey("active")
"""Sorted set: tenant with waiting jobs -> its service counter."""
service_counters = _LaneKey("counters")
"""Hash: tenant -> service counter, kept while the tenant is idle."""
last_active = _LaneKey("last")
"""String: the tenant whose queue became empty most recently."""
sequence = _Key("m", "sequence")
"""Integer: number of jobs enqueued so far, from which queue positions are derived."""
job = _ModelKeys("job")
"""Hash: a waiting or leased job, or the receipt of an ended job."""
leases = _Key("m", "leases")
"""Sorted set: id of a leased job -> lease expiry in Unix milliseconds of the Redis server."""
waiting = _LaneKey("waiting")
"""Integer: number of jobs in all queues of the lane."""
arrivals = _LaneKey("arrivals")
"""Sorted set: id of a waiting job -> enqueue time in Unix milliseconds of the Redis server."""
sheddable = _LaneKey("sheddable")
"""Sorted set: `RANK TENANT` -> RANK * 2^40 + number of jobs that can be shed.

RANK is the rank of a tier. The number counts the tenant's waiting jobs of this tier that never
started.
"""
pace = _LaneKey("pace")
"""Hash: the rate at which waiting jobs are claimed, and the latest promised retry time."""
promises = _LaneKey("promises")
"""Sorted set: rejected request -> promised retry time in the server's Unix milliseconds."""
doorbell = _LaneKey("doorbell")
"""List: tokens that enqueued jobs add. Idle workers block on it."""
full_workers = _LaneKey("full")
"""Sorted set: own doorbell of a worker without room -> tokens that are repeated if it makes some.

The lowest one rings when a tenant begins to wait.
"""
engine_use = _ModelKeys("use")
"""String with expiry: what tenants use of the worker's full engine (`queue.EngineUse`)."""
control = _ModelKeys("control")
"""List: ids of leased jobs that the worker must abort."""
workers = _Key("m", "workers")
"""Sorted set: worker that claims jobs -> expiry of its announcement in Unix milliseconds."""
worker_card = _ModelKeys("worker")
"""String with expiry: the WorkerCard."""
last_seen = _Key("m", "last-seen")
"""Hash with expiry: worker -> Unix ms of its last announcement, a space, and its WorkerCard.

A worker that stops removes itself; one that is killed or stuck stays for `queue.LISTED_MS`.
"""
watched_workers = _Key("m", "watched")
"""Sorted set: worker with heartbeats -> when its lease expires, in the server's Unix ms.

The score of a missing worker is negative: minus the time at which it was first found missing.
"""
seen_on = _Key("m", "seen-on")
"""Hash: watched worker -> id of the server of a cluster that had its connection."""
worker_channel = _ModelKeys("connected")
"""Pub/sub channel without messages: a worker subscribes to it while its process lives."""
host_start = _Key("m", "host-start")
"""String with expiry: the host that starts a worker of the model."""
worker_doorbell = _ModelKeys("worker-doorbell")
"""List with expiry: a token if a job waits for this worker, which holds its prefix."""
held = _ModelKeys("held")
"""Set with expiry: digests that the worker holds (see `contract.affinity`)."""
holders = _Key("m", "holders")
"""Hash: digest -> a worker that has published it, and may have lost it since."""
sessions = _ModelKeys("sessions")
"""Hash with expiry: digest of a tenant's session -> `TIME WORKER` that claimed its last job."""
hinted = _Key("m", "hinted")
"""String with expiry: exists while a tenant has `sessions`."""
canary = _ModelKeys("canary")
"""String with expiry: the reference results of an exactness class."""
chunk = _ModelKeys("chunk")
"""String with expiry: packed token ids, by the chunk's name in hexadecimal (`contract.prompts`)."""


queue = _TenantKeys("queue")
"""Sorted set: id of a waiting job of the tenant -> its position (by tier, then by arrival)."""
tenant_pace = _TenantKeys("pace")
"""Hash: as `pace`, for each tenant."""
tenant_promises = _TenantKeys("promises")
"""Sorted set: as `promises`, for requests rejected because the tenant's queue was full."""

tokenizer = _GlobalKeys("tokenizer")
"""String with expiry: a zlib-compressed tokenizer.json, by its SHA-256."""
chat_template = _GlobalKeys("chat-template")
"""String with expiry: zlib-compressed chat templates (JSON: name -> source), by SHA-256."""
adapter_modules = _GlobalKeys("adapter-modules")
"""String with expiry: zlib-compressed JSON of `adapters.ModuleShapes`, by its SHA-256."""

replies = _Key("g", "replies")
"""Stream: reply frames for one gateway process (field `f`)."""
REPLIES_SECONDS: Final = 600
"""Lifetime of a reply stream after its gateway has died.

Until then, a client that resumes gets the same events that the dead gateway sent.
"""
gateway_alive = _Key("g", "alive")
"""String with expiry: exists while the gateway process is alive."""
GATEWAYS = "gateways"
"""Sorted set: gateway process -> its latest heartbeat in Unix ms, for operators to see."""
JOBS_DONE = "jobs:done"
"""Hash: background job -> its latest success in Unix ms, for operators to see."""
BACKGROUND_OWNERS = "responses:background"
"""Set: gateways that own background responses, including dead gateways that owned some."""
background_responses = _Key("g", "background")
"""Set with expiry: `TENANT ID` of the background responses that the gateway owns."""
content = _Key("r", "content")
"""Hash with expiry: what any gateway needs to replay or resume a response, beside its journal.

See `gateway.completions.stored`. The state of the response is in the record of its request.
"""
journal = _Key("r", "journal")
"""List with expiry: the replies received for the response so far."""


@lru_cache(maxsize=10_000)
def bucket_of(tenant: str) -> int:
    """Return the bucket of a tenant, 0 to BUCKETS - 1."""
    return zlib.crc32(tenant.encode()) % BUCKETS


request = _BucketKeys("request:")
"""Hash: the record of a request from its claim or admission on. See `_states.lua`.

With an expiry once it has ended, for as long as its response is kept.
"""
open_requests = _BucketKeys("open")
"""Sorted set: id of a running request -> lease expiry in the server's Unix milliseconds."""
running = _BucketKeys("running:")
"""Sorted set: like `open_requests`, for one subject with a concurrency limit."""
window = _BucketKeys("minute:")
"""Hash with expiry: slot of 250 ms -> the subject's usage, without the current slot."""
repeats = _BucketKeys("repeats:")
"""Sorted set of a key's requests in a window: digest -> how often it was sent."""
account = _BucketKeys("subject:")
"""Hash: the subject's usage of the minute, day and month, and its credits.

See `request_admit.lua` and `gateway.limits.counters`.
"""
accounts = _BucketKeys("accounts")
"""Set: subjects whose accounts are seeded."""
stored_bytes = _BucketKeys("stored:")
"""Hash: Unix milliseconds -> bytes that Redis stores for requests of the subject until then.

The empty field name holds the sum. The record of each request says what it has in there.
"""
stored_ends = _BucketKeys("stored-ends:")
"""Sorted set: the fields of `stored_bytes`, by their time."""
usage = _BucketKeys("usage")
"""Stream: usage records that are not yet in the ledger (field `u`)."""
unreadable_usage = _BucketKeys("usage:unreadable")
"""Hash: id of a `usage` entry, or of a request with a draft, that cannot be decoded -> its content,
for operators."""


def idempotency(bucket: int, tenant: str, digest: str) -> str:
    """Hash: the request for which an Idempotency-Key stands in a project of the tenant.

    It expires with the record of the request.

    `digest` is the digest of the Idempotency-Key.
    """
    return f"{bucket_prefix(bucket)}idempotency:{tenant}:{digest}"


def prompt_digests(tenant: str, digest: str) -> str:
    """String with expiry: digests of a prompt (`gateway.completions.admission.diagnostics`).

    `digest` is that of the response's project and id.
    """
    return f"{bucket_prefix(bucket_of(tenant))}prompt:{tenant}:{digest}"


def refusals(tenant: str) -> str:
    """List with expiry: the tenant's latest requests that a limit rejected, newest first."""
    return f"{bucket_prefix(bucket_of(tenant))}refusals:{tenant}"


def rejected(tenant: str) -> str:
    """List with expiry: the tenant's latest requests that were rejected otherwise, newest first."""
    return f"{bucket_prefix(bucket_of(tenant))}rejected:{tenant}"


def period_counts(series: str, period: str, number: int) -> str:
    """Sorted set with expiry: what was counted -> how often in one period.

    Periods are hours or days, numbered since the beginning of Unix time. See
    `gateway.limits.refusal_log`.
    """
    return f"console:counts:{series}:{period}:{number}"


console_session = _GlobalKeys("console:session")
"""String with expiry: a session of the console, by the digest of the cookie's token."""
console_sessions = _GlobalKeys("console:sessions")
"""Sorted set with expiry: digests of the latest sessions of a person or key, by their begin."""
console_kept = _GlobalKeys("console:kept")
"""Hash with expiry: sealed pages that forms of a session got, by their numbers, and `next`."""
console_signed_out = _GlobalKeys("console:signed-out")
"""String with expiry: when every session of a person or key was ended, in Unix ms."""
console_attempt = _GlobalKeys("console:attempt")
"""String with expiry: a login at the identity provider, by the digest of its `state`."""
console_link = _GlobalKeys("console:link")
"""String with expiry: what a link that logs in once stands for, by the link's digest."""
