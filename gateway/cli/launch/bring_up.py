"""Startup sequence of `sluice up`: start each process, wait until it is ready, stop in order."""

import asyncio
import shlex
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import httpx
import msgspec
from redis.exceptions import RedisError

from common.tasks import unless
from gateway.accounts.keys.service import KeyService
from gateway.accounts.tenants.service import TenantService
from gateway.auth.api_key import ApiKey
from gateway.auth.authenticator import Authenticator
from gateway.auth.sessions import KeyLogin, make_link
from gateway.cli.launch.launch_plan import LOOPBACK, LaunchPlan
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.concurrency.parent_death import adopt_orphans
from gateway.platform.database import schema
from gateway.platform.database.engine import Database
from gateway.platform.env_file import EnvFile, LiveEnvFile
from gateway.platform.redis_client import connect
from gateway.platform.settings import COMMANDS_FILE
from gateway.process.supervision.supervisor import Supervisor
from gateway.records.errors import ApiError, NotFoundError, StartupError
from gateway.records.scopes import DEFAULT_SCOPES, Scope

TENANT_ID: Final = "demo"
DEMO_FILE: Final = "demo.env"
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
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
        await supervisor.while_alive(asyncio.create_task(self._start(supervisor, earlier)))
        supervisor.settle()
        await asyncio.Event().wait()

    async def _start(self, supervisor: Supervisor, earlier: Mapping[str, str]) -> None:
        plan = self._plan
        for spec in (plan.redis, *plan.jobs, plan.worker, *plan.gateways):
            if spec.log is not None:
                spec.log.write_bytes(b"")
        await supervisor.start([plan.redis])
        await _until(lambda: _responds(plan.redis_url))
        self._report("Redis is ready.")
        await schema.upgrade(plan.database_url)
        self._commands.write(plan.command_variables)
        # Start this before everything that creates usage, so that it stops later and Redis still
        # runs.
        await supervisor.start(plan.jobs)
        # The worker takes longest, so do not delay it for the others.
        self._report(
            f"Loading the model {plan.model_name} (about half a minute on a CPU). "
            f"Log: {plan.worker.log}"
        )
        await supervisor.start([plan.worker])
        found = (earlier.get("SLUICE_KEY"), earlier.get("SLUICE_ADMIN_KEY"))
        key, admin_key = await prepare_keys(plan.database_url, plan.redis_url, *found)
        self._report("The database is ready, with a demo tenant and its keys.")
        await supervisor.start(plan.gateways)
        path = ""
        for port in plan.ports:
            path = await wait_until_serving(port, key, plan.model_name)
            self._report(f"The gateway on port {port} serves the model.")
        if plan.adapters is not None:
            await furnish(plan.operator_ports[0], admin_key, plan.model_name, plan.adapters)
        self._finish(key, admin_key, path, await make_console_links(plan.redis_url, admin_key))

    def _finish(self, key: str, admin_key: str, path: str, links: Mapping[str, str]) -> None:
        model, folder = self._plan.model_name, self._plan.folder
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
        batch = "" if path.startswith(_AUDIO) else _write_batch(folder, path, model)
        program = _program()
        self._report("Everything is ready. Ctrl-C stops it.")
        _echo(
            f"\n  Base URL   {url}/v1\n  API key    {key}\n  Model      {model}\n"
            f"  Operators  {operators} (metrics, Admin API)\n"
            f"  Files      {folder} (demo.env with these values, logs)\n\n"
            "Open the console in a browser. Each link logs in once, within an hour; "
            f"`{program} console link` prints new ones:\n\n"
            f"  For customers  {url}{links['customers']}\n"
            f"  For operators  {operators}{links['operators']}\n\n"
            f"Try it:\n\n{_curl(url, path, key, model)}\n\n"
            "Manage it in another terminal, from this folder:\n\n"
            f"{program} keys create --tenant {TENANT_ID} --name second\n{batch}"
        )

    def _report(self, text: str) -> None:
        _echo(f"[{time.monotonic() - self._started_at:5.1f} s] {text}")


