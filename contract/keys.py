"""Redis keys: one constant or function for each key.

Keys that one script uses share a hash tag, so that every script works on Redis Cluster:

- `{m:MODEL}`: the keys of one model, some of them for each lane of its queue
- `{g:GATEWAY}`: the keys of one gateway
- `{r:REQUEST}`: the keys of one stored response, which clients may resume or retrieve
- `{b:NN}`: the quota keys of all tenants in one bucket
"""

import zlib
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Final, Literal

from contract.tier import Lane

MODELS = "models"
"""Hash: model -> its latest WorkerCard. An announced model keeps its entry until it is removed."""

REMOVED_MODELS = "models:removed"
"""Set: removed models.

Gateways drop these models from their catalogues. Other models without an entry stay in the
catalogues, because Redis may have restarted empty.
"""

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
"""Set: own doorbells of workers without room, one of which rings when a tenant begins to wait."""
control = _ModelKeys("control")
"""List: ids of leased jobs that the worker must abort."""
workers = _Key("m", "workers")
"""Sorted set: worker that claims jobs -> expiry of its announcement in Unix milliseconds."""
worker_card = _ModelKeys("worker")
"""String with expiry: the WorkerCard."""
watched_workers = _Key("m", "watched")
"""Sorted set: worker with heartbeats -> when its lease expires, in the server's Unix ms.

The score of a missing worker is negative: minus the time at which it was first found missing.
"""
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
chunk = _ModelKeys("chunk")
"""String with expiry: packed token ids, by the chunk's name in hexadecimal (`contract.prompts`)."""


def queue_prefix(model: str, lane: Lane = Lane.REQUESTS) -> str:
    """Prefix of the tenants' queues, to which the tenant is appended."""
    return f"{{m:{model}}}:{lane.value}queue:"


def queue(model: str, tenant: str, lane: Lane = Lane.REQUESTS) -> str:
    """Sorted set: id of a waiting job of the tenant -> its position (by tier, then by arrival)."""
    return queue_prefix(model, lane) + tenant


def pace_prefix(model: str, lane: Lane = Lane.REQUESTS) -> str:
    """Prefix of the hashes that hold the same for each tenant, to which the tenant is appended."""
    return f"{pace(model, lane)}:"


def tenant_promises(model: str, tenant: str, lane: Lane = Lane.REQUESTS) -> str:
    """Sorted set: as `promises`, for requests rejected because the tenant's queue was full."""
    return f"{promises(model, lane)}:{tenant}"


def tokenizer(digest: str) -> str:
    """String with expiry: a zlib-compressed tokenizer.json, by its SHA-256."""
    return f"tokenizer:{digest}"


def chat_template(digest: str) -> str:
    """String with expiry: zlib-compressed chat templates (JSON: name -> source), by SHA-256."""
    return f"chat-template:{digest}"


def adapter_modules(digest: str) -> str:
    """String with expiry: zlib-compressed JSON of `adapters.ModuleShapes`, by its SHA-256."""
    return f"adapter-modules:{digest}"


replies = _Key("g", "replies")
"""Stream: reply frames for one gateway process (field `f`)."""
REPLIES_SECONDS: Final = 600
"""Lifetime of a reply stream after its gateway has died.

Until then, a client that resumes gets the same events that the dead gateway sent.
"""
gateway_alive = _Key("g", "alive")
"""String with expiry: exists while the gateway process is alive."""
BACKGROUND_OWNERS = "answers:background"
"""Set: gateways that own background responses, including dead gateways that owned some."""
background_responses = _Key("g", "background")
"""Set with expiry: request ids of the background responses that the gateway owns."""
response = _Key("r", "answer")
"""Hash with expiry: the state any gateway needs to replay or resume a response.

See `gateway.completions.stored`.
"""
journal = _Key("r", "journal")
"""List with expiry: the replies received for the response so far."""

BUCKETS = 64
"""Buckets into which tenants are hashed; all quota keys of one tenant are in its bucket."""


@lru_cache(maxsize=10_000)
def bucket_of(tenant: str) -> int:
    """Return the bucket of a tenant, 0 to BUCKETS - 1."""
    return zlib.crc32(tenant.encode()) % BUCKETS


# Cached: every request uses these keys of its bucket.


