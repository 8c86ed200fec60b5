"""Send the exporter's page to a central gateway, for a host that cannot be scraped.

Each report is made when it is sent. So while the gateway is away nothing is kept, and the newest page is sent after it.
"""

import gzip
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

import structlog
from prometheus_client.core import Metric

from exporter.http import exposition
from exporter.http.server import GZIP_LEVEL
from gpuwarden import __version__
from gpuwarden.errors import GpuwardenError
from gpuwarden.files import ReloadingFile
from gpuwarden.format import error_text, format_duration
from gpuwarden.http.address import checked_address, tls_context

PATH: Final = "/api/v1/report"

ANSWER_S: Final = 10.0
"""Longest wait for an answer, seconds."""

RETRY_MAX_S: Final = 60.0
"""Longest time between two tries, seconds. The gateway publishes a report for longer."""

START_S: Final = 3.0
"""Latest first report, seconds."""

JITTER: Final = 0.2
"""Part of each wait that is random, so that hosts do not report together."""

LOG_S: Final = 60.0
"""Least time between log lines while reports fail, seconds."""

ANSWER_MAX_BYTES: Final = 4096

ADVICE: Final = {
    401: "make a token with `gpuwarden host enrol` and write it to --token-file",
    403: "use the token of this host: its name is in the file `host` of --runtime-dir",
    404: "check that --push is the address of `gpuwarden gateway central` of the same release",
}
"""What to do, by status."""

_UNANSWERED: Final = "check --push, --ca-file, and the gateway"

log: Final = structlog.get_logger("exporter")


class Push:
    """Sends the page on an interval, from a thread.

    Args:
        url: the address of the central gateway.
        token_file: file with this host's token. A changed file is read again.
        ca_file: authorities that signed the gateway's certificate; default: those of the system.
        families: the metrics.
        interval_s: time between two reports, seconds.
        tasks: whether tasks of other runners are reported.

    Raises:
        GpuwardenError: the address or a file is invalid.
    """

    def __init__(
        self,
        url: str,
        token_file: Path,
        *,
        ca_file: Path | None,
        families: Callable[[], Iterable[Metric]],
        interval_s: float,
        tasks: bool,
    ) -> None:
        self._url = checked_address(url) + PATH
        self._families, self._interval_s, self._tasks = families, interval_s, tasks
        try:
            self._token = ReloadingFile([token_file], lambda: token_file.read_text(encoding="ascii").strip())
        except (OSError, ValueError) as error:
            raise GpuwardenError(f"cannot read the token of --push: {error}") from None
        tls = urllib.request.HTTPSHandler(context=tls_context(ca_file))
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), tls, _NoRedirect())
        self._failures = _Failures()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="push", daemon=True)

    def start(self) -> None:
        """Send the first report soon."""
        self._thread.start()

    def close(self) -> None:
        """Send no further report. A request that waits for its answer is not waited for."""
        self._ending.set()

    def _run(self) -> None:
        wait_s = random.uniform(0, min(START_S, self._interval_s))  # noqa: S311
        retry_s = self._interval_s
        while not self._ending.wait(wait_s):
            failure = self._send()
            if self._ending.is_set():
                return
            retry_s = self._interval_s if failure is None else min(retry_s * 2, max(RETRY_MAX_S, self._interval_s))
            wait_s = retry_s * random.uniform(1 - JITTER, 1)  # noqa: S311
            self._failures.note(failure, url=self._url)

    def _send(self) -> str | None:
        """Send a report. Returns the reason of a failure, or `None`."""
        headers = {
            "Content-Type": exposition.TEXT,
            "Content-Encoding": "gzip",
            "User-Agent": f"gpuwarden/{__version__}",
        }
        try:
            self._token.reload()
            headers["Authorization"] = f"Bearer {self._token.value}"
            request = urllib.request.Request(self._url, self._page(), headers)  # noqa: S310 - checked
            with self._opener.open(request, timeout=ANSWER_S):
                return None
        except urllib.error.HTTPError as error:
            with error:
                return _refusal(error)
        except urllib.error.URLError as error:
            return f"{error.reason}: {_UNANSWERED}"
        except (OSError, ValueError, HTTPException, GpuwardenError) as error:
            return f"{error_text(error)}: {_UNANSWERED}"
        except Exception as error:  # a collector: the next report may succeed
            log.exception("report not made")
            return error_text(error)

    def _page(self) -> bytes:
        its = (each for each in self._families() if each.name.startswith("gpuwarden_"))
        page = exposition.render(each for each in its if self._tasks or not each.name.startswith("gpuwarden_task"))
        return gzip.compress(page, GZIP_LEVEL)


class _Failures:
    """Logs the first report, the first failure, one failure a minute, and the end of failures."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._logged_s = 0.0
        self._accepted = False

    def note(self, failure: str | None, *, url: str) -> None:
        now_s = time.monotonic()
        if failure is None:
            if not self._accepted or self._since_s is not None:
                lasted = {} if self._since_s is None else {"after": format_duration(now_s - self._since_s)}
                log.info("reports accepted", url=url, **lasted)
            self._accepted, self._since_s = True, None
            return
        if self._since_s is None:
            self._since_s, self._logged_s = now_s, -LOG_S
        if now_s - self._logged_s >= LOG_S:
            self._logged_s = now_s
            log.warning("report not accepted, trying again", url=url, reason=failure,
                        since=format_duration(now_s - self._since_s))  # fmt: skip


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would take the token to another address."""

    def redirect_request(self, *_: Any) -> None:
        """Follow none."""


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        reason = str(json.loads(error.read(ANSWER_MAX_BYTES))["error"]["reason"])
    except (OSError, ValueError, KeyError, TypeError, HTTPException):
        reason = f"{error.reason}; {_UNANSWERED}" if error.code not in ADVICE else str(error.reason)
    advice = ADVICE.get(error.code)
    return f"{error.code}: {reason}" + (f": {advice}" if advice else "")
