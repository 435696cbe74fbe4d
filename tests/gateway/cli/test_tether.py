"""Programs that end with the process that started them."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.processes import spawn, stop, wait_until


def test_program_outlives_the_thread_that_started_it() -> None:
    def start() -> "subprocess.Popen[bytes]":
        program = spawn("sleep", "60")
        words = Path(f"/proc/{program.pid}/cmdline")
        wait_until(lambda: words.read_bytes().startswith(b"sleep"), what="the start")
        return program

    with ThreadPoolExecutor(1) as short_lived:
        program = short_lived.submit(start).result()
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(1)
    finally:
        stop(program)
