"""A client and a shared connection of a real cluster, while its slots move and servers die."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any

import pytest
from prometheus_client import REGISTRY
from redis.asyncio import Redis
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError

from common.redis_cluster import MOST_REDIRECTIONS, server_of, slot_map_of
from common.redis_url import redis_client
from contract import keys
from contract.queue import MISSING_MS, JobQueue
from contract.scripts.cluster import ClusterConnection, ServerProcesses, shared_connection
from contract.scripts.executor import SharedConnection
from gateway.completions.queue.presence import new_gateway
from gateway.platform.redis_client import connect, observe_servers
from gateway.platform.redis_client import shared_connection as shared_measured
from tests.support.certificates import self_signed
from tests.support.patience import PATIENCE_SECONDS
from tests.support.processes import free_port
from tests.support.redis_cluster import RedisClusterServers, running_cluster
from tests.support.redis_server import SYSTEM, RedisServer
from worker.queue.heartbeat import WorkerHeartbeat

TAGS = range(12)
"""Hash tags of the keys under load, in slots of every server."""

_ROUNDS = 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisClusterServers]:
    """Three masters with a replica each, with TLS if the machine's Redis has it."""
    certificate = None
    if SYSTEM is not None:
        folder = tmp_path_factory.mktemp("certificate")
        self_signed("localhost", folder)
        certificate = folder / "server.pem"
    with running_cluster(certificate=certificate) as cluster:
        yield cluster


@pytest.fixture
async def client(cluster: RedisClusterServers) -> AsyncIterator["Redis"]:
    async with redis_client(cluster.url) as client:
        yield client


@pytest.fixture
async def shared(client: "Redis") -> AsyncIterator[ClusterConnection]:
    connect = partial(SharedConnection, timeout_seconds=PATIENCE_SECONDS)
    shared = shared_connection(client, connect)
    assert isinstance(shared, ClusterConnection)
    yield shared
    await shared.aclose()


async def count_up(client: "Redis", shared: ClusterConnection, tag: int, number: int) -> None:
    """Increment six keys in each way of sending commands, and check the replies."""
    names = [f"{{{tag}}}:{name}" for name in "abcdef"]
    assert await shared.execute_command("INCR", names[0]) == number
    assert await client.incr(names[1]) == number
    transaction = client.pipeline(transaction=True)
    for name in names[2:4]:
        transaction.execute_command("INCR", name)
    assert await transaction.execute() == [number, number]
    pipeline = client.pipeline(transaction=False)
    pipeline.execute_command("INCR", names[4])
    pipeline.execute_command("INCR", f"{{other {tag}}}:{names[5]}")
    assert await pipeline.execute() == [number, number]


@asynccontextmanager
async def counting(client: "Redis", shared: ClusterConnection) -> AsyncIterator[None]:
    """Count up during a block, and some rounds before and after it."""
    rounds, is_over = dict.fromkeys(TAGS, 0), False

    async def run(tag: int) -> None:
        for number in count(1):
            await count_up(client, shared, tag, number)
            rounds[tag] = number
            if is_over:
                return

    async def progress() -> None:
        first = dict(rounds)
        while any(rounds[tag] < first[tag] + _ROUNDS for tag in TAGS):
            assert not any(task.done() for task in tasks)
            await asyncio.sleep(0.01)

    for server in await shared.servers():
        await server.execute_command("FLUSHALL")
    tasks = [asyncio.create_task(run(tag)) for tag in TAGS]
    try:
        await progress()
        yield
        await progress()
    finally:
        is_over = True
        await asyncio.gather(*tasks)


async def test_every_command_is_executed_once_while_its_slot_moves(
    cluster: RedisClusterServers, client: "Redis", shared: ClusterConnection
) -> None:
    async with counting(client, shared):
        added = await asyncio.to_thread(cluster.add)
        slots = [key_slot(str(tag).encode()) for tag in TAGS]
        await asyncio.to_thread(cluster.move, slots, to=added)
    server = await server_of(client, f"{{{TAGS[0]}}}:a")
    assert server.connection_pool.connection_kwargs["port"] == cluster.port(added)


