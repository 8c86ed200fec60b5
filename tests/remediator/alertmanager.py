"""A real Alertmanager with one receiver, and calls to send and silence alerts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import yaml

from deploy.standalone import debian_packages
from tests.asking import PLAIN
from tests.remediator.listening import listening

RECEIVER = "gpuwarden (its own)"


@contextmanager
def alertmanager(folder: Path, **webhook: Any) -> Iterator[str]:
    """Run an Alertmanager whose receiver has this `webhook_config`. Yields its URL."""
    folder.mkdir()
    route = {"receiver": RECEIVER, "group_wait": "1s", "group_interval": "1s", "repeat_interval": "1h"}
    receivers = [{"name": RECEIVER, "webhook_configs": [webhook]}]
    (folder / "alertmanager.yml").write_text(yaml.safe_dump({"route": route, "receivers": receivers}))
    command = [
        *(
            str(debian_packages.find("alertmanager")),
            f"--config.file={folder}/alertmanager.yml",
            f"--storage.path={folder}/data",
        ),
        *("--web.listen-address=127.0.0.1:0", "--cluster.listen-address=", "--log.format=json"),
    ]
    with listening(command, folder / "log") as url:
        yield url


def send_alerts(url: str, *labels: Mapping[str, str], firing: bool = True) -> None:
    """Send alerts that fire or are resolved, as Prometheus does."""
    now = datetime.now(UTC).isoformat()
    times = {"startsAt": now} if firing else {"startsAt": now, "endsAt": now}
    fire = [{"labels": dict(each), "annotations": {"summary": "stalled"}, **times} for each in labels]
    httpx.post(f"{url}/api/v2/alerts", json=fire, trust_env=False, verify=PLAIN).raise_for_status()


def silence(url: str, *, comment: str = "known", is_regex: bool = False, **labels: str) -> str:
    """Silence alerts with these labels for an hour. Returns the id of the silence."""
    now = datetime.now(UTC)
    matchers = [{"name": name, "value": value, "isRegex": is_regex} for name, value in labels.items()]
    times = {"startsAt": now.isoformat(), "endsAt": (now + timedelta(hours=1)).isoformat()}
    asked = {"matchers": matchers, **times, "createdBy": "ann", "comment": comment}
    answer = httpx.post(f"{url}/api/v2/silences", json=asked, trust_env=False, verify=PLAIN).raise_for_status()
    return str(answer.json()["silenceID"])


def expire(url: str, silence_id: str) -> None:
    """End a silence."""
    httpx.delete(f"{url}/api/v2/silence/{silence_id}", trust_env=False, verify=PLAIN).raise_for_status()
