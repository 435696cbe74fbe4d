"""The tiny language model that the project ships for demonstrations and end-to-end tests.

``CHECKPOINT`` is a Hugging Face model folder; README.md beside this file says how it was made.
"""

from pathlib import Path

CHECKPOINT: Path = Path(__file__).parent / "checkpoint"
