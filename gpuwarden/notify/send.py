"""Send one message with Apprise, as a separate process that a caller can end.

Input, as JSON: `url`, `title`, `body`. Output: `error`, `null` if the server accepted the message.
"""

import json
import logging
import sys
from typing import Final

from gpuwarden.notify.address import without_secrets

ERROR_MAX: Final = 300  # characters

APPRISE_MISSING: Final = "Apprise is not installed: pip install 'gpuwarden[notify]'"


class _Errors(logging.Handler):
    """Keeps the warnings and exceptions that Apprise logs."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        line = record.getMessage()
        if record.levelno >= logging.WARNING or "Exception:" in line:
            self.lines.append(line.strip().removesuffix("."))


def send(url: str, title: str, body: str) -> str | None:
    """Send a message; returns the error, without secrets."""
    try:
        import apprise  # noqa: PLC0415 - slow to import
    except ImportError:
        return APPRISE_MISSING
    errors = _Errors()
    logger = logging.getLogger("apprise")
    logger.addHandler(errors)
    logger.setLevel(logging.DEBUG)
    asset = apprise.AppriseAsset(app_id="gpuwarden", app_desc="gpuwarden", image_url_mask="", async_mode=False)
    target = apprise.Apprise.instantiate(url, asset=asset)
    if target is None:
        return "Apprise does not accept this URL: see https://appriseit.com/services"
    if target.notify(title=title, body=body, body_format=apprise.NotifyFormat.TEXT):
        return None
    return without_secrets("; ".join(errors.lines), url)[:ERROR_MAX] or "the server did not accept the message"


def main() -> None:
    """Send the message of standard input."""
    message = json.load(sys.stdin)
    error = send(message["url"], message["title"], message["body"])
    sys.stdout.write(json.dumps({"error": error}))


if __name__ == "__main__":
    main()
