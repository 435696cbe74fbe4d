"""The monitor detects stalls of the machine, and nothing else."""

import os
import signal
import sys
from pathlib import Path
from subprocess import PIPE, Popen

PROGRAM = """
import sys
from pathlib import Path
from tests.failures.chaos.machine import watched_machine

with watched_machine(Path(sys.argv[1])) as found:
    print("watching", flush=True)
    sys.stdin.readline()
print(*[each.ended - each.began for each in found])
"""


def test_stall_of_the_machine_is_detected(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as watcher:
        assert watcher.stdin is not None
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == "watching\n"
        # Simulates a stall: another process measures the two seconds.
        os.kill(watcher.pid, signal.SIGSTOP)
        with Popen(["sleep", "2"]) as sleeper:
            sleeper.wait()
        os.kill(watcher.pid, signal.SIGCONT)
        reported, _ = watcher.communicate("over\n")
    assert watcher.returncode == 0
    assert max(map(float, reported.split())) > 1.8
