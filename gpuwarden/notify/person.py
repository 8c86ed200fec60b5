"""Notify a person from this process, as `gpuwarden run --notify` does."""

import importlib.util
import os
import time
from typing import Final

from gpuwarden.notify.address import AddressError, by_mail_server, check, is_mail
from gpuwarden.notify.send import APPRISE_MISSING
from gpuwarden.notify.sender import Message, Sender

MAIL_SERVER_ENV: Final = "GPUWARDEN_MAIL_SERVER"
TIMEOUT_S: Final = 20.0
PAUSES_S: Final = (0.0, 5.0, 20.0)
"""Pauses before the attempts, seconds."""


def url_of(address: str) -> str:
    """The Apprise URL of an address.

    Raises:
        AddressError: it is invalid, a mail address without a mail server, or Apprise is missing.
    """
    check(address)
    if importlib.util.find_spec("apprise") is None:
        raise AddressError(APPRISE_MISSING)
    if not is_mail(address):
        return address
    if not (server := os.environ.get(MAIL_SERVER_ENV, "")):
        raise AddressError(
            f"a mail address needs ${MAIL_SERVER_ENV}, such as mailtos://USER:PASSWORD@smtp.example.com?from=ADDRESS"
        )
    return check(by_mail_server(address, server))


def send(url: str, title: str, body: str) -> str | None:
    """Send a message, with a few attempts; returns the last error."""
    sender, error = Sender(TIMEOUT_S), None
    for pause_s in PAUSES_S:
        time.sleep(pause_s)
        error = sender(url, Message(title=title, body=body))
        if error is None:
            break
    return error
