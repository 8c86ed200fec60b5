"""Alertmanager's receivers of operators, from URLs of mail servers and Slack webhooks. The remediator sends to others.

The URLs have the syntax of Apprise. Passwords and Slack addresses go to files of mode 0600, which the configuration
names. So do the URLs that the remediator sends to: its notify file.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, unquote, urlsplit

from gpuwarden.notify.address import AddressError, check
from gpuwarden.notify.send import APPRISE_MISSING
from remediator.settings.notify_file import NotifySettings

NOTIFY_FILE: Final = "notify.toml"
RELAY_PATH: Final = "/api/v1/notifications"
"""Where the remediator takes alerts for operators."""

NO_NATIVE: Final = (
    "alerts about the remediator itself are not sent: this needs --notify with a mail server or a Slack webhook"
)
SECRET: Final = "notify-"  # noqa: S105 - a file's name
"""Start of the name of a secret file; the number of its URL follows."""

_ADDRESS: Final = re.compile(r"[^\s@,;<>\"]+@[^\s@,;<>\"]+")
_SLACK_WEBHOOK: Final = re.compile(r"https://hooks\.slack(-gov)?\.com/services/\w+/\w+/\w+/?")
_SLACK_HOST: Final = "hooks.slack.com"
_EXAMPLE: Final = "mailtos://USER:PASSWORD@smtp.example.com?from=gpuwarden@example.com&to=ops@example.com"
_MAIL_OPTIONS: Final = frozenset({"from", "to", "smtp", "mode"})
_PLAIN_PORT: Final = 25
_TLS_PORTS: Final[Mapping[str, int]] = {"starttls": 587, "ssl": 465}
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})

_SLACK_TEXT: Final = {
    "title": "{{ .Status | toUpper }}: {{ .CommonLabels.alertname }}",
    "text": "{{ range .Alerts }}{{ .Annotations.summary }} <{{ .Annotations.runbook_url }}|runbook>\n{{ end }}",
}


@dataclass(frozen=True, kw_only=True)
class Receiver:
    """One integration of Alertmanager, such as `email_configs`, and the secret that its field names a file of."""

    integration: str
    config: Mapping[str, Any]
    secret_field: str = ""
    secret: str = ""


def add_notify(parser: argparse.ArgumentParser) -> None:
    """Add the option `--notify`."""
    parser.add_argument(
        "--notify",
        metavar="URL",
        type=given,
        action="extend",
        help=f"where alerts for operators are sent: {_EXAMPLE}, a Slack webhook, or another URL of Apprise; repeat it "
        "for more, or use @FILE with one URL a line, which hides passwords from other users (default: none)",
    )


def parse(url: str) -> Receiver | None:
    """Parse a URL. `None`: the remediator sends to it.

    Raises:
        ValueError: it is invalid; the message says how to write it, without the secret.
    """
    try:
        split = urlsplit(url)
        port = split.port
    except ValueError:
        raise ValueError(f"invalid address or port: expected for example {_EXAMPLE}") from None
    scheme = split.scheme.lower()
    if scheme in ("mailto", "mailtos"):
        return _mail(split, port, secure=scheme == "mailtos")
    if scheme == "slack":
        return _slack(_webhook_of(split), channel=unquote(split.fragment))
    if _SLACK_WEBHOOK.fullmatch(url):
        return _slack(url)
    if split.hostname in (_SLACK_HOST, "hooks.slack-gov.com"):
        raise ValueError("invalid Slack webhook: expected https://hooks.slack.com/services/T…/B…/…")
    if not scheme:
        raise ValueError(f"not a URL to notify: expected a Slack webhook, or for example {_EXAMPLE}")
    if scheme == "https":
        raise ValueError("use the Apprise URL of the service, for example jsons://HOST/PATH for a webhook")
    try:
        check(url)
    except AddressError as error:
        raise ValueError(f"{error}; see docs/how-to/notifications.md") from None
    return None


def relayed(urls: Sequence[str]) -> list[str]:
    """The URLs that the remediator sends to."""
    return [url for url in urls if parse(url) is None]


def notify_file(urls: Sequence[str], base: NotifySettings) -> str:
    """Return the content of `base` with these URLs as further administrators."""
    lines = []
    if base.mail_server is not None:
        lines.append(f"mail_server = {_quoted(base.mail_server)}")
    listed = ", ".join(_quoted(each) for each in dict.fromkeys((*base.administrators, *relayed(urls))))
    lines += [f"administrators = [{listed}]", ""]
    if base.submitters:
        lines.append("[submitters]")
        lines += [f"{_quoted(account)} = {_quoted(address)}" for account, address in base.submitters.items()]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def configs(urls: Sequence[str], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the integrations of a receiver. Their secrets are in `folder`."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, receiver in _native(urls):
        config = {**receiver.config, "send_resolved": True}
        if receiver.secret:
            config[receiver.secret_field] = str(folder / name)
        found.setdefault(receiver.integration, []).append(config)
    return found


def secrets(urls: Sequence[str]) -> dict[str, str]:
    """Return the text of each secret file by its name."""
    return {name: receiver.secret for name, receiver in _native(urls) if receiver.secret}


def _native(urls: Sequence[str]) -> list[tuple[str, Receiver]]:
    parsed = ((f"{SECRET}{number}", parse(url)) for number, url in enumerate(urls, start=1))
    return [(name, receiver) for name, receiver in parsed if receiver is not None]


def warnings(urls: Sequence[str]) -> list[str]:
    """Messages about alerts that these URLs do not receive."""
    if not urls:
        return ["alerts for operators are not sent, not even those about gpuwarden itself; use --notify"]
    missing = relayed(urls) and find_spec("apprise") is None
    return [*([] if _native(urls) else [NO_NATIVE]), *([APPRISE_MISSING] if missing else [])]


def given(value: str) -> list[str]:
    """Parse a value of the option. Messages do not repeat it: it may hold a password."""
    try:
        lines = Path(value[1:]).read_text(encoding="utf-8").splitlines() if value.startswith("@") else [value]
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{value[1:]} cannot be read: {error}") from None
    urls = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    try:
        for url in urls:
            parse(url)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return urls


def _mail(split: SplitResult, port: int | None, *, secure: bool) -> Receiver:
    pairs = (pair.partition("=") for pair in split.query.split("&") if pair)
    options = {name: unquote(value) for name, _, value in pairs}
    if not split.hostname:
        raise ValueError(f"no mail server in the URL: expected for example {_EXAMPLE}")
    if split.path.strip("/") or split.fragment:
        raise ValueError("a mail URL has no path and no fragment: write recipients as `to=`, and %23 for #")
    if unknown := sorted(options.keys() - _MAIL_OPTIONS):
        raise ValueError(f"unknown option {unknown[0]!r} of a mail URL; known: {', '.join(sorted(_MAIL_OPTIONS))}")
    user, password = unquote(split.username or ""), unquote(split.password or "")
    server = options.get("smtp", split.hostname)
    if bool(user) != bool(password):
        raise ValueError("a mail URL needs both user and password, or neither")
    if password and not secure and server not in _LOOPBACK:
        raise ValueError("mailto:// would send the password unencrypted: use mailtos://")
    sender = options.get("from") or (user if "@" in user else f"{user}@{split.hostname}" if user else "")
    to = [each for each in re.split(r"[,\s]+", options.get("to", "")) if each] or [sender]
    for what, address in (("from", sender), *(("to", each) for each in to)):
        if not _ADDRESS.fullmatch(address):
            raise ValueError(f"no valid address in `{what}` of a mail URL: expected for example {_EXAMPLE}")
    config: dict[str, Any] = {
        "to": ", ".join(to),
        "from": sender,
        "smarthost": f"{_bracketed(server)}:{port or _port(options, secure=secure)}",
        "require_tls": secure,
    }
    if not password:
        return Receiver(integration="email_configs", config=config)
    return Receiver(
        integration="email_configs",
        config={**config, "auth_username": user},
        secret_field="auth_password_file",  # noqa: S106 - a field's name
        secret=password,
    )


def _port(options: Mapping[str, str], *, secure: bool) -> int:
    """Return the default port. Alertmanager begins with TLS on port 465, and uses STARTTLS on others."""
    if not secure:
        return _PLAIN_PORT
    mode = options.get("mode", "starttls")
    if mode not in _TLS_PORTS:
        raise ValueError(f"unknown mode {mode!r} of a mail URL; known: {', '.join(_TLS_PORTS)}")
    return _TLS_PORTS[mode]


def _bracketed(server: str) -> str:
    return f"[{server}]" if ":" in server else server


def _webhook_of(split: SplitResult) -> str:
    """Webhook of Apprise's slack://A/B/C. Its tokens keep their case, which `hostname` would lower."""
    tokens = [split.netloc.rpartition("@")[2], *(part for part in split.path.split("/") if part)]
    webhook = f"https://{_SLACK_HOST}/services/{'/'.join(tokens)}"
    if not _SLACK_WEBHOOK.fullmatch(webhook):
        raise ValueError("invalid Slack URL: expected slack://T…/B…/…#channel with the tokens of a webhook")
    return webhook


def _slack(webhook: str, *, channel: str = "") -> Receiver:
    return Receiver(
        integration="slack_configs",
        config={**({"channel": f"#{channel}"} if channel else {}), **_SLACK_TEXT},
        secret_field="api_url_file",  # noqa: S106 - a field's name
        secret=webhook,
    )
