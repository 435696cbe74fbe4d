"""Every process verifies the certificate of Redis before it sends its password."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.certificates import self_signed
from tests.support.processes import free_port, wait_until
from tests.support.redis_server import SYSTEM, Encryption, RedisServer
from tests.support.stack import Stack, running_stack

LOGIN = "u:hidden@"
ROLES = ("gateway", "worker", "jobs", "beat", "command")

Launch = Callable[..., Stack]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Start Redis with TLS, and every role with a login and the options of a URL."""
    if SYSTEM is None:
        pytest.skip("redis-server of the system (Debian's redis-server package) is not installed")
    with ExitStack() as stacks:

        def start(login: str, options: str, host: str = "localhost") -> Stack:
            self_signed("localhost", tmp_path)
            encryption = Encryption(free_port(), tmp_path / "server.pem")
            server = RedisServer(str(SYSTEM), options=encryption.options)
            stack = stacks.enter_context(running_stack(redis=server))
            query = options.format(file=encryption.file)
            url = f"rediss://{login}{host}:{encryption.port}/0?{query}"
            stack.environment["SLUICE_REDIS_URL"] = url
            # Celery has no cluster.
            stack.environment["SLUICE_CELERY_BROKER_URL"] = url.replace("cluster=true", "")
            stack.launch_gateway("gateway", port=free_port())
            stack.launch_worker(environment={"SLUICE_ENGINE": "scripted"})
            stack.start_jobs()
            stack.start_beat()
            listing = [sys.executable, "-m", stack.program, "models", "list"]
            stack._start("command", listing, {})
            return stack

        yield start


def _await_line(stack: Stack, role: str, text: str) -> None:
    wait_until(lambda: text in stack.log(role), what=f"{role} reporting {text}")


def _has_received(stack: Stack, command: str) -> bool:
    assert isinstance(stack.redis, RedisServer)
    return f"cmdstat_{command}:" in stack.redis.command("INFO commandstats").decode()


@pytest.mark.parametrize(
    ("options", "host", "cause"),
    [
        ("", "localhost", "self-signed certificate"),
        ("ssl_ca_certs={file}", "127.0.0.1", "IP address mismatch"),
        pytest.param(
            "cluster=true", "localhost", "self-signed certificate", marks=pytest.mark.slow
        ),
    ],
)
def test_no_role_sends_its_password_to_a_server_that_it_cannot_verify(
    launch: Launch, options: str, host: str, cause: str
) -> None:
    stack = launch(LOGIN, options, host)
    for role in ROLES:
        _await_line(stack, role, cause)
    assert not _has_received(stack, "hello")
    assert not _has_received(stack, "auth")


def test_every_role_warns_of_a_server_that_the_operator_lets_it_trust(launch: Launch) -> None:
    stack = launch("", "ssl_cert_reqs=none")
    for role in ROLES:
        _await_line(stack, role, "ssl_cert_reqs=none: Redis at localhost:")
    for role in ROLES[:-1]:
        _await_line(stack, role, f"sluice.ready: sluice {role} {version('sluice')} is ready: ")
        (line,) = (each for each in stack.log(role).splitlines() if " is ready: " in each)
        assert "; Redis at localhost:" in line
    for command in ("lpush", "brpop"):  # The scheduler sends runs, and the worker takes them.
        wait_until(partial(_has_received, stack, command), what=f"{command} of Celery")
