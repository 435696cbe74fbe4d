"""The run that kills every kind of process, and the evidence that it leaves."""

import asyncio
import random
import time
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field

from gateway.billing.ledger.rollups import Rollups
from gateway.records.records import Billing
from gateway.records.scopes import Role
from tests.failures.proofs.accounts import Accounts, Credential, open_accounts
from tests.failures.proofs.client import Answer, request
from tests.failures.proofs.clients import Clients, Wish, wishes
from tests.failures.proofs.conftest import JWT_SECRET, Scale, token_of
from tests.failures.proofs.dumps import dump_database, dump_redis, logs
from tests.failures.proofs.kills import Freed, Kills, Waited, wait_for_place, wait_for_retry_after
from tests.failures.proofs.ledger import LEASE_AND_SWEEP_SECONDS, Books, Row, open_books
from tests.failures.proofs.observer import Observer, watching
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stack import Stack, metric

CREDIT = 50_000_000
"""Micro-dollars of the prepaid tenant's credit."""
DUMP_SECONDS = 3.0
RECEIPT = "receipt: "
"""Prefix of a job's receipt among the leftovers in Redis."""


@dataclass
class Evidence:
    """What clients, Redis, the engine and the ledger recorded of the same requests."""

    stack: Stack
    credentials: list[Credential] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    answers: list[tuple[Wish, Answer]] = field(default_factory=list)
    refusals: list[Answer] = field(default_factory=list)
    """Of invalid credentials."""
    early_refusals: int = 0
    """By gateways that had just started, of requests that are not among the answers."""
    observer: Observer = field(default_factory=Observer)
    rows: list[Row] = field(default_factory=list)
    engine_prompt_tokens: int = 0
    engine_completion_tokens: int = 0
    cut: Answer | None = None
    """A stream whose gateway was killed."""
    freed: Freed | None = None
    waited: Waited | None = None
    settled_seconds: float = 0.0
    """From the end of the load until nothing was open and everything was in the ledger."""
    load_seconds: float = 0.0
    living_gateways: set[str] = field(default_factory=set)
    """Ids of the gateways that were not killed."""
    leftovers: list[str] = field(default_factory=list)
    dumps: dict[str, bytes] = field(default_factory=dict)

    @property
    def served(self) -> list[tuple[Wish, Answer]]:
        """Responses with a completion, whole or not."""
        return [(wish, answer) for wish, answer in self.answers if answer.status == 200]


def evidence_of_runs(
    stacks: Mapping[str, Stack], scale: Scale, *, seed: int
) -> dict[str, Evidence]:
    """Use and kill each deployment, wait until it has settled, and collect its evidence.

    The runs are concurrent: most of the time they wait for leases to expire.
    """
    evidence = {name: Evidence(stack) for name, stack in stacks.items()}
    asyncio.run(_gather_all(evidence.values(), scale, seed=seed))
    return evidence


async def _gather_all(runs: Iterable[Evidence], scale: Scale, *, seed: int) -> None:
    async with asyncio.TaskGroup() as tasks:
        for run in runs:
            tasks.create_task(_gather(run, scale, rng=random.Random(seed)))


async def _gather(evidence: Evidence, scale: Scale, *, rng: random.Random) -> None:
    stack = evidence.stack
    async with open_accounts(stack) as accounts, open_books(stack) as books:
        await _open_accounts(accounts, evidence)
        place, minute, free = await _probes(accounts)
        async with watching(books.redis) as evidence.observer:
            kills, clients = Kills(stack), Clients(stack.gateways)
            keys = [credential.text for credential in evidence.credentials]
            load = wishes(rng, keys, is_over=lambda: _is_enough(kills, clients, scale))
            is_over = asyncio.Event()
            dumping = asyncio.create_task(_keep_dumping(books, evidence, scale, is_over))
            try:
                waiting = (
                    asyncio.create_task(wait_for_retry_after(kills, minute.text))
                    if scale.waits_for_retry_after
                    else None
                )
                _, _, evidence.freed, evidence.refusals = await asyncio.gather(
                    _timed(clients.run(load, clients=scale.clients), evidence),
                    kills.run(
                        rng,
                        kills=scale.kills,
                        pause_seconds=scale.pause_seconds,
                        held_key=place.text,
                        free_key=free.text,
                    ),
                    wait_for_place(kills, place.text),
                    _bad_credentials(stack, evidence),
                )
                if waiting is not None:
                    evidence.waited = await waiting
                evidence.answers, evidence.early_refusals = clients.answers, kills.refusals
                evidence.cut = kills.cut
                evidence.settled_seconds = await _settled(books, evidence)
            finally:
                is_over.set()
            await dumping
            # The next run in the background would do this too, half a minute later.
            await Rollups(books.database).make_all()
        evidence.rows = await books.rows()
        await _read_leftovers(books, evidence)
        await _read_everything(books, evidence)


def _is_enough(kills: Kills, clients: Clients, scale: Scale) -> bool:
    """Return whether the load may end.

    After the last kill, at least one client must leave a stream: its gateway certainly stays alive.
    """
    over_at = kills.over_at
    if over_at is None or len(clients.answers) < scale.requests:
        return False
    return any(
        answer.has_left and answer.sent_at > over_at and answer.status == 200 and answer.request_id
        for _, answer in reversed(clients.answers)
    )


