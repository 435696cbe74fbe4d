"""Run a fixed sample of small faults (mutants) against the tests, and report which ones they
detect.

Commands of `python -m tests.failures.mutants`:

sample                     replace the mutants whose lines have changed by others of their part
run --map FILE --out FILE  test the mutants with the tests that reach them
table FILE [FILE]          a Markdown table of one or two results

`run` changes one line of the working tree at a time, so run it in a separate clone. It reads from a
coverage file with contexts (`pytest --contexts`) which tests execute the changed line. Tests of Lua
scripts and of code that only other processes execute are found by folder (`REACHES`).
"""

import argparse
import ast
import json
import random
import re
import sqlite3
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from coverage.numbits import numbits_to_nums

ROOT = Path(__file__).parents[3]
SAMPLE = Path(__file__).with_name("sample.json")
SEED = 15
SHARES = {
    "common/*.py": 13,
    "contract/*.py": 7,
    "contract/scripts/*.lua": 22,
    "gateway/limits/*.py": 18,
    "gateway/limits/scripts/*.lua": 20,
    "gateway/completions/queue/*.py": 18,
    "gateway/completions/rendering/*.py": 16,
    "gateway/completions/stored/*.py": 18,
    "gateway/auth/*.py": 14,
    "worker/**/*.py": 24,
}
"""How many mutants each part of the code has in the sample."""
LEFT_OUT = ("/settings.py",)

_OF_REQUESTS = ("tests/gateway/completions", "tests/gateway/http", "tests/gateway/dialects")
REACHES = {
    "common/": ("tests/common", "tests/telemetry"),
    "contract/": ("tests/contract", "tests/worker", *_OF_REQUESTS),
    "gateway/limits/": ("tests/gateway/limits", "tests/gateway/jobs", *_OF_REQUESTS),
    "gateway/completions/": _OF_REQUESTS,
    "gateway/auth/": ("tests/gateway/auth", *_OF_REQUESTS),
    "worker/": ("tests/worker",),
}
"""Folders whose tests reach a part in this process; the first prefix that fits counts."""

FIRST_SECONDS = 60.0
"""Predicted time of the most specific tests, which run first."""
HANG_SECONDS = 900.0

_NO_BEHAVIOUR = ("@dataclass", "msgspec.Struct", "logger.", "_log.", "assert ")