async def test_new_keys_of_a_slot_that_moves_are_in_its_next_server(
    cluster: RedisClusterServers, client: "Redis", shared: ClusterConnection
) -> None:
    slot = key_slot(b"moves")
    await asyncio.to_thread(cluster.move, [slot], to=cluster.masters[0])
    await asyncio.to_thread(cluster.begin_move, slot, to=cluster.masters[1])
    assert await client.set("{moves}:a", 1)
    assert await shared.execute_command("SET", "{moves}:b", 2)
    assert await client.get("{moves}:b") == b"2"
    await asyncio.to_thread(cluster.move, [slot], to=cluster.masters[1])
    assert await shared.execute_command("GET", "{moves}:a") == b"1"


@pytest.mark.parametrize("moved", ["named", "other"])
async def test_a_script_waits_until_its_slot_has_all_of_its_keys(
    cluster: RedisClusterServers, client: "Redis", shared: ClusterConnection, moved: str
) -> None:
    """A script may use keys that it does not name."""
    names = [f"{{parts}}:{each}" for each in ("named", "other")]
    source, target = cluster.masters[:2]
    slot = key_slot(b"parts")
    await asyncio.to_thread(cluster.move, [slot], to=source)
    for name in names:
        await client.set(name, 1)
    script = (
        "if string.sub(KEYS[#KEYS], -8) == '}:absent' then KEYS[#KEYS] = nil end "
        "return {#KEYS, redis.call('INCR', KEYS[1]), redis.call('INCR', ARGV[1])}"
    )
    holder = await asyncio.to_thread(cluster.begin_move, slot, to=target)
    arguments = ("127.0.0.1", cluster.port(target), f"{{parts}}:{moved}", 0, 10_000)
    await asyncio.to_thread(holder.execute_command, "MIGRATE", *arguments)

    async def run(executor: Any) -> Any:
        return await executor.execute_command("EVAL", script, 1, *names)

    running = [asyncio.create_task(run(each)) for each in (shared, client)]
    await asyncio.sleep(0.2)
    assert not any(each.done() for each in running)
    await asyncio.to_thread(cluster.move, [slot], to=target)
    assert sorted(await asyncio.gather(*running)) == [[1, 2, 2], [1, 3, 3]]


async def test_an_idle_client_finds_the_promoted_replica_of_a_killed_master(
    cluster: RedisClusterServers, client: "Redis", shared: ClusterConnection
) -> None:
    names = [f"{{{tag}}}:idle" for tag in range(40)]
    for name in names:
        assert await shared.execute_command("SET", name, 1)
        assert await client.set(name, 1)
    processes = [(ServerProcesses(), each) for each in (client, shared)]
    assert [await each.have_changed(executor) for each, executor in processes] == [False, False]
    await asyncio.to_thread(cluster.replicate, 0)
    await asyncio.to_thread(cluster.fail_over, 0)
    for name in names:
        assert await shared.execute_command("GET", name) == b"1"
        assert await client.get(name) == b"1"
    for has_changed in (True, False):
        for each, executor in processes:
            assert await each.have_changed(executor) is has_changed
    await asyncio.to_thread(cluster.restart_replica, 0)


async def test_metrics_name_the_server(
    cluster: RedisClusterServers,
) -> None:
    def reported(name: str, server: RedisServer, **labels: str) -> float | None:
        address = f"{cluster.host}:{cluster.port(server)}"
        return REGISTRY.get_sample_value(name, {"server": address, **labels})

    first, second, *_ = cluster.masters
    slot = key_slot(b"measured")
    await asyncio.to_thread(cluster.move, [slot], to=first)
    async with connect(cluster.url, max_connections=4) as client:
        shared = shared_measured(client)
        await client.set("measured", 1)
        await asyncio.to_thread(cluster.move, [slot], to=second)
        assert await shared.execute_command("GET", "measured") == b"1"
        moved = reported("sluice_redis_redirections_total", first, kind="moved")
        assert moved == 1
        assert not reported("sluice_redis_errors_total", first, command="get")
        count = "sluice_redis_command_duration_seconds_count"
        assert reported(count, second, command="get") == 1
        assert reported(count, first, command="set") == 1
        second.freeze()
        await observe_servers(client, timeout_seconds=0.3)
        second.thaw()
        up = [reported("sluice_redis_up", each) for each in cluster.masters]
        assert up == [each is not second for each in cluster.masters]
        used = [reported("sluice_redis_used_memory_bytes", each) for each in cluster.masters]
        assert [not math.isnan(each or 0) for each in used] == up
        await shared.aclose()


