"""Delivery of webhook events: signed, to public addresses only, retried for a day."""

import asyncio
import base64
import hashlib
import hmac
import json
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr
from redis.asyncio import Redis
from sqlalchemy import select, update

from gateway.accounts.projects.service import ProjectService
from gateway.accounts.spend_alerts import SpendAlertService
from gateway.accounts.tenants.service import TenantService
from gateway.accounts.webhooks.secret_box import SecretBox
from gateway.accounts.webhooks.service import EventName, WebhookService, add_events, make_event
from gateway.billing.alerts import SPEND_LIMIT_KIND
from gateway.jobs import webhooks as webhooks_module
from gateway.jobs.mail import Mailer
from gateway.jobs.outbound import DeliveryError, Outbound
from gateway.jobs.spend_alerts import send_spend_alerts
from gateway.jobs.webhooks import WebhookSender, signature
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import WebhookEventRow, WebhookRow
from gateway.platform.settings import Settings
from gateway.records.errors import InvalidParameterError
from gateway.records.records import Webhook
from gateway.records.times import utc_now
from tests.support.certificates import self_signed
from tests.support.kinds import every_database
from tests.support.ledger import use
from tests.support.names import resolve_to
from tests.support.patience import PATIENCE_SECONDS
from tests.support.secret_box import BOX, ENCRYPTION_KEY, OTHER_ENCRYPTION_KEY

PAST = datetime(2020, 1, 1, tzinfo=UTC)
Headers = dict[str, str]


