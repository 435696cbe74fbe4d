"""What a replica lacks of its master."""

from dataclasses import dataclass

from redis import Redis

from tests.support.redis_server import RedisServer


@dataclass(slots=True)
class Difference:
    """What only one of two servers has, by kind."""

    lost: dict[str, int]
    """What only the master has: written since the replica received nothing."""
    revived: dict[str, int]
    """What only the replica has: its removal is lost."""


def difference(master: RedisServer, replica: RedisServer) -> Difference:
    """Compare open requests, jobs, usage records and frames of a master and its replica."""
    here, there = contents(master), contents(replica)
    return Difference(
        {kind: len(here[kind] - there[kind]) for kind in here},
        {kind: len(there[kind] - here[kind]) for kind in here},
    )


def contents(server: RedisServer) -> dict[str, set[bytes]]:
    """Return the names of everything of these kinds."""
    patterns = {
        "requests": "{b:*}:open",
        "records": "{b:*}:usage",
        "jobs": "{m:*}:job:*",
        "frames": "{g:*}:replies",
    }
    with Redis(port=server.port) as client:
        client.execute_command("READONLY")
        found = {kind: set(client.keys(pattern)) for kind, pattern in patterns.items()}
        found["requests"] = {
            each for name in found["requests"] for each in client.zrange(name, 0, -1)
        }
        for kind in ("records", "frames"):
            # A stream has entries.
            found[kind] = {
                b"%s %s" % (name, entry) for name in found[kind] for entry, _ in client.xrange(name)
            }
        return found
