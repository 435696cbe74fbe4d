"""Effect of one hostile client on other tenants of a gateway: `python -m bench.attacks [NAME...]`.

One client sends the same hostile requests repeatedly from its own process, with a key or without,
while another tenant requests one token at a time. The output shows the other tenant's time to first
token and its rejections. It also shows the memory of the gateway before the attack, at its peak and
after the attack. Goals: p99 under 50 ms, no rejections, and memory back to within 20 %. Where the
attack fills the engine, p99 may be two of its steps above that of the same tenant alone. Each first
token is compared with two steps of the engine: its own, and the one that ran when it arrived.
"""

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import quantiles
from typing import Any, Final
from urllib.parse import urlencode

import click
import httpx

from bench.processes import resident_mib
from bench.sluice import Sluice, running_sluice
from bench.starting import MODEL
from bench.systems import Deployment, Engine, System
from bench.tables import table
from bench.vllm_server import running_vllm_server

ATTACKER: Final = "attacker"
OTHER: Final = "other"
GOAL_MS: Final = 50.0
GOAL_MEMORY: Final = 1.2
BODY_BYTES: Final = 8_000_000
CONTEXT_WINDOW: Final = 2_048
BEGIN_SECONDS: Final = 60.0
"""How long the attacker may take to start; this time is not measured."""
STEP_SECONDS: Final = 0.02
"""Time between two steps of the scripted engine in attacks that fill it."""
GOAL_STEPS: Final = 2
"""First tokens wait for no more steps than this behind a full engine, at p99."""
SLOW_SECONDS: Final = 1.0
"""Pause of a slow reader after each read of up to a kilobyte."""
PAUSE_SECONDS: Final = 0.01
"""Pause between two requests of the other tenant, and after a rejection of the attacker."""
ALONE_SECONDS: Final = 4.0
"""How long the other tenant is measured before the attack."""
FIRST_SECONDS: Final = 1.0
"""How long it sends requests before it is measured: these load what others share."""
_RESPONSE_SECONDS: Final = 120.0
_COMPLETIONS: Final = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Target:
    """What one attacking process attacks."""

    url: str
    keys: list[str]
    """One key of each attacking tenant."""
    has_begun: Event
    """Set it with the first hostile request."""

    @property
    def key(self) -> str:
        """The key of the next connection: tenants take turns."""
        self.keys.append(self.keys.pop(0))
        return self.keys[-1]

    def client(self, *, connections: int) -> httpx.AsyncClient:
        """Return a client that sends an attacker's key."""
        return _client(self.url, self.key, connections=connections)


