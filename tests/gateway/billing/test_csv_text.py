"""CSV that can be read back, and that no spreadsheet runs as formulas."""

import csv
import io
from datetime import UTC, datetime

from gateway.billing.usage.schemas import Cell, to_csv
from tests.support.cases import all_cases


def test_rows_round_trip() -> None:
    rows: list[list[Cell]] = [
        ["plain", 5, None],
        ['a "quoted", cell', -5, "two\nlines"],
        ["é", 10**18, datetime(2026, 11, 1, 8, 30, tzinfo=UTC)],
    ]
    text = to_csv(["a", "b", "c"], rows)
    assert list(csv.reader(io.StringIO(text, newline=""))) == [
        ["a", "b", "c"],
        ["plain", "5", ""],
        ['a "quoted", cell', "-5", "two\nlines"],
        ["é", str(10**18), "2026-11-01T08:30:00Z"],
    ]
    assert to_csv(None, [["x"]]) == "x\r\n"


@all_cases("sign", ["=", "+", "-", "@", "\t", "\r"])
def test_text_that_would_be_a_formula_is_quoted(sign: str) -> None:
    formula = f"{sign}cmd|' /C calc'!A1"
    assert list(csv.reader(io.StringIO(to_csv(None, [[formula]]), newline=""))) == [[f"'{formula}"]]
    assert to_csv(None, [[f"a{sign}b"]]).startswith(("a", '"a'))
