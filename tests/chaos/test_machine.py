"""The watcher of the machine notices what holds up every process, and nothing else."""

import os
import signal
import sys
from pathlib import Path
from subprocess import PIPE, Popen

PROGRAM = """
import sys
from pathlib import Path
from tests.chaos.machine import watched_machine

with watched_machine(Path(sys.argv[1])) as found:
    print("watching", flush=True)
    sys.stdin.readline()
print(*[each.ended - each.began for each in found])
"""


def test_time_in_which_nothing_runs_is_noticed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as watcher:
        assert watcher.stdin is not None
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == "watching\n"
        # As if nothing ran: another process is what tells two seconds.
        os.kill(watcher.pid, signal.SIGSTOP)
        with Popen(["sleep", "2"]) as sleeper:
            sleeper.wait()
        os.kill(watcher.pid, signal.SIGCONT)
        reported, _ = watcher.communicate("over\n")
    assert watcher.returncode == 0
    assert max(map(float, reported.split())) > 1.8