@cache
def bucket_prefix(bucket: int) -> str:
    """Prefix of all quota keys of a bucket."""
    return f"{{b:{bucket:02d}}}:"


@cache
def reservation_prefix(bucket: int) -> str:
    """Prefix of the reservations, to which the request id is appended."""
    return f"{bucket_prefix(bucket)}reservation:"


def reservation(bucket: int, request_id: str) -> str:
    """Hash: the reservation of an admitted request whose usage is not settled yet."""
    return reservation_prefix(bucket) + request_id


@cache
def open_reservations(bucket: int) -> str:
    """Sorted set: request id of a reservation -> lease expiry in the server's Unix milliseconds."""
    return f"{bucket_prefix(bucket)}open"


@cache
def running_prefix(bucket: int) -> str:
    """Prefix of the sets of running requests, to which the subject is appended."""
    return f"{bucket_prefix(bucket)}running:"


def running(bucket: int, subject: str) -> str:
    """Sorted set: like `open_reservations`, for one subject with a concurrency limit."""
    return running_prefix(bucket) + subject


@cache
def window_prefix(bucket: int) -> str:
    """Prefix of the slots of the last minute, to which the subject is appended."""
    return f"{bucket_prefix(bucket)}minute:"


def window(bucket: int, subject: str) -> str:
    """Hash with expiry: slot of 250 ms -> the subject's usage, without the current slot."""
    return window_prefix(bucket) + subject


@cache
def account_prefix(bucket: int) -> str:
    """Prefix of the accounts, to which the subject is appended."""
    return f"{bucket_prefix(bucket)}subject:"


def account(bucket: int, subject: str) -> str:
    """Hash: the subject's usage of the minute, day and month, and its credits.

    See `quota_reserve.lua` and `gateway.limits.accounts`.
    """
    return account_prefix(bucket) + subject


def accounts(bucket: int) -> str:
    """Set: subjects whose accounts are seeded."""
    return f"{bucket_prefix(bucket)}accounts"


def stored_bytes(bucket: int, subject: str) -> str:
    """Hash: request id -> bytes that Redis stores for it, charged to the subject.

    The empty field name holds the sum.
    """
    return f"{bucket_prefix(bucket)}stored:{subject}"


def stored_ends(bucket: int, subject: str) -> str:
    """Sorted set: request id of `stored_bytes` -> expiry in the server's Unix milliseconds."""
    return f"{bucket_prefix(bucket)}stored-ends:{subject}"


@cache
def usage(bucket: int) -> str:
    """Stream: usage records that are not yet in the ledger (field `u`)."""
    return f"{bucket_prefix(bucket)}usage"


def unreadable_usage(bucket: int) -> str:
    """Hash: id of a `usage` entry that cannot be decoded -> its content, for operators."""
    return f"{usage(bucket)}:unreadable"


def idempotency(bucket: int, tenant: str, digest: str) -> str:
    """Hash with expiry: the request that an Idempotency-Key started in a project of the tenant.

    `digest` is the digest of the Idempotency-Key.
    """
    return f"{bucket_prefix(bucket)}idempotency:{tenant}:{digest}"


def refusals(tenant: str) -> str:
    """List with expiry: the tenant's latest requests that a limit rejected, newest first."""
    return f"{bucket_prefix(bucket_of(tenant))}refusals:{tenant}"


def period_counts(series: str, period: str, number: int) -> str:
    """Sorted set with expiry: what was counted -> how often in one period.

    Periods are hours or days, numbered since the beginning of Unix time. See
    `gateway.limits.refusal_log`.
    """
    return f"console:counts:{series}:{period}:{number}"


def console_session(digest: str) -> str:
    """String with expiry: a session of the console; DIGEST is the digest of the cookie's token."""
    return f"console:session:{digest}"


def console_sessions(subject: str) -> str:
    """Sorted set with expiry: digests of the latest sessions of a person or key, by their begin."""
    return f"console:sessions:{subject}"


def console_signed_out(subject: str) -> str:
    """String with expiry: when every session of a person or key was ended, in Unix ms."""
    return f"console:signed-out:{subject}"


def console_attempt(digest: str) -> str:
    """String with expiry: a login at the identity provider; DIGEST is the digest of its `state`."""
    return f"console:attempt:{digest}"


def console_link(digest: str) -> str:
    """String with expiry: what a link that logs in once stands for."""
    return f"console:link:{digest}"
