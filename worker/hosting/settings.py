"""Settings of a worker host: its own, and each model's settings of the worker."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_settings import SettingsConfigDict

from worker.command_line import reasons
from worker.settings import ProcessSettings, WorkerSettings, environment_name

_OF_HOST = (
    "ends_with_input",
    "may_sleep",
    "redis_url",
    "scales_to_zero",
    "start_units",
    "worker_id",
)
"""Settings of a worker that the host decides."""


class HostSettings(ProcessSettings):
    """Settings of a host, from the environment (prefix `SLUICE_HOST_`) or the command line.

    Its workers inherit the environment, so `SLUICE_` variables are settings of every worker.
    """

    model_config = SettingsConfigDict(env_prefix="SLUICE_HOST_")

    models: Path
    """JSON file with a list of the settings of each model's worker, such as `[{"model_path":
    "/models/a"}, {"model_path": "/models/b", "max_sequences": 64}]`."""
    least_seconds: Annotated[float, Field(ge=0)] = 30.0
    """Time for which a model with jobs is served before the host may swap."""
    ratio: Annotated[float, Field(ge=1)] = 2.0
    """The host leaves a model with jobs for one that has this many times as many waiting jobs for
    each worker."""
    longest_wait_seconds: Annotated[float, Field(ge=0)] = 60.0
    """Wait of a request for a model without a worker after which the host swaps to it in any
    case."""
    swap_units: Annotated[float, Field(ge=0)] = 1000.0
    """Service units that the tenant whose job is claimed first after a swap is charged for each
    second of the swap, as last measured. A unit is a prompt token."""
    sleeping_models: Annotated[int, Field(ge=0)] = 0
    """Maximum number of models whose workers sleep beside the one that is served, with their
    weights in the machine's memory; 0 ends the worker at each swap. Needs a GPU."""
    health_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the host's /metrics; 0 opens none."""


class HostedModel(NamedTuple):
    """A model of a host."""

    environment: Mapping[str, str]
    """Of its worker, with that of this process."""
    longest_seconds: float
    """In which its worker returns its jobs, and its engine falls asleep or wakes up."""


def read_models(path: Path) -> dict[str, HostedModel]:
    """Return the models by their names.

    Raises ValueError, naming the model and the setting, for a file that is not valid.
    """
    try:
        models = TypeAdapter(list[dict[str, Any]]).validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValidationError:
        raise ValueError(f"{path} must be a JSON list with an object for each model") from None
    if not models:
        raise ValueError(f"{path} has no model")
    hosted: dict[str, HostedModel] = {}
    for index, fields in enumerate(models):
        if given := sorted(set(fields) & set(_OF_HOST)):
            raise ValueError(f"{path}: model {index}: the host sets {', '.join(given)}")
        try:
            settings = WorkerSettings(**fields)
        except ValidationError as error:
            name, reason = reasons(error, WorkerSettings)[0]
            raise ValueError(
                f"{path}: model {index}: {name + ': ' if name else ''}{reason}"
            ) from None
        if settings.served_name in hosted:
            raise ValueError(f"{path}: model {index}: {settings.served_name} is given twice")
        own = {environment_name(name): _text(value) for name, value in fields.items()}
        longest_seconds = settings.drain_seconds + settings.stall_seconds
        hosted[settings.served_name] = HostedModel({**os.environ, **own}, longest_seconds)
    return hosted


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)
