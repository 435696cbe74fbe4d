"""The key that `sluice up` prepares."""

from gateway.launch.demo import prepare_key
from tests.support.redis_server import RedisServer


async def test_key_is_reused_while_it_works_and_replaced_otherwise(
    database_url: str, redis_server: RedisServer
) -> None:
    first = await prepare_key(database_url, redis_server.url, None)
    assert await prepare_key(database_url, redis_server.url, first) == first
    second = await prepare_key(database_url, redis_server.url, "sk-made-up")
    assert second not in ("", "sk-made-up", first)
    assert await prepare_key(database_url, redis_server.url, second) == second
