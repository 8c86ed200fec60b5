"""A real SMTP server that keeps the mail it receives."""

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, Envelope, Session


@dataclass(frozen=True)
class Mail:
    """One received mail."""

    to: str
    subject: str
    text: str
    message: EmailMessage


@dataclass
class Mailbox:
    """The mail that a server received."""

    port: int
    mails: list[Mail] = field(default_factory=list)

    @property
    def url(self) -> str:
        """The server as `mail_server` of a notify file."""
        return f"mailto://127.0.0.1:{self.port}?from=gpuwarden@example.com"

    def to(self, address: str) -> list[Mail]:
        """The mail of one recipient, in the order of arrival."""
        return [each for each in self.mails if each.to == address]

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:  # noqa: N802, ARG002
        """Keep a mail for each recipient. Called by the server."""
        content = envelope.content
        assert isinstance(content, bytes)
        found = message_from_bytes(content, policy=default)
        assert isinstance(found, EmailMessage)
        body = found.get_body(("plain", "html"))
        assert body is not None
        for to in envelope.rcpt_tos:
            text = body.get_content().replace("\r\n", "\n")
            self.mails.append(Mail(to=to, subject=str(found["Subject"]), text=text, message=found))
        return "250 OK"


@contextmanager
def listening(box: Mailbox) -> Iterator[None]:
    """Run the server on the port of the mailbox."""
    controller = Controller(box, hostname="127.0.0.1", port=box.port)
    controller.start()
    try:
        yield
    finally:
        controller.stop()


@contextmanager
def mail_server() -> Iterator[Mailbox]:
    """A mailbox with its server."""
    box = new_mailbox()
    with listening(box):
        yield box


def new_mailbox() -> Mailbox:
    """A mailbox on a free port, without its server."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        return Mailbox(port=free.getsockname()[1])
