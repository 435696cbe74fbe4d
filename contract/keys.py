"""Every Redis key, one function each.

All keys of one model share the hash tag `{m:MODEL}`, all keys of one gateway `{g:GATEWAY}`, all of one answer
that clients may come back for `{r:REQUEST}`, all quota keys of a tenant that of its bucket, `{b:NN}`: each script touches one tag only, so it works on Redis Cluster.
"""

import zlib

MODELS = "models"
"""Hash: model -> its latest WorkerCard. A model that was ever announced stays known until it is removed."""

REMOVED_MODELS = "models:removed"
"""Set: models that were removed, so that gateways forget them, which else would take them for lost with a Redis."""

KEY_EVENTS = "auth:events"
"""Stream: one entry for each change that gateways must stop caching (field `key` or `tenant`: the id)."""


def active_tenants(model: str) -> str:
    """Sorted set: tenant with waiting jobs -> its service counter."""
    return f"{{m:{model}}}:active"


def service_counters(model: str) -> str:
    """Hash: tenant -> service counter, kept while the tenant is idle."""
    return f"{{m:{model}}}:counters"


def last_active(model: str) -> str:
    """String: the tenant whose queue was emptied last."""
    return f"{{m:{model}}}:last"


def queue_prefix(model: str) -> str:
    """Prefix of the tenants' queues, to which the tenant is appended."""
    return f"{{m:{model}}}:queue:"


def queue(model: str, tenant: str) -> str:
    """Sorted set: id of a waiting job of the tenant -> its place (by tier, then by arrival)."""
    return queue_prefix(model) + tenant


def sequence(model: str) -> str:
    """Integer: number of jobs that were ever enqueued, from which places are made."""
    return f"{{m:{model}}}:sequence"


def job_prefix(model: str) -> str:
    """Prefix of the job hashes, to which the job id is appended."""
    return f"{{m:{model}}}:job:"


def job(model: str, job_id: str) -> str:
    """Hash: one job, waiting or leased, or the receipt of one that has ended."""
    return job_prefix(model) + job_id


def leases(model: str) -> str:
    """Sorted set: id of a leased job -> lease expiry in Unix milliseconds of the Redis server."""
    return f"{{m:{model}}}:leases"


def waiting(model: str) -> str:
    """Integer: number of jobs in all queues of the model."""
    return f"{{m:{model}}}:waiting"


def arrivals(model: str) -> str:
    """Sorted set: id of a waiting job -> when it was put on the queue, in Unix milliseconds of the Redis server."""
    return f"{{m:{model}}}:arrivals"


def sheddable(model: str) -> str:
    """Sorted set: `RANK TENANT` -> rank of a tier * 2^40 + the tenant's waiting jobs of it that never began."""
    return f"{{m:{model}}}:sheddable"


def pace(model: str) -> str:
    """Hash: how fast waiting jobs are claimed, and the last time that a refused request was promised."""
    return f"{{m:{model}}}:pace"


def pace_prefix(model: str) -> str:
    """Prefix of the same of each tenant, to which the tenant is appended."""
    return f"{pace(model)}:"


def promises(model: str) -> str:
    """Sorted set: a refused request -> when it was told to come back, in Unix milliseconds of the Redis server."""
    return f"{{m:{model}}}:promises"


def tenant_promises(model: str, tenant: str) -> str:
    """Sorted set: the same, of requests that were refused because the tenant's own queue was full."""
    return f"{promises(model)}:{tenant}"


def doorbell(model: str) -> str:
    """List: one token for each enqueued job, on which idle workers block."""
    return f"{{m:{model}}}:doorbell"


def control_prefix(model: str) -> str:
    """Prefix of the workers' control lists, to which the worker id is appended."""
    return f"{{m:{model}}}:control:"


def control(model: str, worker: str) -> str:
    """List: ids of leased jobs that the worker is to abort."""
    return control_prefix(model) + worker


def workers(model: str) -> str:
    """Sorted set: worker that claims jobs -> time in Unix milliseconds until which it is taken to live."""
    return f"{{m:{model}}}:workers"


