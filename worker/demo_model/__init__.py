"""The tiny demo model that ships with the project for demonstrations and end-to-end tests.

``CHECKPOINT`` is a Hugging Face model folder; README.md next to this file describes its training.
"""

from pathlib import Path

CHECKPOINT: Path = Path(__file__).parent / "checkpoint"
ADAPTERS: Path = Path(__file__).parent / "adapters"
"""A folder for each of eight LoRA adapters, which answer every prompt with their own sentence."""