async def test_a_client_trusts_only_the_given_authority(cluster: RedisClusterServers) -> None:
    if not cluster.url.startswith("rediss:"):
        pytest.skip("redis-server of the system (Debian's redis-server package) is not installed")
    async with redis_client(cluster.url.partition("&")[0]) as client:
        with pytest.raises(RedisConnectionError, match="certificate verify failed"):
            await client.ping()


async def test_heartbeats_are_seen_by_the_server_of_the_model(
    cluster: RedisClusterServers, client: "Redis"
) -> None:
    models = [f"model {tag}" for tag in TAGS]
    beats = [WorkerHeartbeat(cluster.url, each, "worker", lease_ms=60_000) for each in models]
    for beat in beats:
        beat.start()
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            for model in models:
                while not await client.zcard(keys.watched_workers(model)):
                    await asyncio.sleep(0.05)
    finally:
        for beat in beats:
            await beat.aclose()


async def test_workers_are_not_gone_because_their_queue_moved(
    cluster: RedisClusterServers, client: "Redis"
) -> None:
    model = "moving model"
    slot = key_slot(keys.watched_workers(model).encode())
    await asyncio.to_thread(cluster.move, [slot], to=cluster.masters[0])
    beat = WorkerHeartbeat(cluster.url, model, "worker", lease_ms=60_000)
    beat.start()
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await client.zcard(keys.watched_workers(model)):
                await asyncio.sleep(0.05)
        await asyncio.to_thread(cluster.move, [slot], to=cluster.masters[1])
        queue = JobQueue(client, model)
        assert await queue.gone_workers() == []
        await asyncio.sleep(MISSING_MS / 1000)
        assert await queue.gone_workers() == []
        assert await client.zcard(keys.watched_workers(model))
    finally:
        await beat.aclose()


async def test_new_gateways_divide_evenly_among_the_servers(
    cluster: RedisClusterServers, client: "Redis"
) -> None:
    slots = slot_map_of(client)
    assert slots is not None
    await client.delete(keys.GATEWAYS)
    await client.zadd(keys.GATEWAYS, {f"dead {number}": 0 for number in range(20)})
    names = [await new_gateway(client) for _ in range(3 * len(slots.masters))]
    owners = Counter(slots.owner(key_slot(keys.replies(name).encode())) for name in names)
    assert owners == dict.fromkeys(slots.masters, 3)


async def test_commands_fail_if_no_server_responds() -> None:
    url = f"redis://127.0.0.1:{free_port()},127.0.0.1:{free_port()}?cluster=true"
    async with redis_client(url) as client:
        shared = shared_connection(client, partial(SharedConnection, timeout_seconds=1))
        for command in (client.get("x"), shared.execute_command("GET", "x"), client.ping()):
            with pytest.raises(RedisConnectionError):
                await command
        await shared.aclose()


async def test_servers_that_refer_to_each_other_do_not_loop(
    client: "Redis", shared: ClusterConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []

    async def refer(*args: Any, **_: Any) -> None:
        if args[0] != "GET":
            raise RedisConnectionError  # The map cannot be read again meanwhile.
        sent.append(args)
        slots = slot_map_of(client)
        assert slots is not None
        host, port = slots.masters[len(sent) % 2]
        raise MovedError(f"{key_slot(b'x')} {host}:{port}")

    for each in await shared.servers():
        monkeypatch.setattr(
            each, "execute_command", lambda *args: asyncio.ensure_future(refer(*args))
        )
    slots = slot_map_of(client)
    assert slots is not None
    for address in slots.masters:
        monkeypatch.setattr(slots.client(address), "execute_command", refer)
    for executor in (client, shared):
        sent.clear()
        with pytest.raises(MovedError):
            await executor.execute_command("GET", "x")
        assert len(sent) in (MOST_REDIRECTIONS, MOST_REDIRECTIONS + 1)
