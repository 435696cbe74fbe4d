"""Workers of several models in one process: `python -m bench.scripted_workers MODEL ...`.

Each has a scripted engine. The settings are those of a worker, from the environment.
"""

import asyncio
import sys
from functools import partial

import uvloop

from common.metrics import begin_metrics
from worker.main import make_engine, serve
from worker.settings import WorkerSettings


async def _serve_all(models: list[str]) -> None:
    """Run the workers until one of them ends, which gets the signals of the process."""
    workers = []
    for model in models:
        settings = WorkerSettings(model_name=model, worker_id=f"worker-of-{model}")
        workers.append(asyncio.create_task(serve(settings, partial(make_engine, settings))))
    await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)


def main() -> None:
    """Run a worker for each model."""
    begin_metrics("worker")
    uvloop.run(_serve_all(sys.argv[1:]))


if __name__ == "__main__":
    main()
