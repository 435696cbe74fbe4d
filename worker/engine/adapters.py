"""The adapters that an engine can load, from the settings of its worker."""

from pathlib import Path

from worker.engine.base import AdapterLimits
from worker.model_files import adapter_modules
from worker.settings import WorkerSettings


def adapter_limits(settings: WorkerSettings) -> AdapterLimits | None:
    """Return which adapters the engine can load; None if it runs the base model only."""
    if not settings.adapter_slots:
        return None
    return AdapterLimits(
        settings.adapter_slots,
        settings.loaded_adapters or settings.adapter_slots,
        settings.max_adapter_rank,
        adapter_modules(Path(settings.model_path)),
    )
