"""Startup sequence of `sluice up`: start each process, wait until it is ready, stop in order."""

import asyncio
import shlex
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import click
import httpx
import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.tasks import unless
from gateway.accounts.keys.service import KeyService
from gateway.accounts.tenants.service import TenantService
from gateway.auth.api_key import ApiKey
from gateway.auth.authenticator import Authenticator
from gateway.auth.sessions import KeyLogin, make_link
from gateway.cli.launch.launch_plan import LOOPBACK, LaunchPlan
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.concurrency.tether import adopt_orphans
from gateway.platform.database import schema
from gateway.platform.database.engine import Database
from gateway.platform.env_file import EnvFile, LiveEnvFile
from gateway.platform.redis_client import connect, converting_errors, describe
from gateway.platform.settings import COMMANDS_FILE
from gateway.process.supervision.supervisor import ChildSpec, Supervisor
from gateway.records.errors import ApiError, NotFoundError, StartupError
from gateway.records.scopes import DEFAULT_SCOPES, Scope

TENANT_ID: Final = "demo"
DEMO_FILE: Final = "demo.env"


class DemoKeys(NamedTuple):
    """The keys, or None where there is none."""

    key: str | None
    """Uses the models."""
    admin_key: str | None
    """Manages the tenant and, as an operator, every tenant."""


class ConsoleLinks(NamedTuple):
    """Links that log in once, as paths."""

    customers: str
    operators: str


async def prepare_keys(database_url: str, redis_url: str, earlier: DemoKeys) -> tuple[str, str]:
    """Return the keys of the demo tenant: earlier ones if they still work, else new ones."""
    database = Database(database_url)
    redis = connect(redis_url, max_connections=1)
    announcer = ChangeAnnouncer(redis)
    try:
        await _ensure_tenant(TenantService(database, announcer))
        keys = KeyService(database, announcer)

        async def prepare(key: str | None, name: str, scopes: frozenset[Scope]) -> str:
            if key is not None and await _works(database, key, scopes):
                return key
            return (await keys.create(TENANT_ID, name=name, scopes=scopes)).key.reveal()

        return (
            await prepare(earlier.key, "sluice up", DEFAULT_SCOPES),
            await prepare(earlier.admin_key, "sluice up, for the console", frozenset(Scope)),
        )
    finally:
        await redis.aclose()
        await database.aclose()


async def make_console_links(redis_url: str, admin_key: str) -> ConsoleLinks:
    """Return links with which a browser logs in to each console, once. Raises RedisError."""
    key = ApiKey.parse(admin_key)
    login = KeyLogin(key.prefix, key.digest())
    redis = connect(redis_url, max_connections=1)
    try:
        return ConsoleLinks(*[await make_link(redis, login) for _ in ConsoleLinks._fields])
    finally:
        await redis.aclose()


async def _works(database: Database, key: str, scopes: frozenset[Scope]) -> bool:
    authenticator = Authenticator(database, verifier=None, ttl_seconds=0, max_entries=1)
    try:
        principal = await authenticator.authenticate(f"Bearer {key}")
    except ApiError:
        return False
    is_whole = principal.tenant_id == TENANT_ID and principal.allowed_models is None
    return is_whole and scopes <= principal.scopes


async def _ensure_tenant(tenants: TenantService) -> None:
    try:
        await tenants.get(TENANT_ID)
    except NotFoundError:
        await tenants.create("Demo", tenant_id=TENANT_ID)


SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REDIS_SECONDS: Final = 15.0
"""How long a new Redis server may take to respond."""
REMINDER_SECONDS: Final = 15.0
"""Interval of the message that the model is still loading."""

