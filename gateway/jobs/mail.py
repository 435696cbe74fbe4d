"""Mail: events of webhooks whose URL is an address, over the operator's SMTP server."""

from collections.abc import Iterator
from dataclasses import dataclass
from email.message import EmailMessage
from email.utils import format_datetime
from typing import Any, Final, Self
from urllib.parse import unquote, urlsplit

import aiosmtplib
import msgspec

from gateway.accounts.webhooks.service import MAILTO
from gateway.jobs.outbound import DeliveryError
from gateway.platform.settings import Settings
from gateway.records.money import show_dollars
from gateway.records.times import utc_now

TIMEOUT_SECONDS: Final = 20.0
"""For each step of the connection."""
_MONEY: Final = "_micros"


@dataclass(frozen=True, slots=True)
class Mailer:
    """Sends events by mail."""

    _url: str
    """`smtp://` (with STARTTLS, if the server has it) or `smtps://`, with user and password."""
    _sender: str

    @classmethod
    def of(cls, settings: Settings) -> Self | None:
        """Return the mailer of a deployment; None if it has no SMTP server."""
        if settings.smtp_url is None:
            return None
        return cls(settings.smtp_url.get_secret_value(), settings.mail_from)

    async def send(self, webhook_url: str, event: str) -> None:
        """Send an event, in the form in which webhooks receive it. Raises DeliveryError."""
        await self.deliver(message_of(event), webhook_url.removeprefix(MAILTO))

    async def deliver(self, message: EmailMessage, *receivers: str) -> None:
        """Send a message, which gets a date, a sender and receivers. Raises DeliveryError."""
        message["From"], message["To"] = self._sender, ", ".join(receivers)
        message["Date"] = format_datetime(utc_now())
        server = urlsplit(self._url)
        try:
            await aiosmtplib.send(
                message,
                hostname=server.hostname,
                port=server.port,
                username=unquote(server.username) if server.username else None,
                password=unquote(server.password) if server.password else None,
                use_tls=server.scheme == "smtps",
                timeout=TIMEOUT_SECONDS,
            )
        except aiosmtplib.SMTPRecipientsRefused:
            raise DeliveryError("the mail server refused the address") from None
        except (aiosmtplib.SMTPException, OSError) as error:
            raise DeliveryError(f"the mail server failed ({type(error).__name__})") from None


def message_of(event: str) -> EmailMessage:
    """Return the mail for an event, without date, sender and receiver."""
    content = msgspec.json.decode(event)
    data: dict[str, Any] = content["data"]
    message = EmailMessage()
    share = f" at {data['threshold']} %" if "threshold" in data else ""
    message["Subject"] = f"{content['type']}{share}: {content['tenant']}"
    message["Message-ID"] = f"<{content['id']}@sluice>"
    lines = [f"{name}: {text}" for name, text in _lines(data)]
    message.set_content("\n".join([content["type"], "", *lines, "", f"Event {content['id']}"]))
    return message


def _lines(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in data.items():
        if value is None:
            continue
        is_money = name.endswith(_MONEY) and isinstance(value, int)
        label = name.removesuffix(_MONEY).replace("_", " ")
        yield label, show_dollars(value) if is_money else str(value)
