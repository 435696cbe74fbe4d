"""The worker's command line: `python -m worker`. Environment variables can set every option."""

from worker.command_line import settings_command
from worker.main import run
from worker.settings import WorkerSettings

command = settings_command(
    "worker",
    WorkerSettings,
    run,
    description="Run a worker: claim jobs of one model from Redis, run them in batches, and reply.",
)

if __name__ == "__main__":
    command(prog_name="python -m worker")
