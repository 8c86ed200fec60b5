"""A real Alertmanager for tests of the webhook: one receiver, and alerts that it is told of."""

import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import yaml

from deploy import parts
from tests.waiting import eventually

RECEIVER = "gpuwarden (its own)"


@contextmanager
def alertmanager(folder: Path, **webhook: Any) -> Iterator[str]:
    """Its address, while it runs; `webhook` is its receiver's webhook_config."""
    folder.mkdir()
    route = {"receiver": RECEIVER, "group_wait": "1s", "group_interval": "1s", "repeat_interval": "1h"}
    receivers = [{"name": RECEIVER, "webhook_configs": [webhook]}]
    (folder / "alertmanager.yml").write_text(yaml.safe_dump({"route": route, "receivers": receivers}))
    command = [
        *(str(parts.find("alertmanager")), f"--config.file={folder}/alertmanager.yml", f"--storage.path={folder}/data"),
        *("--web.listen-address=127.0.0.1:0", "--cluster.listen-address=", "--log.format=json"),
    ]
    log = folder / "log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, env=parts.env_for_parts(), stdout=stderr, stderr=stderr)
    try:
        listens = re.compile(r'"address":"(127\.0\.0\.1:\d+)"')
        found = eventually(lambda: listens.search(log.read_text()), "Alertmanager listens", log=log.read_text)
        url = f"http://{found[1]}"
        eventually(lambda: httpx.get(f"{url}/-/ready", trust_env=False).is_success, "it is ready", log=log.read_text)
        yield url
    finally:
        process.kill()
        process.wait()


def tell(url: str, *labels: Mapping[str, str]) -> None:
    """Tell it of alerts that fire, as Prometheus does."""
    starts_at = datetime.now(UTC).isoformat()
    fire = [{"labels": dict(each), "annotations": {"summary": "wedged"}, "startsAt": starts_at} for each in labels]
    httpx.post(f"{url}/api/v2/alerts", json=fire, trust_env=False).raise_for_status()