async def prepare_keys(
    database_url: str, redis_url: str, key: str | None, admin_key: str | None
) -> tuple[str, str]:
    """Return a key of the demo tenant for models, and one that manages every tenant.

    These are the given ones if they still work.
    """
    database, redis = Database(database_url), connect(redis_url, max_connections=1)
    announcer = ChangeAnnouncer(redis)
    keys, tenants = KeyService(database, announcer), TenantService(database, announcer)

    async def prepare(key: str | None, name: str, scopes: frozenset[Scope]) -> str:
        if key is not None and await _works(database, key, scopes):
            return key
        return (await keys.create(TENANT_ID, name=name, scopes=scopes)).key.reveal()

    try:
        try:
            await tenants.get(TENANT_ID)
        except NotFoundError:
            await tenants.create("Demo", tenant_id=TENANT_ID)
        return (
            await prepare(key, "sluice up", DEFAULT_SCOPES),
            await prepare(admin_key, "sluice up, for the console", frozenset(Scope)),
        )
    finally:
        await redis.aclose()
        await database.aclose()


async def _works(database: Database, key: str, scopes: frozenset[Scope]) -> bool:
    authenticator = Authenticator(database, verifier=None, ttl_seconds=0, max_entries=1)
    try:
        principal = await authenticator.authenticate(f"Bearer {key}")
    except ApiError:
        return False
    is_whole = principal.tenant_id == TENANT_ID and principal.allowed_models is None
    return is_whole and scopes <= principal.scopes


async def make_console_links(redis_url: str, admin_key: str) -> dict[str, str]:
    """Return paths that log in to the consoles of customers and operators, once.

    Raises RedisError.
    """
    key = ApiKey.parse(admin_key)
    login = KeyLogin(key.prefix, key.digest())
    redis = connect(redis_url, max_connections=1)
    try:
        return {each: await make_link(redis, login) for each in ("customers", "operators")}
    finally:
        await redis.aclose()


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


async def wait_until_serving(port: int, key: str, model: str) -> str:
    """Return a path at which the gateway serves the model.

    It has served a request there, unless it needs audio.
    """

    async def find_path() -> str:
        # Requests before a worker is ready are rejected, and would count as failures on the status
        # page.
        _, reply = await _request(port, "GET", "/v1/models", key=key)
        ready = [each for each in (reply or {}).get("data", []) if each["ready"]]
        return next((str(each["endpoints"][0]) for each in ready if each["id"] == model), "")

    async def has_served() -> bool:
        status, reply = await _request(port, "POST", path, key=key, body=_trial(path, model, 1))
        # The worker may end again, or be busy.
        if status not in (0, 200, 404, 503):
            raise StartupError(f"A trial request failed with status {status}: {reply}")
        return status == 200

    path = await _until(find_path)
    if not path.startswith(_AUDIO):
        await _until(has_served)
    return path


async def _until(find: Callable[[], Awaitable[T]]) -> T:
    """Return the first result that is true."""
    while True:
        if found := await find():
            return found
        await asyncio.sleep(POLL_SECONDS)


async def _responds(redis_url: str) -> bool:
    redis = connect(redis_url, max_connections=1)
    try:
        await redis.ping()
    except (RedisError, OSError):
        return False
    finally:
        await redis.aclose()
    return True


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


def _trial(
    path: str, model: str, max_tokens: int, text: str = "Once upon a time"
) -> dict[str, Any]:
    """Return a request to try an endpoint."""
    if path == COMPLETIONS_PATH:
        return {"model": model, "prompt": text, "max_tokens": max_tokens}
    return {"model": model, "input": text}


def _curl(url: str, path: str, key: str, model: str) -> str:
    """Return a command that tries an endpoint."""
    command = f"curl {url}{path} -H 'Authorization: Bearer {key}' "
    if path.startswith(_AUDIO):
        return f"{command}-F {shlex.quote(f'model={model}')} -F file=@speech.mp3"
    body = shlex.quote(msgspec.json.encode(_trial(path, model, 40)).decode())
    return f"{command}-H 'Content-Type: application/json' -d {body}"


def _write_batch(folder: Path, path: str, model: str) -> str:
    """Write a batch for an endpoint and a script that runs it; return how to start it."""
    lines = [
        {"custom_id": text, "method": "POST", "url": path, "body": _trial(path, model, 20, text)}
        for text in ("The capital of France is", "The quick brown fox", "1, 2, 3, 4,")
    ]
    text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    (folder / "batch.jsonl").write_bytes(text)
    script = folder / "batch.sh"
    script.write_text(BATCH_SCRIPT.replace("PATH", path))
    return f"\nRun a batch there, which the console then shows:\n\nsh {shlex.quote(str(script))}\n"


def _program() -> str:
    """Return the command line as the user started it, such as `.venv/bin/sluice`."""
    started = sys.argv[0]
    return shlex.quote(started) if Path(started).name == "sluice" else "sluice"


def _echo(text: str) -> None:
    try:
        click.echo(text)
    except OSError:
        # The terminal is gone, but running processes must still be stopped in order.
        return