@dataclass
class Receiver:
    """An HTTP server that stores requests and sends the response that a test sets."""

    port: int = 0
    status: int = 200
    headers: str = ""
    delay_seconds: float = 0
    requests: list[tuple[str, Headers, bytes]] = field(default_factory=list)
    open_connections: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open_connections.add(asyncio.ensure_future(self.respond(reader, writer)))

    async def respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._response(reader, writer)
        finally:
            writer.close()

    async def _response(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        self.requests.append((first, headers, body))
        await asyncio.sleep(self.delay_seconds)
        writer.write(
            f"HTTP/1.1 {self.status} X\r\n{self.headers}content-length: 0\r\n\r\n".encode()
        )
        await writer.drain()


@asynccontextmanager
async def _receiving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    receiver = Receiver()
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
        for task in receiver.open_connections:
            task.cancel()
        await asyncio.gather(*receiver.open_connections, return_exceptions=True)
        await server.wait_closed()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with _receiving() as receiver:
        yield receiver


@pytest.fixture
def outbound() -> Outbound:
    """A client that may connect to every address."""
    return Outbound(allows_private=True)


@pytest.fixture
async def webhook(database: Database, redis: Redis, receiver: Receiver) -> Webhook:
    """A webhook with one event that is due."""
    await TenantService(database, ChangeAnnouncer(redis)).create("Acme", tenant_id="acme")
    service = WebhookService(database, BOX, allows_private=True)
    webhook = await service.create("acme", f"http://localhost:{receiver.port}/hook?x=1")
    await service.test("acme", webhook.id)
    return webhook


async def _event(database: Database) -> WebhookEventRow:
    async with database.reading() as transaction:
        return (await transaction.scalars(select(WebhookEventRow))).one()


async def _make_due(database: Database) -> None:
    async with database.writing() as transaction:
        await transaction.execute(update(WebhookEventRow).values(next_attempt_at=PAST))


async def test_event_arrives_once_and_its_signature_is_right(
    database: Database, webhook: Webhook, receiver: Receiver, outbound: Outbound
) -> None:
    sender = WebhookSender(database, outbound, BOX)
    began = int(datetime.now(UTC).timestamp())
    assert await sender.run(seconds=40.0) == 1
    assert await sender.run(seconds=40.0) == 0
    [(first, headers, body)] = receiver.requests
    assert first == "POST /hook?x=1 HTTP/1.1"
    assert headers["host"] == f"localhost:{receiver.port}"
    assert headers["content-type"] == "application/json"
    event = await _event(database)
    assert json.loads(body)["id"] == headers["sluice-event-id"] == event.id
    time, _, signed = headers["sluice-signature"].removeprefix("t=").partition(",v1=")
    assert began <= int(time) <= datetime.now(UTC).timestamp()
    expected = hmac.new(webhook.secret.encode(), time.encode() + b"." + body, hashlib.sha256)
    assert signed == expected.hexdigest()
    assert webhook.secret not in str(receiver.requests)
    assert (event.attempts, event.next_attempt_at, event.last_error) == (1, None, "")
    assert event.delivered_at is not None


@every_database
async def test_concurrent_senders_send_an_event_once(
    database: Database, webhook: Webhook, receiver: Receiver, outbound: Outbound
) -> None:
    receiver.delay_seconds = 0.2
    sender = WebhookSender(database, outbound, BOX)
    arrived = await asyncio.gather(*(sender.run(seconds=40.0) for _ in range(3)))
    assert (sum(arrived), len(receiver.requests)) == (1, 1)


async def test_failed_delivery_is_retried_after_growing_pauses(
    database: Database, webhook: Webhook, receiver: Receiver, outbound: Outbound
) -> None:
    receiver.status = 500
    sender = WebhookSender(database, outbound, BOX)
    for attempt, pause_seconds in enumerate((30, 60, 120), start=1):
        before = utc_now()
        assert await sender.run(seconds=40.0) == 0
        after = utc_now()
        assert await sender.run(seconds=40.0) == 0, "it is not due yet"
        event = await _event(database)
        assert (event.attempts, event.last_error) == (attempt, "responded with status 500")
        assert event.next_attempt_at is not None
        pause = timedelta(seconds=pause_seconds)
        assert before <= event.next_attempt_at - pause <= after
        await _make_due(database)
    receiver.status = 204
    assert await sender.run(seconds=40.0) == 1
    assert len(receiver.requests) == 4
    assert len({headers["sluice-event-id"] for _, headers, _ in receiver.requests}) == 1


async def test_event_is_dropped_after_a_day(
    database: Database,
    webhook: Webhook,
    receiver: Receiver,
    outbound: Outbound,
    caplog: pytest.LogCaptureFixture,
) -> None:
    receiver.status = 500
    async with database.writing() as transaction:
        created_at = utc_now() - timedelta(hours=24)
        await transaction.execute(
            update(WebhookEventRow).values(created_at=created_at, attempts=11)
        )
    assert await WebhookSender(database, outbound, BOX).run(seconds=40.0) == 0
    event = await _event(database)
    assert (event.attempts, event.next_attempt_at, event.delivered_at) == (12, None, None)
    assert "is abandoned" in caplog.text
    assert webhook.secret not in caplog.text
    assert "localhost" not in caplog.text


async def test_events_beyond_one_batch_are_all_sent(
    database: Database,
    webhook: Webhook,
    receiver: Receiver,
    outbound: Outbound,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhooks_module, "AT_ONCE", 2)
    event = await _event(database)
    columns = {column.name: getattr(event, column.name) for column in event.__table__.columns}
    async with database.writing() as transaction:
        for number in range(6):
            changed = {"id": f"evt_{number}", "threshold": number + 1}
            transaction.add(WebhookEventRow(**(columns | changed)))
    assert await WebhookSender(database, outbound, BOX).run(seconds=40.0) == 7
    assert len(receiver.requests) == 7


async def _add_events(database: Database, webhook: Webhook, number: int) -> None:
    """Add events that are due before that of `acme`."""
    names = [EventName(webhook.id, "x", "t:x", "", threshold) for threshold in range(number)]
    events = [replace(make_event(name, "x", {}), created_at=PAST) for name in names]
    async with database.writing() as transaction:
        await add_events(transaction, events)


@every_database
async def test_slow_receivers_of_one_tenant_delay_no_other(
    database: Database, redis: Redis, webhook: Webhook, receiver: Receiver
) -> None:
    await TenantService(database, ChangeAnnouncer(redis)).create("Slow", tenant_id="slow")
    outbound = Outbound(allows_private=True, timeout_seconds=2 * PATIENCE_SECONDS)
    sender = WebhookSender(database, outbound, BOX)
    of_tenant, of_url = webhooks_module.MOST
    async with _receiving() as slow, asyncio.timeout(PATIENCE_SECONDS):
        slow.delay_seconds = 600
        for at in range(5):
            service = WebhookService(database, BOX, allows_private=True)
            added = await service.create("slow", f"http://localhost:{slow.port}/{at % 2}")
            await _add_events(database, added, 30)
        while not receiver.requests or len(slow.requests) < of_tenant:
            await sender.run(seconds=0.1)
        await sender.run(seconds=1.0)
        urls = Counter(first for first, _, _ in slow.requests)
        assert (urls.total(), max(urls.values())) == (of_tenant, of_url)
        await sender.aclose()


async def test_bug_in_one_delivery_delays_no_other(
    database: Database,
    webhook: Webhook,
    receiver: Receiver,
    outbound: Outbound,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = (await _event(database)).id
    await _add_events(database, webhook, 30)

    def sign(secret: str, body: bytes, unix_seconds: int) -> str:
        return signature(secret, body, 1 // (bad.encode() not in body))

    monkeypatch.setattr(webhooks_module, "signature", sign)
    assert await WebhookSender(database, outbound, BOX).run(seconds=40.0) == 30
    async with database.reading() as transaction:
        event = await transaction.get_one(WebhookEventRow, bad)
    assert (event.attempts, event.last_error) == (1, "could not be sent by an internal error")


async def test_delivery_fails_while_the_key_of_a_secret_is_missing(
    database: Database, webhook: Webhook, receiver: Receiver, outbound: Outbound
) -> None:
    for box in (SecretBox(), SecretBox([OTHER_ENCRYPTION_KEY])):
        assert await WebhookSender(database, outbound, box).run(seconds=40.0) == 0
        assert "SLUICE_ENCRYPTION_KEYS" in (await _event(database)).last_error
        await _make_due(database)
    assert receiver.requests == []
    both = SecretBox([OTHER_ENCRYPTION_KEY, ENCRYPTION_KEY])
    assert await WebhookSender(database, outbound, both).run(seconds=40.0) == 1


async def test_plain_secret_of_an_earlier_release_signs_as_before(
    database: Database, webhook: Webhook, receiver: Receiver, outbound: Outbound
) -> None:
    async with database.writing() as transaction:
        plain = {"secret": webhook.secret, "sealed_secret": None}
        await transaction.execute(update(WebhookRow).values(**plain))
    assert await WebhookSender(database, outbound, SecretBox()).run(seconds=40.0) == 1
    [(_, headers, body)] = receiver.requests
    time = int(headers["sluice-signature"].removeprefix("t=").partition(",")[0])
    assert headers["sluice-signature"] == signature(webhook.secret, body, time)


async def test_unusual_port_is_not_connected_to(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_to(monkeypatch, "93.184.216.34")
    with pytest.raises(DeliveryError, match="a port that is not allowed"):
        await Outbound(allows_private=False).post("https://example.com:22/", b"{}", {})


async def test_redirect_is_not_followed(receiver: Receiver, outbound: Outbound) -> None:
    receiver.status, receiver.headers = 307, f"location: http://127.0.0.1:{receiver.port}/x\r\n"
    with pytest.raises(DeliveryError, match=r"redirect \(307\), which is not followed"):
        await outbound.post(f"http://127.0.0.1:{receiver.port}/", b"{}", {})
    assert len(receiver.requests) == 1


async def test_silent_receiver_times_out(
    receiver: Receiver, outbound: Outbound, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.jobs.outbound.TIMEOUT_SECONDS", 0.2)
    receiver.delay_seconds = 600
    with pytest.raises(DeliveryError, match="no response in time"):
        await outbound.post(f"http://127.0.0.1:{receiver.port}/", b"{}", {})


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:1/", "cannot be reached"),
        ("ftp://127.0.0.1/", "not an https URL"),
        ("http:///x", "not a URL"),
        ("https://127.0.0.1:99999/", "cannot be reached"),
    ],
)
async def test_unreachable_receiver_is_reported(outbound: Outbound, url: str, why: str) -> None:
    with pytest.raises(DeliveryError, match=why) as caught:
        await outbound.post(url, b"{}", {})
    assert url not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://example.com/", "not an https URL"),
        ("https://127.0.0.1/", "not on the public internet"),
        ("https://[::1]/", "not on the public internet"),
        ("https://[::ffff:10.0.0.1]/", "not on the public internet"),
        ("https://169.254.169.254/latest/meta-data", "not on the public internet"),
        ("https://localhost/", "not on the public internet"),
    ],
)
async def test_private_addresses_are_refused_without_a_connection(
    receiver: Receiver, url: str, why: str
) -> None:
    outbound = Outbound(allows_private=False)
    with pytest.raises(DeliveryError, match=why):
        await outbound.post(_with_port(url, receiver.port), b"{}", {})
    assert receiver.requests == []


async def test_name_with_one_private_address_among_public_ones_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolve_to(monkeypatch, "93.184.216.34", "127.0.0.1")
    outbound = Outbound(allows_private=False)
    with pytest.raises(DeliveryError, match="not on the public internet"):
        await outbound.post("https://example.com/", b"{}", {})


async def test_unresolvable_name_is_reported(
    outbound: Outbound, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_to(monkeypatch)
    with pytest.raises(DeliveryError, match="cannot be resolved"):
        await outbound.post("https://no-such-host.example/", b"{}", {})


async def test_name_is_resolved_once_and_the_next_address_tried(
    receiver: Receiver, outbound: Outbound, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = resolve_to(monkeypatch, "127.0.0.2", "127.0.0.1")
    await outbound.post(f"http://example.com:{receiver.port}/", b"{}", {})
    assert asked == ["example.com"], "the connection goes to the address, not to the name again"
    [(_, headers, _)] = receiver.requests
    assert headers["host"] == f"example.com:{receiver.port}"


async def test_certificate_must_match_the_name_in_the_url(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serving, trust = self_signed("hooks.example.com", tmp_path)
    names: list[str | None] = []
    serving.sni_callback = lambda _socket, name, _context: names.append(name)
    outbound = Outbound(allows_private=True, trust=trust)
    resolve_to(monkeypatch, "127.0.0.1")
    async with _receiving(serving) as receiver:
        await outbound.post(f"https://hooks.example.com:{receiver.port}/", b"{}", {})
        assert names == ["hooks.example.com"]
        assert len(receiver.requests) == 1
        with pytest.raises(DeliveryError, match="cannot be reached"):
            await outbound.post(f"https://other.example.com:{receiver.port}/", b"{}", {})
        assert len(receiver.requests) == 1


def _with_port(url: str, port: int) -> str:
    scheme, _, rest = url.partition("://")
    host, _, path = rest.partition("/")
    return f"{scheme}://{host}:{port}/{path}"


class MailServer:
    """An SMTP server that takes one message, or refuses an address."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.message = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 ready\r\n")
        while line := (await reader.readline()).decode().strip():
            self.said.append(line)
            verb = line.split(" ")[0].upper()
            if verb == "DATA":
                writer.write(b"354 go on\r\n")
                content = await reader.readuntil(b"\r\n.\r\n")
                self.message = content.decode()
            replies = {"EHLO": "250-mail\r\n250 AUTH PLAIN", "AUTH": "235 ok", "QUIT": "221 bye"}
            reply = "550 unknown" if verb == "RCPT" and "nobody" in line else "250 ok"
            writer.write(f"{replies.get(verb, reply)}\r\n".encode())
        writer.close()


@asynccontextmanager
async def mailing() -> AsyncIterator[tuple[MailServer, Mailer]]:
    """A mail server, and a mailer that logs in there."""
    server = MailServer()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    async with listening:
        url = f"smtp://me:p%40ss@127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        mailer = Mailer.of(Settings(smtp_url=SecretStr(url), mail_from="s@example.com"))
        assert mailer is not None
        yield server, mailer


async def test_events_are_mailed_to_an_address(
    database: Database, redis: Redis, outbound: Outbound
) -> None:
    await TenantService(database, ChangeAnnouncer(redis)).create("Acme", tenant_id="acme")
    with pytest.raises(InvalidParameterError, match="sends no mail"):
        await WebhookService(database, BOX).create("acme", "mailto:a@example.com")
    service = WebhookService(database, BOX, allows_mail=True)
    with pytest.raises(InvalidParameterError, match="'url' must be an address"):
        await service.create("acme", "mailto:a@example.com?bcc=b@example.com")
    webhook = await service.create("acme", "mailto:money@example.com")
    async with mailing() as (server, mailer):
        data: dict[str, object] = {"scope": "key", "threshold": 80, "used_micros": 800_000}
        name = EventName(webhook.id, SPEND_LIMIT_KIND, "s:spl_1", "2026-11", 80)
        async with database.writing() as transaction:
            await add_events(transaction, [make_event(name, "acme", data)])
        assert await WebhookSender(database, outbound, BOX, mailer).run(seconds=40.0) == 1
        assert "Subject: spend_limit.threshold at 80 %: acme" in server.message
        assert "used: $0.80" in server.message
        assert "RCPT TO:<money@example.com>" in server.said
        [login] = [line for line in server.said if line.startswith("AUTH PLAIN ")]
        assert base64.b64decode(login.split()[2]) == b"\0me\0p@ss"

        await service.remove("acme", webhook.id)
        refused = await service.create("acme", "mailto:nobody@example.com")
        await service.test("acme", refused.id)
        assert await WebhookSender(database, outbound, BOX, mailer).run(seconds=40.0) == 0
    [event] = await service.events("acme", refused.id, limit=9)
    assert (event.last_error, event.attempts) == ("the mail server refused the address", 1)
    # The server has ended; without mail, the event waits, too.
    await _make_due(database)
    assert await WebhookSender(database, outbound, BOX, mailer).run(seconds=40.0) == 0
    [event] = await service.events("acme", refused.id, limit=9)
    assert event.last_error.startswith("the mail server failed (")


async def test_a_spend_alert_is_mailed_once_a_month(database: Database, redis: Redis) -> None:
    announcer = ChangeAnnouncer(redis)
    await TenantService(database, announcer).create("Acme", tenant_id="acme")
    project = (await ProjectService(database, announcer).create("acme", name="shop")).id
    alerts = SpendAlertService(database, sends_mail=True)
    for holder, micros, receiver in (
        (None, 5_000_000, "all@example.com"),
        (project, 3_000_000, "nobody@example.com"),
        (project, 2_000_000, "shop@example.com"),
        (project, 9_000_000, "later@example.com"),
    ):
        options = {"amount_micros": micros, "recipients": [receiver], "subject_prefix": "[Acme]"}
        last = await alerts.add("acme", holder, options)
    now = datetime(2026, 11, 30, 12, tzinfo=UTC)
    for of in (project, None):
        await use(database, "acme", 3_000_000, at=now, is_prepaid=False, project_id=of)
    async with mailing() as (server, mailer):
        # The server refuses one address, which delays no other mail.
        assert await send_spend_alerts(database, mailer, now) == 2
        assert "RCPT TO:<all@example.com>" in server.said
        assert "RCPT TO:<shop@example.com>" in server.said
        assert "Subject: [Acme] $" in server.message
        assert await send_spend_alerts(database, mailer, now) == 0
        # It is sent again for another amount, and each one in the next month if that is spent.
        changed = {"amount_micros": 1, "recipients": ["later@example.com"], "subject_prefix": None}
        await alerts.update("acme", project, last.id, changed)
        assert await send_spend_alerts(database, mailer, now) == 1
        assert "RCPT TO:<later@example.com>" in server.said
        assert await send_spend_alerts(database, mailer, now + timedelta(days=1)) == 0
    assert await send_spend_alerts(database, None, now) == 0
