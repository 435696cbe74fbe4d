"""Logs as JSON: every line of every process parses, and has the right fields."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest

from common import logs
from common.logs import JsonFormatter
from contract.messages import about
from tests.support.processes import free_port, wait_until
from tests.support.secrets import scan_for_secrets
from tests.support.stack import REPOSITORY, Stack
from tests.telemetry.traces.client import ask
from tests.telemetry.traces.test_off import PARENT, job

KEYS = {"time", "level", "logger", "message"}


def lines_of(log: str) -> list[dict[str, Any]]:
    """Return the lines of a log; each must be a JSON object with all required fields."""
    lines = [json.loads(line) for line in log.splitlines()]
    for line in lines:
        assert line.keys() >= KEYS
        assert datetime.fromisoformat(line["time"]).utcoffset() == timedelta(0)
    return lines


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def logger(stream: io.StringIO) -> Iterator[logging.Logger]:
    """A logger that writes only to `stream`."""
    logger = logging.getLogger("sluice.test")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    yield logger
    logger.removeHandler(handler)


def test_line_has_time_level_logger_and_message() -> None:
    # Not propagated: pytest's report of the log could not be encoded.
    record = logging.LogRecord(
        "sluice.test", logging.WARNING, "", 1, "%s said “%s”\n\ud800", ("Ann", 'a "b"'), None
    )
    [of_several] = lines_of(JsonFormatter(2).format(record))
    assert of_several.keys() == {*KEYS, "process"}
    assert of_several["process"] == 2
    [line] = lines_of(JsonFormatter().format(record))
    assert line.keys() == KEYS
    assert line["level"] == "WARNING"
    assert line["logger"] == "sluice.test"
    assert line["message"] == 'Ann said “a "b"”\n\ud800'


def test_exception_is_a_field(logger: logging.Logger, stream: io.StringIO) -> None:
    try:
        raise ValueError("no\nluck")
    except ValueError:
        logger.exception("it failed")
    [line] = lines_of(stream.getvalue())
    assert line["message"] == "it failed"
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: no\nluck")


def test_line_of_a_request_names_it(logger: logging.Logger, stream: io.StringIO) -> None:
    token = logs.request_id.set("req_a")
    logger.info("served")
    logs.request_id.reset(token)
    logger.info("alone")
    served, alone = lines_of(stream.getvalue())
    assert served["request_id"] == "req_a"
    assert alone.keys() == KEYS


def test_line_about_a_job_names_its_request_and_trace(
    logger: logging.Logger, stream: io.StringIO
) -> None:
    logger.error("a", extra=about(job(request_id="req_b", traceparent=PARENT)))
    logger.error("b", extra=about(job()))
    traced, untraced = lines_of(stream.getvalue())
    assert traced["job_id"] == untraced["job_id"] == "cmpl-a-0"
    assert traced["request_id"] == "req_b"
    assert traced["trace_id"] == "a" * 32
    assert untraced.keys() == KEYS | {"job_id"}


def test_warnings_and_uncaught_errors_are_json_lines() -> None:
    code = """
import logging, threading, warnings
from common.logs import LogFormat, configure_logs
configure_logs(LogFormat.JSON, level=logging.INFO)
warnings.warn("beware")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise RuntimeError("the end")
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    beware, thread, end = lines_of(ended.stderr)
    assert "beware" in beware["message"]
    assert "ZeroDivisionError" in thread["exception"]
    assert end["exception"].endswith("RuntimeError: the end")


def test_every_line_of_gateway_and_worker_is_json(stack: Stack) -> None:
    reply = ask(stack, stream=True, headers={"x-request-id": "req_logged"})
    assert reply.chunks
    assert lines_of(stack.log("gateway")) == lines_of(stack.log("gateway"))
    ready = [line for line in lines_of(stack.log("worker")) if " is ready: " in line["message"]]
    assert ready[0]["logger"] == "sluice.ready"
    assert scan_for_secrets({n: stack.log(n) for n in ("gateway", "worker")}, stack.keys) == []


@pytest.mark.parametrize("name", ["beat", "jobs"])
def test_background_processes_log_json(stack: Stack, name: str) -> None:
    # A broker that is unreachable is logged.
    start = stack.start_beat if name == "beat" else stack.start_jobs
    broker = f"redis://127.0.0.1:{free_port()}/0"
    start(SLUICE_LOG_FORMAT="json", SLUICE_CELERY_BROKER_URL=broker)
    try:
        wait_until(lambda: stack.log(name) != "", what=f"a word of {name}")
    finally:
        stack.kill(name)
    assert lines_of(stack.log(name))
    assert {line["level"] for line in lines_of(stack.log(name))} <= {"WARNING", "ERROR", "CRITICAL"}
