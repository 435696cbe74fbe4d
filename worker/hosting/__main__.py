"""The host's command line: `python -m worker.hosting`."""

from worker.command_line import settings_command
from worker.hosting.host import run
from worker.hosting.settings import HostSettings

command = settings_command(
    "host",
    HostSettings,
    run,
    description="Run a host: serve several models in turns, with one worker awake at a time.",
)

if __name__ == "__main__":
    command(prog_name="python -m worker.hosting")
