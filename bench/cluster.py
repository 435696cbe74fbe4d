"""CPU of each Redis for a request, with one Redis and with a cluster: `python -m bench.cluster`.

Two deployments with the scripted engine take turns with the same load, of many tenants with limits
and many models. One has a single Redis, the other a cluster of three masters. No Redis has a
replica. Replies are most of the work of Redis, and those of a gateway are on one master: with fewer
gateways than masters, one of them has nearly none.
"""

import argparse
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

import uvloop
from redis import Redis

from bench import client
from bench.client import Lane, Request
from bench.measure import MeasureError
from bench.processes import Meter
from bench.scenarios import prompts
from bench.sluice import Sluice
from bench.starting import Server, StartError, free_port, start
from bench.tables import table
from gateway.cli.launch.launch_plan import redis_server
from gateway.records.limits import LimitName

_MASTERS: Final = 3
_SLOTS: Final = 16_384
_BUS_PORTS: Final = 10_000
"""Distance between the port of a server and that of its cluster bus."""
_PORTS: Final = 65_536 - _BUS_PORTS
_READY_SECONDS: Final = 60.0
_ANSWER_SECONDS: Final = 5.0
_MODELS: Final = tuple(f"model-{number}" for number in range(48))
_LANES: Final = 8
"""Consecutive connections that share a gateway."""
_CONNECTIONS: Final = 96
"""Each of another tenant."""
_WORDS: Final = 100
_TOKENS: Final = 32
_STEP_SECONDS: Final = 0.02
_ENOUGH: Final = 10**12
"""A limit that no measurement reaches."""
_LIMITS: Final = dict.fromkeys(
    (
        LimitName.REQUESTS_PER_MINUTE,
        LimitName.TOKENS_PER_MINUTE,
        LimitName.REQUESTS_PER_DAY,
        LimitName.TOKENS_PER_DAY,
        LimitName.CONCURRENT_REQUESTS,
    ),
    _ENOUGH,
)