_SWAPS: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.And: "or", ast.Or: "and",
}  # fmt: skip
_SYMBOLS: dict[type[ast.AST], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.In: "in", ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not",
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.And: "and", ast.Or: "or",
}  # fmt: skip
_LUA_SWAPS = (
    (" <= ", " < "), (" >= ", " > "), (" < ", " <= "), (" > ", " >= "), (" == ", " ~= "),
    (" ~= ", " == "), (" + ", " - "), (" - ", " + "), (" * ", " + "), (" and ", " or "),
    (" or ", " and "), ("not ", ""), ("math.min(", "math.max("), ("math.max(", "math.min("),
    ("true", "false"), ("false", "true"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed line."""

    path: str
    line: int
    """The line when the sample was drawn, from 1."""
    source: str
    mutated: str


@dataclass(slots=True)
class Verdict:
    """The result of a mutant."""

    mutant: Mutant
    killer: str = ""
    """The test that detected it; empty if none did."""
    tests: int = 0
    """How many tests were selected."""
    seconds: float = 0.0
    tiers: list[str] = field(default_factory=list)


# --- the sample ---------------------------------------------------------------------------------


def draw(earlier: Sequence[Mutant]) -> list[Mutant]:
    """Draw the sample: a fixed number of mutants of each part, at most one of a line.

    Keeps those of an earlier sample whose lines are still there.
    """
    chosen: list[Mutant] = []
    for pattern, count in SHARES.items():
        rng = random.Random(f"{SEED} {pattern}")
        by_line: dict[tuple[str, str], list[Mutant]] = defaultdict(list)
        for file in sorted(ROOT.glob(pattern)):
            path = file.relative_to(ROOT).as_posix()
            if not any(part in path for part in LEFT_OUT):
                for mutant in mutants_of(path):
                    by_line[path, mutant.source].append(mutant)
        kept = [each for each in earlier if (each.path, each.source) in by_line][:count]
        for mutant in kept:
            del by_line[mutant.path, mutant.source]
        lines = rng.sample(sorted(by_line), min(count - len(kept), len(by_line)))
        drawn = [*kept, *(rng.choice(by_line[line]) for line in lines)]
        chosen += sorted(drawn, key=lambda mutant: (mutant.path, mutant.line))
    return chosen


def applies(mutant: Mutant) -> bool:
    """Whether the code still has the line of a mutant."""
    file = ROOT / mutant.path
    return file.is_file() and mutant.source in file.read_text().splitlines()


def mutants_of(path: str) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    text = (ROOT / path).read_text()
    lines = text.splitlines()
    edits = _lua_edits(lines) if path.endswith(".lua") else _python_edits(text, lines)
    for number, mutated in edits:
        source = lines[number - 1]
        if mutated != source and not any(word in source for word in _NO_BEHAVIOUR):
            yield Mutant(path, number, source, mutated)


def _python_edits(text: str, lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.expr | ast.stmt) or node.lineno != node.end_lineno:
            continue
        number = node.lineno
        line = lines[number - 1]
        if not line.isascii():
            continue
        for begin, end, new in _replacements(node, line):
            yield number, line[:begin] + new + line[end:]


def _replacements(node: ast.AST, line: str) -> Iterator[tuple[int, int, str]]:
    """Yield the spans of a line that can be replaced, with their replacements."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield from _swap(line, op, left, right)
        case ast.BinOp(left=left, op=op, right=right):
            yield from _swap(line, op, left, right)
        case ast.BoolOp(op=op, values=[left, right, *_]):
            yield from _swap(line, op, left, right)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node.col_offset, operand.col_offset, ""
        case ast.Constant(value=bool(value)):
            yield node.col_offset, node.end_col_offset or 0, str(not value)
        case ast.Constant(value=int(number)):
            yield node.col_offset, node.end_col_offset or 0, str(number + 1)
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            yield value.col_offset, value.end_col_offset or 0, "None"
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield node.col_offset, node.end_col_offset or 0, "pass"
        case ast.AugAssign(op=ast.Add()):
            yield from ((at, at + 2, "-=") for at in [line.find("+=")] if at >= 0)
        case _:
            pass


def _swap(
    line: str, op: ast.AST, left: ast.expr, right: ast.expr
) -> Iterator[tuple[int, int, str]]:
    if type(op) in _SWAPS:
        symbol = _SYMBOLS[type(op)]
        at = line.find(symbol, left.end_col_offset or 0, right.col_offset)
        if at >= 0:
            yield at, at + len(symbol), _SWAPS[type(op)]


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _lua_edits(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(lines, start=1):
        code = line.partition("--")[0]
        for old, new in _LUA_SWAPS:
            if (at := code.find(old)) >= 0:
                yield number, line[:at] + new + line[at + len(old) :]
        for match in re.finditer(r"(?<![\w.'\"\[])(\d+)(?![\w'\"])", code):
            yield number, line[: match.start()] + str(int(match[1]) + 1) + line[match.end() :]
        if re.fullmatch(r"\s*(redis\.)?call\(.*\)\s*", code):
            yield number, "-- " + line


# --- which tests reach a mutant -----------------------------------------------------------------


class Map:
    """The tests that execute each line, from a coverage file with contexts, and their durations."""

    def __init__(self, file: Path, times: Path | None) -> None:
        self._database = sqlite3.connect(file)
        self._files = {
            Path(path).as_posix().split("/", 1)[-1]: number
            for number, path in self._database.execute("SELECT id, path FROM file")
        }
        self._contexts: dict[int, str] = dict(
            self._database.execute("SELECT id, context FROM context")
        )
        self._breadth = Counter[str]()
        for context, bits in self._database.execute("SELECT context_id, numbits FROM line_bits"):
            self._breadth[self._test(context)] += len(numbits_to_nums(bits))
        self.seconds: dict[str, float] = defaultdict(float)
        for line in times.read_text().splitlines() if times else ():
            test, _, _, _, seconds, *_ = json.loads(line)
            self.seconds[test] += seconds

    def tests_of(self, path: str, line: int) -> list[str]:
        """Return the tests that execute a line, those that execute the fewest other lines first."""
        rows = [
            row
            for file, number in self._files.items()
            if file.endswith(path)
            for row in self._database.execute(
                "SELECT context_id, numbits FROM line_bits WHERE file_id = ?", (number,)
            )
        ]
        tests = {self._test(context) for context, bits in rows if line in numbits_to_nums(bits)}
        return sorted(tests - {""}, key=lambda test: (self._breadth[test], test))

    def predicted(self, test: str) -> float:
        """Return the expected duration of a test, in seconds."""
        return self.seconds.get(test, 0.2)

    def _test(self, context: int) -> str:
        return self._contexts[context].rpartition("|")[0]


# --- running ------------------------------------------------------------------------------------


def judge(mutant: Mutant, reached: Map, arguments: Sequence[str]) -> Verdict:
    """Run the tests that reach a mutant until one of them detects it."""
    verdict = Verdict(mutant)
    began = time.monotonic()
    file = ROOT / mutant.path
    original = file.read_text()
    tests = reached.tests_of(mutant.path, mutant.line)
    first, spent = list[str](), 0.0
    for test in tests:
        if spent < FIRST_SECONDS:
            first.append(test)
            spent += reached.predicted(test)
    folders = next(paths for prefix, paths in REACHES.items() if mutant.path.startswith(prefix))
    tiers: list[tuple[str, Sequence[str]]] = [
        ("specific", first),
        ("reaching", tests[len(first) :]),
    ]
    if len(tests) < 5 or mutant.path.endswith(".lua"):
        tiers += [(folder, [folder]) for folder in folders]
    try:
        file.write_text(_apply(original, mutant))
        for name, selection in tiers:
            if selection and not verdict.killer:
                verdict.tiers.append(name)
                verdict.tests += len(selection)
                verdict.killer = _killer(selection, arguments)
    finally:
        file.write_text(original)
    verdict.seconds = round(time.monotonic() - began, 1)
    return verdict


def _apply(text: str, mutant: Mutant) -> str:
    lines = text.splitlines(keepends=True)
    places = [n for n, line in enumerate(lines, start=1) if line.rstrip("\n") == mutant.source]
    if not places:
        raise LookupError(f"{mutant.path} has no line {mutant.source!r}")
    place = min(places, key=lambda number: abs(number - mutant.line))
    lines[place - 1] = mutant.mutated + "\n"
    return "".join(lines)


def _killer(selection: Sequence[str], arguments: Sequence[str]) -> str:
    """Return the first test that fails, and fails again alone; empty if all pass."""
    failed = _first_failure(selection, arguments)
    if failed and "::" in failed and len(selection) > 1:
        return (
            failed
            if _first_failure([failed], arguments)
            else _killer(
                [each for each in selection if each != failed and "::" in each] or [failed],
                arguments,
            )
        )
    return failed


def _first_failure(selection: Sequence[str], arguments: Sequence[str]) -> str:
    listing = ROOT / ".mutant-tests"
    listing.write_text("\n".join(selection))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    try:
        result = subprocess.run(
            [*command, f"@{listing}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "(hangs)"
    finally:
        listing.unlink()
    if result.returncode in (0, 5):
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (\S+?)(?: - .*)?$", result.stdout, re.MULTILINE)
    return found[1] if found else f"(pytest ends with {result.returncode})"


# --- reports ------------------------------------------------------------------------------------


def table(results: Sequence[dict[Mutant, str]], names: Sequence[str]) -> str:
    """Return a Markdown table: mutants of each part, and how many each result's tests detected."""
    parts = {mutant: _part(mutant) for mutant in results[0]}
    lines = [f"| part | mutants | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for part in dict.fromkeys(parts.values()):
        mine = [mutant for mutant, its in parts.items() if its == part]
        killed = [sum(bool(result[mutant]) for mutant in mine) for result in results]
        lines.append(f"| `{part}` | {len(mine)} | {' | '.join(map(str, killed))} |")
    totals = [sum(map(bool, result.values())) for result in results]
    lines.append(f"| all | {len(parts)} | {' | '.join(map(str, totals))} |")
    return "\n".join(lines)


def _part(mutant: Mutant) -> str:
    suffix = Path(mutant.path).suffix
    folder = "/".join(mutant.path.split("/")[: 1 if not mutant.path.startswith("gateway") else 2])
    return f"{folder}/{'**/' if folder == 'worker' else ''}*{suffix}"


def load_sample() -> list[Mutant]:
    """Return the sample that is in the repository."""
    return [Mutant(**each) for each in json.loads(SAMPLE.read_text())]


def load_result(file: Path) -> dict[Mutant, str]:
    """Return which test detected each mutant."""
    rows = map(json.loads, file.read_text().splitlines())
    return {Mutant(**row["mutant"]): row["killer"] for row in rows}


def run(options: argparse.Namespace, mutants: Iterable[Mutant]) -> None:
    """Test mutants one by one; append each verdict to the output, and skip those that are there."""
    reached = Map(options.map, options.times)
    known = load_result(options.out) if options.out.exists() else {}
    for number, mutant in enumerate(mutants, start=1):
        if mutant in known:
            continue
        verdict = judge(mutant, reached, options.arguments)
        with options.out.open("a") as out:
            out.write(json.dumps(asdict(verdict)) + "\n")
        state = f"killed by {verdict.killer}" if verdict.killer else "SURVIVED"
        place = f"{number}: {mutant.path}:{mutant.line}"
        print(f"{place} {state} ({verdict.seconds} s)", flush=True)  # noqa: T201


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("sample")
    running = verbs.add_parser("run")
    running.add_argument("--map", type=Path, required=True, help="coverage file with contexts")
    running.add_argument("--times", type=Path, help="durations of tests, as JSON lines")
    running.add_argument("--out", type=Path, required=True, help="verdicts, as JSON lines")
    running.add_argument("arguments", nargs="*", help="further arguments of pytest")
    verbs.add_parser("table").add_argument("results", type=Path, nargs="+")
    options = parser.parse_args()
    if options.verb == "sample":
        drawn = [asdict(each) for each in draw(load_sample())]
        SAMPLE.write_text(json.dumps(drawn, indent=1) + "\n")
    elif options.verb == "run":
        run(options, load_sample())
    else:
        results = [load_result(file) for file in options.results]
        print(table(results, [file.stem for file in options.results]))  # noqa: T201


if __name__ == "__main__":
    main()