REQUEST_TIMEOUT_SECONDS: Final = 10.0
POLL_SECONDS: Final = 0.2
COMPLETIONS_PATH: Final = "/v1/completions"
_AUDIO: Final = "/v1/audio/"
DEMO_PRICE: Final = {
    "prompt_micros": 150_000,
    "cached_micros": 50_000,
    "completion_micros": 600_000,
}
BATCH_SCRIPT: Final = r"""cd "$(dirname "$0")" && . ./demo.env
FILE=$(curl -sS "$SLUICE_URL/v1/files" -H "Authorization: Bearer $SLUICE_KEY" \
  -F purpose=batch -F file=@batch.jsonl | grep -o "file-[0-9a-f]*")
curl -sS "$SLUICE_URL/v1/batches" -H "Authorization: Bearer $SLUICE_KEY" \
  -H "Content-Type: application/json" \
  -d "{\"input_file_id\": \"$FILE\", \"completion_window\": \"24h\", \"endpoint\": \"PATH\"}"
"""

T = TypeVar("T")


class BringUp:
    """One run of `sluice up`."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._demo = EnvFile(plan.folder / DEMO_FILE)
        """The only place that stores the demo key."""
        self._commands = LiveEnvFile(plan.folder / COMMANDS_FILE.name)
        self._started_at = time.monotonic()
        self._stop_asked = asyncio.Event()

    async def run(self) -> None:
        """Start everything, and stop it on a signal or if a process does not start."""
        supervisor = Supervisor(self._report)
        adopt_orphans()
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, supervisor)
        try:
            await unless(self._stop_asked, self._serve(supervisor))
        finally:
            self._stop_asked.set()
            # The ports refuse connections as soon as the gateways have closed them too.
            self._plan.close_sockets()
            await supervisor.stop()
            self._commands.remove()
        self._report("All processes have stopped.")

    def _on_signal(self, supervisor: Supervisor) -> None:
        if self._stop_asked.is_set():
            supervisor.kill()
            return
        self._stop_asked.set()
        self._report("Stopping (Ctrl-C again to stop at once) ...")

    async def _serve(self, supervisor: Supervisor) -> None:
        earlier = self._demo.read()
        # The file exists only while its key is valid.
        self._demo.remove()
        keys = DemoKeys(earlier.get("SLUICE_KEY"), earlier.get("SLUICE_ADMIN_KEY"))
        starting = self._start(supervisor, keys)
        await supervisor.while_alive(asyncio.create_task(starting))
        supervisor.settle()
        await asyncio.Event().wait()

    async def _start(self, supervisor: Supervisor, earlier: DemoKeys) -> None:
        plan = self._plan
        for spec in (*plan.jobs, *plan.gateways, *plan.workers):
            _clear_log(spec)
        await self._start_redis(supervisor)
        await schema.upgrade(plan.database_url)
        self._commands.write(plan.command_variables)
        # Start this before everything that creates usage, so that it stops later and Redis still
        # runs.
        await supervisor.start(plan.jobs)
        # The worker takes longest, so do not delay it for the others.
        self._report(f"Loading the model {plan.model_name} (about half a minute on a CPU) ...")
        await supervisor.start(plan.workers)
        key, admin_key = await prepare_keys(plan.database_url, plan.redis_url, earlier)
        self._report("The database is ready, with a demo tenant and its keys.")
        await supervisor.start(plan.gateways)
        for port in plan.ports:
            await wait_until_ready(port)
            self._report(f"A gateway is ready on port {port}.")
        path = await self._wait_for_model(key)
        if plan.adapters is not None:
            await furnish(plan.operator_ports[0], admin_key, plan.model_name, plan.adapters)
        links = await make_console_links(plan.redis_url, admin_key)
        self._finish(key, admin_key, path, links)

    async def _start_redis(self, supervisor: Supervisor) -> None:
        if self._plan.redis is not None:
            _clear_log(self._plan.redis)
            await supervisor.start([self._plan.redis])
        redis = connect(self._plan.redis_url, max_connections=1)
        try:
            with converting_errors(redis):
                await _ping(redis, 0.0 if self._plan.redis is None else REDIS_SECONDS)
        finally:
            await redis.aclose()
        kind = "existing server" if self._plan.redis is None else "new server"
        self._report(f"{describe(redis)} is ready ({kind}).")

    async def _wait_for_model(self, key: str) -> str:
        """Return a path at which all gateways serve the model."""
        path = ""
        reminding = asyncio.create_task(self._remind())
        try:
            for port in self._plan.ports:
                path = await wait_until_serving(port, key, self._plan.model_name)
        finally:
            reminding.cancel()
        return path

    async def _remind(self) -> None:
        while True:
            await asyncio.sleep(REMINDER_SECONDS)
            self._report(f"Still loading the model. Log: {self._plan.workers[0].log}")

    def _finish(self, key: str, admin_key: str, path: str, links: ConsoleLinks) -> None:
        model = self._plan.model_name
        url = f"http://{LOOPBACK}:{self._plan.ports[0]}"
        operators = f"http://{LOOPBACK}:{self._plan.operator_ports[0]}"
        self._demo.write(
            {
                "SLUICE_URL": url,
                "SLUICE_KEY": key,
                "SLUICE_MODEL": model,
                "SLUICE_ADMIN_KEY": admin_key,
                "SLUICE_OPERATOR_URL": operators,
            }
        )
        if path.startswith(_AUDIO):
            trial, batch = _curl_form(url + path, key, model), ""
        else:
            trial = _curl_line(url + path, key, _trial(path, model, 40))
            batch = self._write_batch(path)
        self._report("Everything is ready. Ctrl-C stops it.")
        _echo(
            f"\n  Base URL   {url}/v1\n  API key    {key}\n  Model      {model}\n"
            f"  Operators  {operators} (metrics, Admin API)\n"
            f"  Files      {self._plan.folder} (demo.env with these values, logs)\n\n"
            "Open the console in a browser. Each link logs in once, within an hour; "
            f"`{_program()} console link` prints new ones:\n\n"
            f"  For customers  {url}{links.customers}\n"
            f"  For operators  {operators}{links.operators}\n\n"
            f"Try it:\n\n{trial}\n\n"
            "Manage it in another terminal, from this folder:\n\n"
            f"{_program()} keys create --tenant {TENANT_ID} --name second\n{batch}"
        )

    def _write_batch(self, path: str) -> str:
        """Write a batch for an endpoint and a script that runs it; return how to start it."""
        folder = self._plan.folder
        (folder / "batch.jsonl").write_bytes(_batch(path, self._plan.model_name))
        script = folder / "batch.sh"
        script.write_text(BATCH_SCRIPT.replace("PATH", path))
        return (
            f"\nRun a batch there, which the console then shows:\n\nsh {shlex.quote(str(script))}\n"
        )

    def _report(self, text: str) -> None:
        _echo(f"[{time.monotonic() - self._started_at:5.1f} s] {text}")


def _clear_log(spec: ChildSpec) -> None:
    if spec.log is not None:
        spec.log.write_bytes(b"")


def _echo(text: str) -> None:
    try:
        click.echo(text)
    except OSError:
        # The terminal is gone, but running processes must still be stopped in order.
        return


async def furnish(port: int, admin_key: str, model: str, adapters: Mapping[str, str]) -> None:
    """Add what a demo of the model needs and lacks: a price, the alias `demo`, and adapters.

    Args:
        port: The operators' port of a gateway.
        admin_key: A key with the scope `admin`.
        model: The model's name.
        adapters: Folders of adapters by name, for the demo tenant. Background jobs validate them.
    """

    async def call(method: str, path: str, body: Any = None) -> Any:
        async def send() -> Any:
            status, reply = await _request(port, method, f"/admin/{path}", key=admin_key, body=body)
            return reply if status not in (0, 503) else None

        return await _until(send)

    if not (await call("GET", f"prices?model={model}"))["data"]:
        await call("POST", "prices", {"model": model, **DEMO_PRICE})
    if model not in (await call("GET", "aliases/demo")).get("weights", ()):
        await call("PUT", "aliases/demo", {"weights": {model: 1}})
    for name, folder in adapters.items():
        # Status 409 if it is registered.
        body = {"name": name, "base_model": model, "source": folder}
        await call("POST", f"tenants/{TENANT_ID}/adapters", body)


def _batch(path: str, model: str) -> bytes:
    """Return a file with a request of a batch in each line."""
    lines = [
        {"custom_id": text, "method": "POST", "url": path, "body": _trial(path, model, 20, text)}
        for text in ("The capital of France is", "The quick brown fox", "1, 2, 3, 4,")
    ]
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def _curl_line(url: str, key: str, body: dict[str, Any]) -> str:
    return (
        f"curl {url} -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' "
        f"-d {shlex.quote(msgspec.json.encode(body).decode())}"
    )


def _curl_form(url: str, key: str, model: str) -> str:
    return (
        f"curl {url} -H 'Authorization: Bearer {key}' -F {shlex.quote(f'model={model}')} "
        "-F file=@speech.mp3"
    )


def _program() -> str:
    """Return the command line as the user started it, such as `.venv/bin/sluice`."""
    started = sys.argv[0]
    return shlex.quote(started) if Path(started).name == "sluice" else "sluice"


async def _ping(redis: Redis, patience_seconds: float) -> None:
    """Return once Redis responds. Raises the last error of Redis after a time."""
    end = time.monotonic() + patience_seconds
    while True:
        try:
            await redis.ping()
        except (RedisError, OSError):
            if time.monotonic() >= end:
                raise
            await asyncio.sleep(POLL_SECONDS)
        else:
            return


async def wait_until_ready(port: int) -> None:
    """Return once the gateway's /readyz returns 200."""
    await _until(lambda: _is_ready(port))