@dataclass(frozen=True, slots=True)
class _System:
    name: str
    sluice: Sluice
    servers: Sequence[Server]
    """Of Redis, except the one that only Celery uses."""
    workers: Server
    gateways: int

    def wait_for_models(self) -> None:
        """Wait until each gateway lists all models. Raises StartError."""
        deadline = time.monotonic() + _READY_SECONDS
        for url in self.sluice.urls(self.gateways):
            while (found := self._models(url)) < len(_MODELS):
                self.workers.check()
                if time.monotonic() > deadline:
                    raise StartError(
                        f"{self.name}: {url} listed {found} of {len(_MODELS)} models after "
                        f"{_READY_SECONDS:.0f} s"
                    )
                time.sleep(0.2)

    def _models(self, url: str) -> int:
        """Return how many models a gateway lists; none if it does not answer."""
        request = urllib.request.Request(  # noqa: S310  (our own server)
            f"{url}/v1/models", headers={"authorization": f"Bearer {self._key(0)}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as response:  # noqa: S310
                return len(json.load(response)["data"])
        except OSError:
            return 0

    def _key(self, number: int) -> str:
        return self.sluice.key(f"tenant-{number}", limits=_LIMITS)

    def microseconds(self, requests: int, seed: str, *, deadline: float) -> list[float]:
        """Send so many requests on each connection; return the CPU of each Redis for a request.

        Raises MeasureError if they have not ended at a time of the monotonic clock.
        """
        urls, texts = self.sluice.urls(self.gateways), prompts(seed, _WORDS)
        lanes = []
        for number in range(_CONNECTIONS):
            model = _MODELS[number % len(_MODELS)]
            sent = [
                Request(model=model, prompt=next(texts), completion_tokens=_TOKENS, streamed=True)
                for _ in range(requests)
            ]
            url = urls[number // _LANES % self.gateways]
            lanes.append(Lane(url, self._key(number), sent))
        meter = Meter({server.name: [server.pid] for server in self.servers})
        left = max(0.0, deadline - time.monotonic())
        try:
            answers, used = uvloop.run(client.run(lanes, meter=meter, timeout_seconds=left))
        except TimeoutError as error:
            raise MeasureError(f"{self.name}, {seed}: {error}, the rest of --seconds") from error
        if errors := [answer.error for answer in answers if answer.error]:
            raise MeasureError(f"{len(errors)} of {len(answers)} failed: {errors[0]}")
        return [1e6 * used.cpu_seconds[each.name] / len(answers) for each in self.servers]


@contextmanager
def _cluster(folder: Path) -> Iterator[tuple[str, list[Server]]]:
    """Run a cluster of masters; yield its URL and its servers."""
    with ExitStack() as stack:
        ports = [_cluster_port() for _ in range(_MASTERS)]
        servers = []
        for number, port in enumerate(ports):
            own = folder / str(number)
            own.mkdir(parents=True)
            command = [redis_server(), "--port", str(port), "--save", "", "--dir", str(own)]
            server = start(
                f"Redis {number + 1}",
                [*command, "--bind", "127.0.0.1", "--cluster-enabled", "yes"],
                folder=own,
                environment={},
            )
            stack.callback(server.stop)
            servers.append(server)
        _divide(ports)
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        yield f"redis://{hosts}?cluster=true", servers


def _cluster_port() -> int:
    while (port := free_port()) >= _PORTS:
        pass
    return port


def _divide(ports: Sequence[int]) -> None:
    """Give each server the same number of slots, and wait until all know each other."""
    time.sleep(1.0)
    bounds = [_SLOTS * number // len(ports) for number in range(len(ports) + 1)]
    clients = [Redis(port=port) for port in ports]
    for each, (first, end) in zip(clients, pairwise(bounds), strict=True):
        each.execute_command("CLUSTER", "ADDSLOTS", *range(first, end))
        clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", ports[clients.index(each)])
    deadline = time.monotonic() + _READY_SECONDS
    while not all(
        b"cluster_state:ok" in (info := each.execute_command("CLUSTER", "INFO"))
        and b"cluster_known_nodes:%d" % len(ports) in info
        for each in clients
    ):
        if time.monotonic() > deadline:
            raise StartError(f"the cluster was not ready after {_READY_SECONDS:.0f} s")
        time.sleep(0.1)


def main() -> None:
    """Measure within a time, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=8, help="of each connection in a round")
    parser.add_argument("--gateways", type=int, default=_MASTERS, help="of each deployment")
    parser.add_argument("--seconds", type=float, default=220.0, help="the run fails after these")
    options = parser.parse_args()
    try:
        deadline = time.monotonic() + options.seconds
        _measure(options.rounds, options.requests, gateways=options.gateways, deadline=deadline)
    except (StartError, MeasureError) as error:
        sys.exit(f"bench.cluster: {error}")


def _measure(rounds: int, requests: int, *, gateways: int, deadline: float) -> None:
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        url, servers = stack.enter_context(_cluster(folder / "servers"))
        systems = []
        for kind in ("one", "cluster"):
            (folder / kind).mkdir()
            settings = {"SLUICE_UNPAID_REQUESTS_PER_MINUTE": "0"}
            if kind == "cluster":
                settings["SLUICE_REDIS_URL"] = url
            sluice = Sluice(folder / kind, settings=settings)
            stack.callback(sluice.close)
            sluice.command("db", "upgrade")
            workers = sluice.start_scripted_workers(_MODELS, _STEP_SECONDS)
            stack.callback(workers.stop)
            own = servers if kind == "cluster" else [sluice.redis]
            systems.append(_System(kind, sluice, own, workers, gateways))
        spent: dict[str, list[list[float]]] = {system.name: [] for system in systems}
        for system in systems:
            system.wait_for_models()
            system.microseconds(1, "warm-up", deadline=deadline)
        for number in range(rounds):
            for system in systems if number % 2 else reversed(systems):
                used = system.microseconds(requests, f"round {number + 1}", deadline=deadline)
                spent[system.name].append(used)
    rows = [
        [
            str(number + 1),
            f"{one[0]:.0f}",
            " / ".join(f"{each:.0f}" for each in several),
            f"{max(several) / one[0]:.2f}",
        ]
        for number, (one, several) in enumerate(zip(spent["one"], spent["cluster"], strict=True))
    ]
    ratios = [
        max(several) / one[0] for one, several in zip(spent["one"], spent["cluster"], strict=True)
    ]
    headings = ["round", "one Redis, us a request", "each of three", "busiest of three / one"]
    text = "\n".join([*table(headings, rows), "", f"Median: {median(ratios):.2f}"])
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
