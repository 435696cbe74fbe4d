"""Programs that end with whoever started them."""

import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.processes import spawn, stop


def test_program_outlives_the_thread_that_asked_for_it() -> None:
    with ThreadPoolExecutor(1) as short_lived:
        program = short_lived.submit(spawn, "sleep", "60").result()
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(1)
    finally:
        stop(program)