Work = Callable[[Target], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Attack:
    """One kind of attack."""

    name: str
    run: Work
    """Attacks until it is cancelled."""
    context_window: int = CONTEXT_WINDOW
    engine: Engine = Engine.SCRIPTED
    tenants: int = 1
    """Tenants that attack together."""
    fills: bool = False
    """Whether it fills the engine; the goal is then in steps of the engine."""

    @property
    def deployment(self) -> Deployment:
        """What it attacks."""
        return Deployment(
            engine=self.engine,
            max_sequences=256,
            context_window=self.context_window,
            step_seconds=STEP_SECONDS if self.fills else 0.001,
            times_steps=True,
            gathers=self.fills,
        )


def posts(
    connections: int, bodies: Callable[[], Iterator[bytes]], path: str = _COMPLETIONS
) -> Work:
    """Return an attack whose connections each post `bodies()` in order."""

    async def run(target: Target) -> None:
        async with target.client(connections=connections) as client:

            async def connection() -> None:
                headers = _authorization(target.key)
                for body in bodies():
                    target.has_begun.set()
                    try:
                        response = await client.post(path, content=body, headers=headers)
                        is_refused = response.status_code != httpx.codes.OK
                    except httpx.HTTPError:
                        is_refused = True
                    if is_refused:
                        await asyncio.sleep(PAUSE_SECONDS)

            await asyncio.gather(*(connection() for _ in range(connections)))

    return run


def requests(
    connections: int,
    line: str,
    *headers: str,
    body: bytes = b"",
    has_key: bool = False,
    at_once: int = 1,
) -> Work:
    """Return an attack whose connections repeat one request without a pause.

    Each connection pipelines `at_once` of them.
    """

    async def run(target: Target) -> None:
        content = _head(target, line, f"content-length: {len(body)}", *headers, has_key=has_key)
        content += body

        async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                writer.write(content * at_once)
                target.has_begun.set()
                for _ in range(at_once):
                    head = (await reader.readuntil(b"\r\n\r\n")).lower()
                    size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
                    await reader.readexactly(size)

        await _connected(target, connections, exchange)

    return run


def slow(connections: int, **body: Any) -> Work:
    """Return an attack whose connections read the stream of a completion slowly."""

    async def run(target: Target) -> None:
        content = json.dumps({"model": MODEL} | body).encode()

        async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            length = f"content-length: {len(content)}"
            writer.write(_head(target, f"POST {_COMPLETIONS}", length, _JSON, has_key=True))
            writer.write(content)
            target.has_begun.set()
            while await reader.read(1_024):  # noqa: ASYNC110 - a slow client
                await asyncio.sleep(SLOW_SECONDS)

        await _connected(target, connections, exchange)

    return run


def together(*works: Work) -> Work:
    """Return an attack that does several things at once."""

    async def run(target: Target) -> None:
        await asyncio.gather(*(work(target) for work in works))

    return run


def endless(connections: int, line: str, part: bytes, *, has_key: bool = False) -> Work:
    """Return an attack whose connections send a chunked body that repeats `part` for ever."""

    async def run(target: Target) -> None:
        head = _head(target, line, "transfer-encoding: chunked", has_key=has_key)

        async def exchange(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(head)
            target.has_begun.set()
            while True:
                writer.write(part)
                await writer.drain()

        await _connected(target, connections, exchange)

    return run


def _head(target: Target, line: str, *headers: str, has_key: bool) -> bytes:
    own = (f"authorization: Bearer {target.key}",) if has_key else ()
    return "\r\n".join([f"{line} HTTP/1.1", "host: a", *own, *headers, "", ""]).encode()


async def _connected(
    target: Target,
    connections: int,
    exchange: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> None:
    """Run an exchange on each connection; open one again that the gateway has closed."""
    address = httpx.URL(target.url)

    async def connection() -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
                reader, writer = await asyncio.open_connection(address.host, address.port)
                try:
                    await exchange(reader, writer)
                finally:
                    writer.close()
            await asyncio.sleep(PAUSE_SECONDS)

    await asyncio.gather(*(connection() for _ in range(connections)))


def _same(**body: Any) -> Callable[[], Iterator[bytes]]:
    def bodies() -> Iterator[bytes]:
        return itertools.repeat(json.dumps({"model": MODEL} | body).encode())

    return bodies


def _empty_lists() -> Iterator[bytes]:
    return itertools.repeat(b'{"prompt":[' + b"[]," * (BODY_BYTES // 3) + b"[]]}")


def _members() -> Iterator[bytes]:
    unknown = {str(number): 1 for number in range(700_000)}
    return _same(prompt="a", unknown=unknown)()


def _grammars() -> Iterator[bytes]:
    number = time.monotonic_ns()
    while True:
        number += 1
        regex = f"(a{{1,40}}|b{{1,40}}|{number}){{1,60}}"
        body = {"model": MODEL, "prompt": "a", "structured_outputs": {"regex": regex}}
        yield json.dumps(body).encode()


def _masks() -> Iterator[bytes]:
    """Yield grammars whose masks take milliseconds."""
    for number in itertools.count(time.monotonic_ns()):
        words = " | ".join(f"/[a-z]{{1,{most}}}x{most}q{number}/" for most in range(1, 101))
        outputs = {"grammar": f'start: (word " ")*\nword: {words}'}
        body = {"model": MODEL, "prompt": "a", "max_tokens": 64, "structured_outputs": outputs}
        yield json.dumps(body).encode()


def _schemas() -> Iterator[bytes]:
    for number in itertools.count(time.monotonic_ns()):
        names = [f"p{number}_{index}" for index in range(20)]
        properties = {name: {"type": "string"} for name in names}
        schema = {"type": "object", "properties": properties, "required": names}
        body = {"model": MODEL, "prompt": "a", "structured_outputs": {"json": schema}}
        yield json.dumps(body).encode()


def _long_prompts() -> Iterator[bytes]:
    """Yield text, token ids, and eight texts in one request."""
    prompts = (_LONG_TEXT, list(range(300, 1_800)) * (LONG_TOKENS // 1_500), [_LONG_TEXT] * 8)
    bodies = [{"model": MODEL, "prompt": prompt, "max_tokens": 1} for prompt in prompts]
    return itertools.cycle([json.dumps(body).encode() for body in bodies])


def _cold_prompts() -> Iterator[bytes]:
    """Yield prompts of which nothing is cached, each as if another tenant had sent it."""
    for number in itertools.count(time.monotonic_ns()):
        body = {"model": MODEL, "prompt": [5] * 1_900, "max_tokens": 1, "cache_salt": str(number)}
        yield json.dumps(body).encode()


LONG_TOKENS: Final = 60_000
_LONG_TEXT: Final = "word " * LONG_TOKENS
_PIECES: Final[list[str | int]] = ["a", 5]
_WORDS: Final = "word " * 1_500


@dataclass(slots=True)
class Seen:
    """Observations of the other tenant."""

    first_token_ms: list[float] = field(default_factory=list)
    seen_at: list[float] = field(default_factory=list)
    """When each of them arrived."""
    refused: Counter[int] = field(default_factory=Counter)

    @property
    def p99(self) -> float:
        """Milliseconds; NaN without two first tokens."""
        return _cut(self.first_token_ms, 99)

    def steps_above(self, ms: float, ends: Sequence[float]) -> float:
        """Return how many steps a first token took above so many ms, at p99.

        Two steps are the one that had its token and the one before it, which ran when it arrived.
        """
        above = []
        for each, at in zip(self.first_token_ms, self.seen_at, strict=True):
            last = bisect_right(ends, at) - 1
            above.append(2 * (each - ms) / (1_000 * (ends[last] - ends[last - 2])))
        return _cut(above, 99)

    def row(self) -> str:
        """Return the percentiles as table cells."""
        most = max(self.first_token_ms, default=float("nan"))
        return f"{_cut(self.first_token_ms, 50):.1f} | {self.p99:.1f} | {most:.1f}"


def _cut(some: list[float], percent: int) -> float:
    return quantiles(some, n=100)[percent - 1] if len(some) > 1 else float("nan")


async def _nothing(target: Target) -> None:
    target.has_begun.set()
    await asyncio.Event().wait()


async def _read_again(target: Target) -> None:
    async with target.client(connections=8) as client:
        begun = await client.post(_COMPLETIONS, json={"model": MODEL} | _KEPT)
        kept = f"{_COMPLETIONS}/{begun.raise_for_status().json()['id']}"
        # The engine's own work for it is not the subject of the measurement.
        while True:
            answer = (await client.get(kept)).raise_for_status().json()
            if answer.get("status") not in {"queued", "in_progress"}:
                break
            await asyncio.sleep(1.0)
        path = f"{kept}?stream=true"

        async def reader() -> None:
            target.has_begun.set()
            while True:
                async with client.stream("GET", path) as response:
                    async for _ in response.aiter_raw():
                        pass
                await asyncio.sleep(PAUSE_SECONDS)

        await asyncio.gather(*(reader() for _ in range(8)))


def pages(*paths: str, connections: int = 16, needs_session: bool = False) -> Work:
    """Return an attack whose connections read some pages of a tenant with usage, in turn."""

    async def run(target: Target) -> None:
        async with target.client(connections=connections) as client:
            for _ in range(ROWS // 100):
                await asyncio.gather(*(client.post(_COMPLETIONS, json=_SHORT) for _ in range(100)))
            if needs_session:
                await _log_in(target, client)

            async def connection() -> None:
                for path in itertools.cycle(paths):
                    target.has_begun.set()
                    with contextlib.suppress(httpx.HTTPError):
                        if (await client.get(path)).status_code == httpx.codes.OK:
                            continue
                    await asyncio.sleep(PAUSE_SECONDS)

            await asyncio.gather(*(connection() for _ in range(connections)))

    return run


async def _log_in(target: Target, client: httpx.AsyncClient) -> None:
    """Begin a session of the console; the client keeps its cookie."""
    path, form = "/console/login", {"content-type": "application/x-www-form-urlencoded"}
    shown = (await client.get(path)).text
    csrf = shown.partition('name="csrf" value="')[2].partition('"')[0]
    body = urlencode({"csrf": csrf, "key": target.key, "next": ""})
    await client.post(path, content=body, headers=form)


async def _sessions(target: Target) -> None:
    async def connection() -> None:
        while True:
            async with target.client(connections=1) as client:
                await _log_in(target, client)
                target.has_begun.set()

    await asyncio.gather(*(connection() for _ in range(8)))


async def _list_files(target: Target) -> None:
    async with target.client(connections=8) as client:
        for _ in range(ROWS // 100):
            uploads = [client.post("/v1/files", content=_FILE, headers=_OF_FORM) for _ in range(50)]
            await asyncio.gather(*uploads)
    await pages("/v1/files")(target)


ROWS: Final = 1_000
_SHORT: Final = {"model": MODEL, "prompt": "a", "max_tokens": 1}
_OF_FORM: Final = {"content-type": "multipart/form-data; boundary=b"}
_PART: Final = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
_FILE: Final = (
    _PART + b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n{}\r\n--b--'
)
_PARTS: Final = _PART * (16 * 2**20 // len(_PART))
_MULTIPART: Final = f"content-type: {_OF_FORM['content-type']}"
_STREAM: Final = {"prompt": "a", "max_tokens": 2_000, "stream": True, "ignore_eos": True}
_CHAT: Final = [{"role": "user", "content": "word " * 18_000}]
_KEPT: Final = {"prompt": "a", "n": 128, "logprobs": 20, "max_tokens": 200, "background": True}
_BYTES: Final = b"1\r\nx\r\n" * 40_000
_FORM: Final = "content-type: application/x-www-form-urlencoded"
_JSON: Final = "content-type: application/json"
_LARGE: Final = tuple(f"x-{number}: {'a' * 600}" for number in range(80))

_FILLING: Final = {
    "groups": posts(3, _same(**_STREAM, n=128)),
    "more-groups": posts(12, _same(**_STREAM, n=128)),
    "small-groups": posts(60, _same(**_STREAM, n=16)),
    "streams": posts(300, _same(**_STREAM)),
    "slow-readers": slow(60, **_STREAM, n=8),
}
"""Attacks that hold every sequence of the engine."""
_FILLING["everything"] = together(*_FILLING.values())

ATTACKS: Final = (
    Attack("alone", _nothing),
    Attack("lists", posts(2, _empty_lists)),
    Attack("members", posts(2, _members)),
    Attack("pieces", posts(12, _same(prompt=_PIECES * 300_000))),
    Attack("text", posts(3, _same(prompt="a b c\n" * (BODY_BYTES // 7)))),
    Attack("texts", posts(8, _same(prompt="a b c\n" * (BODY_BYTES // 7)))),
    Attack("chat", posts(12, _same(messages=_CHAT, max_tokens=1), "/v1/chat/completions")),
    Attack("grammars", posts(70, _grammars)),
    Attack("background", posts(4, _same(prompt=[_WORDS] * 1_000, background=True, max_tokens=1))),
    Attack("long", posts(16, _long_prompts), context_window=65_536),
    Attack("readers", _read_again),
    Attack("prompts", posts(4, _same(prompt=["a b"] * 1_024, max_tokens=1))),
    Attack("ids", posts(8, _same(prompt=[5] * 262_000))),
    Attack("uploads", requests(4, "POST /v1/files", _MULTIPART, body=_PARTS, has_key=True)),
    Attack("files", _list_files),
    Attack("usage", pages("/v1/usage", "/v1/usage/latency", "/v1/usage/requests?limit=1000")),
    Attack("console", pages("/console", "/console/usage", "/console/requests", needs_session=True)),
    Attack("exports", pages("/console/usage.csv", "/console/requests.csv", needs_session=True)),
    Attack("sessions", _sessions),
    *(
        Attack(f"{prefix}{name}{suffix}", work, engine=engine, tenants=tenants, fills=True)
        for prefix, engine in (("", Engine.SCRIPTED), ("engine-", Engine.VLLM))
        for suffix, tenants in (("", 1), ("-of-ten", 10))
        for name, work in _FILLING.items()
    ),
    Attack("engine-alone", _nothing, engine=Engine.VLLM),
    Attack("engine-plain", posts(70, _same(prompt="a")), engine=Engine.VLLM),
    Attack("engine-prompts", posts(32, _cold_prompts), engine=Engine.VLLM),
    Attack("engine-grammars", posts(70, _grammars), engine=Engine.VLLM),
    Attack("engine-masks", posts(70, _masks), engine=Engine.VLLM),
    Attack("engine-schemas", posts(64, _schemas), engine=Engine.VLLM),
    # Without a key, except those that say so.
    Attack("chunks-1", endless(1, "POST /nope", _BYTES)),
    Attack("chunks-4", endless(4, "POST /nope", _BYTES)),
    Attack("chunks-64", endless(64, "POST /nope", _BYTES)),
    Attack("chunks-get", endless(4, "GET /healthz", _BYTES)),
    Attack("chunks-login", endless(4, "POST /console/login", _BYTES)),
    Attack("chunks-anonymous", endless(4, f"POST {_COMPLETIONS}", _BYTES)),
    Attack("chunks-key", endless(4, f"POST {_COMPLETIONS}", _BYTES, has_key=True)),
    Attack("openapi", requests(4, "GET /openapi.json")),
    Attack("openapi-pipelined", requests(8, "GET /openapi.json", at_once=8)),
    Attack("logins", requests(16, "POST /console/login", _FORM, body=b"key=sk-wrong")),
    Attack("login-page", requests(32, "GET /console/login")),
    Attack("gets", requests(64, "GET /healthz")),
    Attack("headers", requests(32, "GET /healthz", *_LARGE)),
    Attack("bad-keys", requests(64, "GET /v1/models", "authorization: Bearer sk-wrong")),
    Attack("rejected", requests(64, f"POST {_COMPLETIONS}", _JSON, body=b"{}", has_key=True)),
    Attack("models", requests(64, "GET /v1/models", has_key=True)),
)
_BY_NAME: Final = {attack.name: attack for attack in ATTACKS}


def attack(name: str, target: Target) -> None:
    """Attack until this process is terminated."""
    # Real attackers use their own machines, so their work must not take processors from the
    # deployment. A process of a low priority would keep one for the rest of its time slice.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

    async def run() -> None:
        await _BY_NAME[name].run(target)

    asyncio.run(run())


def _client(url: str, key: str, *, connections: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url,
        headers={
            **_authorization(key),
            "content-type": "application/json",
            "x-api-dialect": "vllm",
        },
        timeout=_RESPONSE_SECONDS,
        limits=httpx.Limits(max_connections=connections),
    )


def _authorization(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


async def ask(url: str, key: str, *, seconds: float, look: Callable[[], None]) -> Seen:
    """Request one token at a time, and call `look` in between."""
    seen, end = Seen(), time.monotonic() + seconds
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 1, "stream": True}
    async with _client(url, key, connections=1) as client:
        while time.monotonic() < end:
            began = time.perf_counter()
            async with client.stream("POST", _COMPLETIONS, json=body) as response:
                async for received in response.aiter_raw():
                    # Not a keep-alive, which has only the beginning of an event.
                    if b"\n\n" not in received:
                        continue
                    if response.status_code == httpx.codes.OK:
                        seen.seen_at.append(time.perf_counter())
                        seen.first_token_ms.append(1000 * (seen.seen_at[-1] - began))
                    break
            if response.status_code != httpx.codes.OK:
                seen.refused[response.status_code] += 1
            look()
            await asyncio.sleep(PAUSE_SECONDS)
    return seen


def measure(system: System, attack_: Attack, *, seconds: float, after_seconds: float) -> bool:
    """Attack a system, print a table row, and return whether the goals were met."""
    name = attack_.name
    (url,) = system.urls(1)
    (gateway,) = next(iter(system.groups(1).values()))
    own = [system.key(f"{ATTACKER}-{number}") for number in range(attack_.tenants)]
    other = system.key(OTHER)
    most = 0.0

    def look() -> None:
        nonlocal most
        most = max(most, resident_mib(gateway))

    asyncio.run(ask(url, other, seconds=FIRST_SECONDS, look=look))
    alone = asyncio.run(ask(url, other, seconds=ALONE_SECONDS, look=look))
    before = most = resident_mib(gateway)
    context = multiprocessing.get_context("spawn")
    has_begun = context.Event()
    process = context.Process(target=attack, args=(name, Target(url, own, has_begun)))
    process.start()
    try:
        if not has_begun.wait(BEGIN_SECONDS):
            raise click.ClickException(f"the attack did not start: {name}")
        began = time.perf_counter()
        seen = asyncio.run(ask(url, other, seconds=seconds, look=look))
        ended = time.perf_counter()
    finally:
        process.kill()
        process.join()
    time.sleep(after_seconds)
    after = resident_mib(gateway)
    refused = sum(seen.refused.values())
    title = name if system.name == Sluice.name else f"{name}, {system.name}"
    step_ms = above = float("nan")
    if isinstance(system, Sluice):
        ends = system.step_ends()
        above = seen.steps_above(alone.p99, ends)
        step_ms = 1_000 * (ended - began) / (bisect_right(ends, ended) - bisect_right(ends, began))
    click.echo(
        f"| {title} | {alone.p99:.1f} | {step_ms:.0f} | {seen.row()} | {above:.1f} "
        f"| {refused} | {before:.0f} | {most:.0f} | {after:.0f} |"
    )
    # NaN, if it saw no two first tokens, is no success.
    is_early = above < GOAL_STEPS if attack_.fills else seen.p99 < GOAL_MS
    return is_early and not refused and after < before * GOAL_MEMORY


@contextlib.contextmanager
def _systems(
    deployment: Deployment, settings: Mapping[str, str], *, has_vllm: bool, has_unpreempted: bool
) -> Iterator[list[System]]:
    """Run Sluice, and the systems beside it."""
    with contextlib.ExitStack() as stack:

        def folder() -> Path:
            return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-bench-")))

        systems: list[System] = [
            stack.enter_context(running_sluice(deployment, folder(), settings=settings))
        ]
        if has_unpreempted:
            off = {**settings, "SLUICE_PREEMPTED_SHARE": "0"}
            systems.append(
                stack.enter_context(
                    running_sluice(deployment, folder(), name="without preemption", settings=off)
                )
            )
        if has_vllm:
            systems.append(stack.enter_context(running_vllm_server(deployment, folder())))
        yield systems


@click.command("attacks")
@click.argument("names", nargs=-1, type=click.Choice(list(_BY_NAME)))
@click.option("--seconds", default=20.0, show_default=True, help="Length of each attack.")
@click.option(
    "--after",
    default=20.0,
    show_default=True,
    help="Seconds after an attack until its memory must be free. Accepted requests have ended by "
    "then.",
)
@click.option(
    "--unlimited",
    is_flag=True,
    help="Measure what rejected requests cost without the limit that a key has for them.",
)
@click.option(
    "--beside-vllm",
    is_flag=True,
    help="Attack vLLM's own server with each attack on vLLM, too.",
)
@click.option(
    "--beside-unpreempted",
    is_flag=True,
    help="Attack a deployment without preemption, too.",
)
def main(
    *,
    names: tuple[str, ...],
    seconds: float,
    after: float,
    unlimited: bool,
    beside_vllm: bool,
    beside_unpreempted: bool,
) -> None:
    """Attack a gateway with all attacks or with the named ones."""
    settings = {"SLUICE_UNPAID_REQUESTS_PER_MINUTE": "0"} if unlimited else {}
    columns = (
        *("alone p99", "step ms", "p50 ms", "p99 ms", "most ms", "p99 steps above", "refused"),
        *("MiB before", "most", "after"),
    )
    click.echo("\n".join(table(("attack", *columns), ())))
    missed = []
    for name in names or _BY_NAME:
        deployment = _BY_NAME[name].deployment
        has_vllm = beside_vllm and deployment.engine is Engine.VLLM
        with _systems(
            deployment, settings, has_vllm=has_vllm, has_unpreempted=beside_unpreempted
        ) as systems:
            for system in systems:
                is_met = measure(system, _BY_NAME[name], seconds=seconds, after_seconds=after)
                if not is_met and system is systems[0]:
                    missed.append(name)
    if missed:
        raise click.ClickException(f"goals missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
