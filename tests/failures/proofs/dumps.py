"""Dumps of everything that a deployment has stored, to be scanned for secrets."""

from redis.asyncio import Redis
from sqlalchemy import inspect, text
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.platform.database.engine import Database
from tests.support.stack import Stack


async def dump_redis(redis: "Redis") -> bytes:
    """Return every key and value, not compressed."""
    await redis.config_set("rdbcompression", "no")
    parts = []
    async for key in redis.scan_iter(count=1000):
        parts += [key, await redis.dump(key) or b""]
    return b"\n".join(parts)


async def dump_database(url: str) -> bytes:
    """Return every row of every table."""
    database = Database(url, statement_timeout_seconds=60)
    try:
        async with database.engine.connect() as connection:
            return "\n".join(await _rows(connection)).encode()
    finally:
        await database.aclose()


async def _rows(connection: AsyncConnection) -> list[str]:
    lines = []
    columns = await connection.run_sync(
        lambda sync: {
            table: [column["name"] for column in inspect(sync).get_columns(table)]
            for table in inspect(sync).get_table_names()
        }
    )
    for table, names in columns.items():
        shown = ", ".join(f'"{name}"' for name in names)
        for row in await connection.execute(text(f'SELECT {shown} FROM "{table}"')):
            # Bytes, such as digests, would be hidden by the way in which Python shows them.
            values = [value.hex() if isinstance(value, bytes) else str(value) for value in row]
            lines.append(f"{table}: {' | '.join(values)}")
    return lines


def logs(stack: Stack) -> dict[str, bytes]:
    """Return the log of each process."""
    return {path.name: path.read_bytes() for path in stack.directory.glob("*.log")}
