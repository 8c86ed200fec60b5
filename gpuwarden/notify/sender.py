"""Sends a message in a separate process, with a timeout."""

import json
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Final, Protocol

from gpuwarden.notify.address import without_secrets

TIMEOUT_S: Final = 30.0
"""Timeout of a message, seconds."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message, as plain text."""

    title: str
    body: str


class Send(Protocol):
    """Sends a message to an Apprise URL; returns the error, without secrets, or `None`."""

    def __call__(self, url: str, message: Message) -> str | None:
        """Send a message; returns the error."""


class Sender:
    """Sends messages with `gpuwarden.notify.send`. Threads may share it."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._closed = False

    def __call__(self, url: str, message: Message) -> str | None:
        """Send a message; returns the error."""
        with self._lock:
            if self._closed:
                return "this process stops"
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "gpuwarden.notify.send"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                )
            except OSError as failed:
                return f"the sending process cannot be started: {failed.strerror}"
            self._running.add(process)
        try:
            out, err = process.communicate(
                json.dumps({"url": url, "title": message.title, "body": message.body}), timeout=self._timeout_s
            )
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return f"no answer within {self._timeout_s:g} s"
        finally:
            with self._lock:
                self._running.discard(process)
        try:
            error: str | None = json.loads(out)["error"]
        except (ValueError, KeyError, TypeError):
            last = without_secrets(err.strip().rpartition("\n")[2], url)[:200]
            return f"the sending process ended with code {process.returncode}: {last}"
        return error

    def close(self) -> None:
        """End the processes. Their messages are sent again by another process, or after the next start."""
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()
