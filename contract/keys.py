"""Every Redis key, one function each.

All keys of one model share the hash tag `{m:MODEL}`, all keys of one gateway `{g:GATEWAY}`: each script
touches one tag only, so it works on Redis Cluster.
"""

MODELS = "models"
"""Hash: model -> its latest WorkerCard. A model that was ever announced stays known."""

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
    """Prefix of the tenants' queues (lists of job ids), to which the tenant is appended."""
    return f"{{m:{model}}}:queue:"


def queue(model: str, tenant: str) -> str:
    """List: ids of the tenant's waiting jobs, oldest first."""
    return queue_prefix(model) + tenant


def job_prefix(model: str) -> str:
    """Prefix of the job hashes, to which the job id is appended."""
    return f"{{m:{model}}}:job:"


def job(model: str, job_id: str) -> str:
    """Hash: one job, waiting or leased."""
    return job_prefix(model) + job_id


def leases(model: str) -> str:
    """Sorted set: id of a leased job -> lease expiry in Unix milliseconds of the Redis server."""
    return f"{{m:{model}}}:leases"


def waiting(model: str) -> str:
    """Integer: number of jobs in all queues of the model."""
    return f"{{m:{model}}}:waiting"


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


def replies(gateway: str) -> str:
    """Stream: reply frames for one gateway process (field `f`)."""
    return f"{{g:{gateway}}}:replies"


def gateway_alive(gateway: str) -> str:
    """String with expiry: exists while the gateway process lives."""
    return f"{{g:{gateway}}}:alive"
