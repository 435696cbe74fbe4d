"""The sample of mutants fits the code: a mutant whose line has changed tests nothing."""

from tests.failures.mutants.__main__ import applies, load_sample


def test_sample_fits_the_code() -> None:
    sample = load_sample()
    lost = [f"{each.path}:{each.line}" for each in sample if not applies(each)]
    assert len(lost) <= len(sample) / 10, f"{lost}: run `python -m tests.failures.mutants sample`"