async def _settled(books: Books, evidence: Evidence) -> float:
    """Wait until the ledger is complete. Raises TimeoutError with the log of background jobs."""
    try:
        return await books.settled(seconds=LEASE_AND_SWEEP_SECONDS)
    except TimeoutError as error:
        logs = [f"{name}: {evidence.stack.log(name)[-3_000:]}" for name in ("jobs", "beat")]
        raise TimeoutError("\n".join([str(error)[:300], *logs])) from None


async def _timed(load: Awaitable[None], evidence: Evidence) -> None:
    began = time.monotonic()
    await load
    evidence.load_seconds = time.monotonic() - began


async def _open_accounts(accounts: Accounts, evidence: Evidence) -> None:
    """Four tenants: without limits, with limits that are exceeded, prepaid, and by JWT."""
    limited = {
        "requests_per_minute": 2_000,
        "tokens_per_minute": 200_000,
        "tokens_per_day": 100_000_000,
        "concurrent_requests": 20,
        "budget_micros": 10**9,
    }
    for tenant, options in {
        "free": {},
        "limited": {"limits": limited},
        "prepaid": {"billing": Billing.PREPAID},
        "people": {"limits": {"concurrent_requests": 2}},
    }.items():
        await accounts.tenant(tenant, **options)  # type: ignore[arg-type]
        project = await accounts.project(tenant, limits={"requests_per_day": 1_000_000})
        evidence.credentials += [
            await accounts.key(tenant),
            await accounts.key(
                tenant, project, limits={"budget_micros": 10**9, "concurrent_requests": 16}
            ),
        ]
    await accounts.grant("prepaid", CREDIT)
    await accounts.members.add("people", subject="ada", role=Role.DEVELOPER)
    # No server listens there, so deliveries fail and are recorded.
    webhook = await accounts.webhooks.create("limited", "http://127.0.0.1:9/hook")
    await accounts.webhooks.test("limited", webhook.id)
    token = token_of("people", "ada")
    evidence.credentials.append(Credential("people", None, "jwt:ada", token))
    evidence.secrets = [*evidence.stack.keys, webhook.secret, JWT_SECRET, token]


async def _probes(accounts: Accounts) -> tuple[Credential, Credential, Credential]:
    """Keys with one concurrent request, with three requests a minute, and without limits."""
    tenant = await accounts.tenant("probes")
    return (
        await accounts.key(tenant, limits={"concurrent_requests": 1}),
        await accounts.key(tenant, limits={"requests_per_minute": 3}),
        await accounts.key(tenant),
    )


async def _bad_credentials(stack: Stack, evidence: Evidence) -> list[Answer]:
    """Send credentials that are wrong in every way; responses must not repeat them."""
    key, token = evidence.credentials[0].text, evidence.secrets[-1]
    body = {"model": "sluice-tiny", "prompt": "x", "max_tokens": 1}
    wrong = [key[:-1], key + "x", key.swapcase(), token[:-2], token + "x", f"{key} {token}"]
    elsewhere = ({"x-api-key": key}, {"cookie": f"key={key}"}, {"x-request-id": key})
    asked = [request(url, text, body) for text in wrong for url in stack.gateways]
    asked += [request(url, text, path="/v1/keys") for text in wrong for url in stack.gateways]
    asked += [request(stack.gateways[0], "", body, headers=headers) for headers in elsewhere]
    asked += [request(url, key, body | {"n": token, "logit_bias": key}) for url in stack.gateways]
    return [answer for answer in await asyncio.gather(*asked) if answer.is_complete]


async def _keep_dumping(
    books: Books, evidence: Evidence, scale: Scale, is_over: asyncio.Event
) -> None:
    # Not cancelled: commands of redis-py sometimes swallow that (python/cpython#86296).
    while not is_over.is_set():
        evidence.dumps[f"redis {len(evidence.dumps)}"] = await dump_redis(books.redis)
        await asyncio.sleep(DUMP_SECONDS * max(scale.pause_seconds, 1))


async def _read_leftovers(books: Books, evidence: Evidence) -> None:
    """Record what is left in Redis once the living gateways hold nothing there.

    They drop receipts a while after the requests.
    """
    gateways = {row["request_id"]: row["gateway"] for row in evidence.rows}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        evidence.living_gateways = await books.living_gateways()
        evidence.leftovers = await books.leftovers()
        requests = map(request_of_receipt, evidence.leftovers)
        owners = {gateways.get(each) for each in requests}
        is_over = owners.isdisjoint({None, *evidence.living_gateways})
        # For some seconds a killed gateway counts as alive. On a busy machine, a living one may
        # count as dead.
        if is_over and len(evidence.living_gateways) == len(evidence.stack.gateways):
            return
        await asyncio.sleep(0.2)


def request_of_receipt(leftover: str) -> str | None:
    """Return the request of a receipt in Redis, or None for any other key."""
    if not leftover.startswith(RECEIPT):
        return None
    return leftover.removeprefix(RECEIPT).rpartition("-")[0]


async def _read_everything(books: Books, evidence: Evidence) -> None:
    worker = evidence.stack.worker_url()
    evidence.rows = await books.rows()
    evidence.engine_prompt_tokens = int(metric(worker, "sluice_worker_prompt_tokens_total"))
    evidence.engine_completion_tokens = int(metric(worker, "sluice_worker_completion_tokens_total"))
    evidence.dumps["redis at the end"] = await dump_redis(books.redis)
    evidence.dumps["database"] = await dump_database(evidence.stack.database_url)
    evidence.dumps |= logs(evidence.stack)
    bodies = [answer.body for _, answer in evidence.answers if answer.status != 200]
    evidence.dumps["errors"] = b"\n".join(bodies + [answer.body for answer in evidence.refusals])
