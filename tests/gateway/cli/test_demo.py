"""The keys that `sluice up` prepares."""

from gateway.cli.launch.bring_up import prepare_keys
from tests.support.redis_server import RedisServer


async def test_keys_are_reused_while_they_work_and_replaced_otherwise(
    database_url: str, redis_server: RedisServer
) -> None:
    async def prepare(key: str | None, admin_key: str | None) -> tuple[str, str]:
        return await prepare_keys(database_url, redis_server.url, key, admin_key)

    first = await prepare(None, None)
    assert await prepare(*first) == first
    # A key without the rights of an operator does not open the operators' console.
    key, admin_key = await prepare("sk-made-up", first[0])
    assert not {key, admin_key} & {"", "sk-made-up", *first}
    assert await prepare(key, admin_key) == (key, admin_key)
