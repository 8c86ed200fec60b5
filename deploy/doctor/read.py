"""Read all parts at the same time, within one time limit. A part that does not answer costs only its own links."""

import re
import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import httpcore  # noqa: F401 - httpx imports it later, and threads at the same time would find half of it
import httpx

from deploy.doctor.facts import Facts, Host, Ledger
from deploy.doctor.finding import Unread
from deploy.doctor.sources import http, local, settings
from deploy.doctor.sources.addresses import Addresses
from gpuwarden.errors import GpuwardenError
from remediator.clients.http import shown
from remediator.commands.addresses import NONE

LIMIT_S: Final = 8.0
"""Time limit of all reading, seconds."""

T = TypeVar("T")


class _Reading(Generic[T]):
    """One read in its own thread, which does not delay the exit of the program."""

    def __init__(self, read: Callable[[], T], *, url: str = "") -> None:
        self._read = read
        self._where = f"{url}: " if url else ""
        self._result: T | Unread | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._read()
        except PermissionError as error:
            self._result = Unread(why=f"this user may not read {error.filename}", denied=True)
        except httpx.TimeoutException:
            self._result = Unread(why=f"{self._where}no answer within {http.TIMEOUT_S:g} s")
        except (
            GpuwardenError,
            httpx.HTTPError,
            httpx.InvalidURL,
            OSError,
            ValueError,
            LookupError,
            TypeError,
        ) as error:
            reason = re.sub(r"^\[Errno \d+\] ", "", str(error)) or type(error).__name__
            self._result = Unread(why=f"{self._where}{reason}")

    def result(self, until_s: float) -> T | Unread:
        """The result, or why there is none by then."""
        self._thread.join(max(0.0, until_s - time.monotonic()))
        return Unread(why=f"{self._where}no answer within {LIMIT_S:g} s") if self._result is None else self._result


def read(addresses: Addresses, *, now: Callable[[], float] = time.time) -> Facts:
    """Read all parts.

    Args:
        addresses: where they are.
        now: this host's clock, Unix seconds.
    """
    until_s = time.monotonic() + LIMIT_S
    checked = settings.read(addresses)  # changes the environment for a moment: before the threads
    key = _Reading(lambda: local.read_key(addresses))
    disks = _Reading(lambda: local.read_disks(addresses))
    opened = _Reading(lambda: local.read_ledger(addresses, now))
    queue = _Reading(lambda: local.read_queue(addresses))
    exporter = _url(addresses, "exporter", http.read_exporter)
    webhook = _url(addresses, "remediator", http.read_webhook)
    scraper = _url(addresses, "prometheus", lambda of: http.read_prometheus(of, now))
    alertmanager = _url(addresses, "alertmanager", http.read_alertmanager).result(until_s)
    token = _url(addresses, "remediator", lambda of: http.send_token(of, alertmanager))
    files = _Reading(lambda: local.read_files(addresses, http.token_files(addresses, alertmanager)))
    ledger, prometheus = opened.result(until_s), scraper.result(until_s)
    offsets = [] if isinstance(prometheus, Unread) else [prometheus.offset]
    if isinstance(ledger, Ledger) and ledger.offset is not None:
        offsets.append(ledger.offset)
    return Facts(
        host=Host(
            place=addresses.place,
            settings=checked,
            key=key.result(until_s),
            files=files.result(until_s),
            disks=disks.result(until_s),
            now_s=now(),
        ),
        exporter=exporter.result(until_s),
        prometheus=prometheus,
        alertmanager=alertmanager,
        webhook=webhook.result(until_s),
        token=token.result(until_s),
        ledger=ledger,
        queue=queue.result(until_s),
        offsets=offsets,
    )


def _url(addresses: Addresses, name: str, read_part: Callable[[Addresses], T | Unread]) -> _Reading[T | Unread]:
    """Read a part over HTTP, unless the user excluded it."""
    if addresses.urls[name] == NONE:
        return _Reading(lambda: Unread(why="excluded", skipped=True))
    return _Reading(lambda: read_part(addresses), url=_shown(addresses.urls[name]))


def _shown(url: str) -> str:
    try:
        return shown(url)
    except httpx.InvalidURL:
        return "invalid URL"