def worker_card(model: str, worker: str) -> str:
    """String with expiry: the WorkerCard."""
    return f"{{m:{model}}}:worker:{worker}"


def tokenizer(digest: str) -> str:
    """String with expiry: a zlib-compressed tokenizer.json, by its SHA-256."""
    return f"tokenizer:{digest}"


def chat_template(digest: str) -> str:
    """String with expiry: a zlib-compressed chat template (JSON: name -> Jinja source), by its SHA-256."""
    return f"chat-template:{digest}"


def replies(gateway: str) -> str:
    """Stream: reply frames for one gateway process (field `f`)."""
    return f"{{g:{gateway}}}:replies"


def gateway_alive(gateway: str) -> str:
    """String with expiry: exists while the gateway process lives."""
    return f"{{g:{gateway}}}:alive"


BACKGROUND_OWNERS = "answers:background"
"""Set: gateways that own background answers, or did when they died."""


def background_answers(gateway: str) -> str:
    """Set with expiry: request ids of the background answers that the gateway owns."""
    return f"{{g:{gateway}}}:background"


def answer(request_id: str) -> str:
    """Hash with expiry: what any gateway needs to tell or to continue an answer; see `gateway.answers`."""
    return f"{{r:{request_id}}}:answer"


def journal(request_id: str) -> str:
    """List with expiry: the replies that the answer consists of so far."""
    return f"{{r:{request_id}}}:journal"


BUCKETS = 64
"""Buckets into which tenants are hashed; all quota keys of one tenant are in its bucket."""


def bucket_of(tenant: str) -> int:
    """Return the bucket of a tenant, 0 to BUCKETS - 1."""
    return zlib.crc32(tenant.encode()) % BUCKETS


def bucket_prefix(bucket: int) -> str:
    """Prefix of all quota keys of a bucket."""
    return f"{{b:{bucket:02d}}}:"


def reservation(bucket: int, request_id: str) -> str:
    """Hash: an admitted request whose usage is not settled yet."""
    return f"{bucket_prefix(bucket)}reservation:{request_id}"


def open_reservations(bucket: int) -> str:
    """Sorted set: request id of a reservation -> expiry of its lease in Unix milliseconds of the Redis server."""
    return f"{bucket_prefix(bucket)}open"


def running(bucket: int, subject: str) -> str:
    """Sorted set: the subject's admitted requests, like `open_reservations`, where their number is limited."""
    return f"{bucket_prefix(bucket)}running:{subject}"


def window(bucket: int, subject: str) -> str:
    """Hash: what the subject used in the last minute."""
    return f"{bucket_prefix(bucket)}window:{subject}"


def account(bucket: int, subject: str) -> str:
    """Hash: what the subject used today and this month, and its credits; see `gateway.quota`."""
    return f"{bucket_prefix(bucket)}account:{subject}"


def accounts(bucket: int) -> str:
    """Set: subjects whose accounts were seeded."""
    return f"{bucket_prefix(bucket)}accounts"


def stored_bytes(bucket: int, subject: str) -> str:
    """Hash: request id -> bytes that Redis stores of it for the subject; the sum under the empty name."""
    return f"{bucket_prefix(bucket)}stored:{subject}"


def stored_ends(bucket: int, subject: str) -> str:
    """Sorted set: request id of `stored_bytes` -> when its bytes expire, in Unix milliseconds of the Redis server."""
    return f"{bucket_prefix(bucket)}stored-ends:{subject}"


def usage(bucket: int) -> str:
    """Stream: usage records that are not in the ledger yet (field `u`)."""
    return f"{bucket_prefix(bucket)}usage"


def unreadable_usage(bucket: int) -> str:
    """Hash: entry of `usage` that could not be read -> what it says. For a person to look at."""
    return f"{usage(bucket)}:unreadable"


def idempotency(bucket: int, tenant: str, digest: str) -> str:
    """Hash with expiry: the request that an Idempotency-Key, by its digest, has started in a project of the tenant."""
    return f"{bucket_prefix(bucket)}idempotency:{tenant}:{digest}"
