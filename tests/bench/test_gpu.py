"""The benchmark of a GPU: what it reads from the driver, and a short form on the CPU."""

import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.gpu_usage import mean_percent
from bench.random_model import write_model
from bench.starting import REPOSITORY


def test_utilization_is_the_mean_of_the_lines_with_a_number() -> None:
    assert mean_percent("90 %\n[N/A]\n\n100 %\n") == 95.0
    assert mean_percent("") is None


def test_every_token_of_a_random_model_has_a_text(tmp_path: Path) -> None:
    folder = write_model("small", tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 128_256
    assert tokenizer.decode([128_255]).strip() == "w128255"


@pytest.mark.long
@pytest.mark.timeout(1800)  # It takes nine minutes on two idle cores.
def test_short_form_measures_every_part_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "gpu", "--quick", "--results", str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    report = next(tmp_path.glob("*.md")).read_text()
    for part in ("gpu throughput", "gpu latency", "samplers", "sleep", "canary", "resumption"):
        assert part in report
