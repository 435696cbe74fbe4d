"""Batches that run while everything fails, and what each of their lines must have received."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import httpx

from tests.failures.chaos.history import Behaviour, Ending, History
from tests.failures.chaos.judge import Violation
from tests.failures.chaos.recipes import Recipe
from tests.failures.proofs.ledger import Row

MOST_LINES: Final = 500
"""Of one batch, so that files are uploaded, validated and completed all the time."""
PATIENCE_SECONDS: Final = 1_500.0
"""Time limit in which all batches must end."""
PAUSE_SECONDS: Final = 0.5
REFUSED_EVERY: Final = 25
"""One of so many lines has an invalid parameter."""
ENDED: Final = ("completed", "failed", "expired", "cancelled")
COME_AGAIN: Final = (429, 503)


@dataclass(slots=True)
class Batches:
    """Clients that each run one batch after the other, some for each tenant and endpoint.

    Args:
        gateways: base URLs.
        keys: API keys by tenant.
        recipes: the requests of the lines.
        lines: lines of all batches together.
    """

    gateways: Sequence[str]
    keys: Mapping[str, str]
    recipes: Sequence[Recipe]
    lines: int
    histories: list[History] = field(default_factory=list)
    """The lines."""
    violations: list[Violation] = field(default_factory=list)
    ended: int = 0
    """Number of batches that have ended."""
    is_over: bool = False
    _numbers: Iterator[int] = field(default_factory=count)

    async def run(self) -> None:
        """Run all batches to their ends, and compare their results."""
        paths = sorted({recipe.path for recipe in self.recipes})
        owners = [(tenant, path) for tenant in sorted(self.keys) for path in paths]
        lines = [
            self.lines // len(owners) + (number < self.lines % len(owners))
            for number in range(len(owners))
        ]
        try:
            async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as tasks:
                for (tenant, path), own in zip(owners, lines, strict=True):
                    tasks.create_task(self._run_some(tenant, path, own))
        except TimeoutError:
            self.violations.append(Violation("ends", "the batches did not end"))
        finally:
            self.is_over = True

    async def _run_some(self, tenant: str, path: str, lines: int) -> None:
        """Run batches of a tenant for one endpoint, one after the other."""
        recipes = [recipe for recipe in self.recipes if recipe.path == path]
        for start in range(0, lines, MOST_LINES):
            number = next(self._numbers)
            chosen = [
                recipes[line % len(recipes)]
                for line in range(start, min(start + MOST_LINES, lines))
            ]
            client = _Client(self.gateways, self.keys[tenant], number)
            batch = _Batch(client, tenant, path, chosen)
            try:
                await batch.run()
            finally:
                self.histories += batch.histories
                self.violations += batch.violations
            self.ended += 1

    def judge_rows(self, rows: Sequence[Row]) -> list[Violation]:
        """Return the differences between the lines and the rows of the tier batch."""
        lines = {each.request_id: each for each in self.histories if each.request_id}
        own: dict[str, list[Row]] = {}
        for row in rows:
            if row["service_tier"] == "batch":
                own.setdefault(row["request_id"].partition(".")[0], []).append(row)
        return [
            Violation("one record", _shown(some, has_line=name in lines), lines.get(name))
            for name, some in own.items()
            if name not in lines or len(some) > 1
        ]


class _Batch:
    """One batch."""

    def __init__(
        self, client: "_Client", tenant: str, path: str, recipes: Sequence[Recipe]
    ) -> None:
        self.histories = [
            History(number, recipe.name, Behaviour.LINE, tenant)
            for number, recipe in enumerate(recipes)
        ]
        self.violations: list[Violation] = []
        self._client = client
        self._path = path
        self._recipes = recipes

    async def run(self) -> None:
        """Upload the lines, create a batch, wait for its end, and compare the results."""
        input_id = await self._client.upload(b"".join(map(self._line, range(len(self._recipes)))))
        batch_id = await self._client.create(input_id, self._path)
        batch = await self._client.ended(batch_id)
        lines = [
            json.loads(line)
            for name in ("output_file_id", "error_file_id")
            if batch[name] is not None
            for line in (await self._client.content(batch[name])).splitlines()
        ]
        for line in lines:
            self._read(line)
        self._check(batch, lines)
        # Files of ended batches would only fill the disk.
        for name in ("input_file_id", "output_file_id", "error_file_id"):
            if batch[name] is not None:
                await self._client.delete(batch[name])

    def _line(self, number: int) -> bytes:
        body = self._recipes[number].body_of(stream=False)
        if _is_refused(number):
            body["temperature"] = -1
        line = {"custom_id": str(number), "method": "POST", "url": self._path, "body": body}
        return json.dumps(line).encode() + b"\n"

    def _read(self, line: dict[str, Any]) -> None:
        number = int(line["custom_id"])
        history, response = self.histories[number], line["response"]
        if history.ending is not Ending.UNFINISHED:
            history.add_error("it has two results")
            return
        status = 0 if response is None else response["status_code"]
        history.note(f"status {status}, {line['error']}")
        if status == 400 and _is_refused(number):
            history.end(Ending.DENIED)
            return
        if status != 200:
            history.add_error(f"its result is {json.dumps(line)[:500]}")
            history.end(Ending.FAILED)
            return
        history.identify({"id": response["request_id"]})
        history.identify(response["body"])
        history.transcript.add(response["body"])
        history.transcript.is_done = True
        history.end(Ending.COMPLETE)
        if difference := history.transcript.difference(self._recipes[number].expected[False]):
            history.add_error(difference)

    def _check(self, batch: dict[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        refused = sum(map(_is_refused, range(len(self._recipes))))
        served = [
            recipe.expected[False].usage or {}
            for number, recipe in enumerate(self._recipes)
            if not _is_refused(number)
        ]
        expected = {
            "status": "completed",
            "lines": len(self._recipes),
            "counts": {
                "total": len(self._recipes),
                "completed": len(served),
                "failed": refused,
            },
            "input_tokens": sum(each["prompt_tokens"] for each in served),
            "output_tokens": sum(each["completion_tokens"] for each in served),
        }
        found = {
            "status": batch["status"],
            "lines": len(lines),
            "counts": batch["request_counts"],
            "input_tokens": batch["usage"]["input_tokens"],
            "output_tokens": batch["usage"]["output_tokens"],
        }
        self.violations += [
            Violation("right answers", f"{batch['id']}: {name} is {found[name]}, not {value}")
            for name, value in expected.items()
            if found[name] != value
        ]
        for history in self.histories:
            if history.ending is Ending.UNFINISHED:
                history.end(Ending.HUNG)


class _Client:
    """Sends each request until a gateway responds."""

    def __init__(self, gateways: Sequence[str], key: str, turn: int) -> None:
        self._gateways = gateways
        self._headers = {"authorization": f"Bearer {key}"}
        self._turn = turn

    async def upload(self, content: bytes) -> str:
        form: dict[str, Any] = {
            "files": {"file": ("input.jsonl", content)},
            "data": {"purpose": "batch"},
        }
        while (response := await self._send("POST", "/v1/files", **form)) is None:
            pass
        return str(response.json()["id"])

    async def create(self, file_id: str, path: str) -> str:
        body = {"input_file_id": file_id, "endpoint": path, "completion_window": "24h"}
        while True:
            if (response := await self._send("POST", "/v1/batches", json=body)) is not None:
                return str(response.json()["id"])
            # A connection may break after the gateway has created the batch.
            batches = (await self._get("/v1/batches?limit=100")).json()["data"]
            for batch in batches:
                if batch["input_file_id"] == file_id:
                    return str(batch["id"])

    async def ended(self, batch_id: str) -> dict[str, Any]:
        while True:
            batch: dict[str, Any] = (await self._get(f"/v1/batches/{batch_id}")).json()
            if batch["status"] in ENDED:
                return batch
            await asyncio.sleep(PAUSE_SECONDS)

    async def content(self, file_id: str) -> str:
        return (await self._get(f"/v1/files/{file_id}/content")).text

    async def delete(self, file_id: str) -> None:
        # It is gone if the connection broke after it was deleted.
        while await self._send("DELETE", f"/v1/files/{file_id}", may_miss=True) is None:
            pass

    async def _get(self, path: str) -> httpx.Response:
        while (response := await self._send("GET", path)) is None:
            pass
        return response

    async def _send(
        self, method: str, path: str, *, may_miss: bool = False, **request: Any
    ) -> httpx.Response | None:
        """Return a successful response; None if the next gateway should be asked."""
        url = self._gateways[self._turn % len(self._gateways)]
        try:
            async with httpx.AsyncClient(base_url=url, headers=self._headers, timeout=30) as client:
                response = await client.request(method, path, **request)
        except (httpx.TransportError, AttributeError):
            # anyio raises AttributeError if a connection breaks as soon as it is open.
            response = None
        if response is not None and (
            response.status_code == 200 or (may_miss and response.status_code == 404)
        ):
            return response
        if response is not None:
            assert response.status_code in COME_AGAIN, f"{method} {path}: {response.text}"
        self._turn += 1
        await asyncio.sleep(PAUSE_SECONDS)
        return None


def _shown(rows: Sequence[Row], *, has_line: bool) -> str:
    outcomes = [f"{row['outcome']} {row['code']}".strip() for row in rows]
    members = ("request_id", "completion_tokens", "cost_micros", "created_at", "gateway")
    details = [{name: row.get(name) for name in members} for row in rows]
    return f"{outcomes} of {'one line' if has_line else 'no line'}: {details}"


def _is_refused(number: int) -> bool:
    return number % REFUSED_EVERY == REFUSED_EVERY - 1