async def wait_until_serving(port: int, key: str, model: str) -> str:
    """Return a path at which the gateway serves the model.

    It has served a request there, unless it needs audio.
    """
    # Requests before that are rejected, and would count as failures on the status page.
    path = await _until(lambda: _served_path(port, key, model))
    if not path.startswith(_AUDIO):
        await _until(lambda: _serves(port, key, path, model))
    return path


async def _until(find: Callable[[], Awaitable[T]]) -> T:
    """Return the first result that is true."""
    while True:
        if found := await find():
            return found
        await asyncio.sleep(POLL_SECONDS)


async def _is_ready(port: int) -> bool:
    return (await _request(port, "GET", "/readyz"))[0] == 200


async def _served_path(port: int, key: str, model: str) -> str:
    """Return the path of the first endpoint that serves a model; empty if no worker is ready."""
    status, reply = await _request(port, "GET", "/v1/models", key=key)
    if status in (401, 403):
        raise StartupError(f"The demo key is rejected with status {status}: {_text(reply)}")
    if status != 200 or not isinstance(reply, dict):
        return ""
    models = {each["id"]: each for each in reply.get("data", [])}
    found = models.get(model, {})
    return str(found["endpoints"][0]) if found.get("ready") else ""


def _trial(
    path: str, model: str, max_tokens: int, text: str = "Once upon a time"
) -> dict[str, Any]:
    """Return a request to try an endpoint."""
    if path == COMPLETIONS_PATH:
        return {"model": model, "prompt": text, "max_tokens": max_tokens}
    return {"model": model, "input": text}


async def _serves(port: int, key: str, path: str, model: str) -> bool:
    status, reply = await _request(port, "POST", path, key=key, body=_trial(path, model, 1))
    # The worker may end again, or be busy.
    if status not in (0, 200, 404, 503):
        raise StartupError(f"A trial request failed with status {status}: {_text(reply)}")
    return status == 200


async def _request(
    port: int, method: str, path: str, *, key: str = "", body: Any = None
) -> tuple[int, Any]:
    """Return status and decoded body; status 0 if there is no response in JSON."""
    url, headers = f"http://{LOOPBACK}:{port}{path}", {"Authorization": f"Bearer {key}"}
    # A proxy of the environment is for other machines.
    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_SECONDS, trust_env=False) as client:
        try:
            response = await client.request(method, url, headers=headers if key else {}, json=body)
            return response.status_code, response.json()
        except (httpx.HTTPError, ValueError):
            return 0, None


def _text(reply: Any) -> str:
    try:
        return str(reply["error"]["message"])
    except (KeyError, TypeError):
        return "no explanation"
