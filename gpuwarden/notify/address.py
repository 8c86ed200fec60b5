"""Addresses of notifications: a mail address, or an Apprise URL, which may contain a password. Pure."""

import re
from argparse import ArgumentTypeError
from typing import Final
from urllib.parse import parse_qsl, quote, unquote, unquote_plus, urlsplit

from gpuwarden.errors import GpuwardenError

SCHEMES: Final = (
    *("mailto", "mailtos", "slack", "workflows", "msteams", "ntfy", "ntfys"),
    *("json", "jsons", "form", "forms", "xml", "xmls", "https"),
)
"""Mail, Slack, Teams, ntfy and webhooks. Other schemes of Apprise act on the sending host."""

LENGTH_MAX: Final = 500  # characters

_ATOM: Final = r"[A-Za-z0-9!#$%&*/=?^_`{|}~-]"
_MAIL: Final = re.compile(rf"{_ATOM}([A-Za-z0-9!#$%&*+/=?^_`{{|}}~.-]*{_ATOM})?@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*")
"""Without addresses that Apprise cuts: o'brien@example.com would be sent to brien@example.com."""
_READS_FILES: Final = re.compile(r"template|pgp|file|cert|key", re.IGNORECASE)
"""Options with which Apprise reads a local file."""


class AddressError(GpuwardenError):
    """An address is invalid. The error does not repeat it."""


def check(address: str) -> str:
    """Return the address if a message can be sent to it.

    Raises:
        AddressError: it is invalid.
    """
    if len(address) > LENGTH_MAX or not address.isprintable() or not address.strip():
        raise AddressError(f"the address is invalid: use 1 to {LENGTH_MAX} printable characters")
    if is_mail(address):
        return address
    try:
        parts = urlsplit(address)
        scheme, host, _ = parts.scheme.lower(), parts.hostname, parts.port
    except ValueError:
        scheme, host = "", None
    if not scheme or not host:
        raise AddressError(
            "the address is invalid: use one such as alice@example.com, ntfys://ntfy.sh/TOPIC or "
            "slack://TOKEN_A/TOKEN_B/TOKEN_C"
        )
    if scheme not in SCHEMES:
        raise AddressError(f"{scheme}:// is not supported: use one of {', '.join(SCHEMES)}")
    for each in re.split("[?#&;]", address)[1:]:  # Apprise also finds options behind # and ;
        if _READS_FILES.search(name := unquote_plus(each.partition("=")[0])):
            raise AddressError(f"the option {name[:40]!a} of the {scheme}:// address reads a file: leave it out")
    return address


def from_argument(text: str) -> str:
    """Return the address of a command's argument, as a `type` of argparse.

    Raises:
        ArgumentTypeError: it is invalid. argparse repeats the text of a `ValueError`, but not of this.
    """
    try:
        return check(text)
    except AddressError as error:
        raise ArgumentTypeError(str(error)) from None


def is_mail(address: str) -> bool:
    """Whether this is a plain mail address. It needs a mail server."""
    return bool(_MAIL.fullmatch(address))


def by_mail_server(address: str, mail_server: str) -> str:
    """The Apprise URL of a plain mail address."""
    joint = "&" if "?" in mail_server else "?"
    return f"{mail_server}{joint}to={quote(address, safe='@')}"


def shown(address: str) -> str:
    """The address without secrets: a mail address, or scheme and host. The host of a Slack URL is a token."""
    if is_mail(address):
        return address
    try:
        parts = urlsplit(address)
        host = parts.hostname or ""
    except ValueError:
        return "an invalid address"
    return f"{parts.scheme}://{host}" if "." in host or host == "localhost" else f"{parts.scheme}://"


def without_secrets(text: str, address: str) -> str:
    """Replace each part of the address in a text, except its host."""
    try:
        parts = urlsplit(address)
        words = [
            address,
            parts.username,
            parts.password,
            *parts.path.split("/"),
            *(v for _, v in parse_qsl(parts.query)),
        ]
        host = parts.hostname or ""
    except ValueError:
        return ""
    words += [] if "." in host or host == "localhost" else [parts.netloc, host]
    for word in sorted(
        {unquote(each) for each in words if each} | {each for each in words if each}, key=len, reverse=True
    ):
        if len(word) > 2:
            text = text.replace(word, "***")
    return text
