"""Prometheus remembers hosts after a long outage, which promtool cannot simulate."""

import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx

from deploy.standalone import debian_packages
from tests.waiting import eventually

RULES = Path(__file__).parents[2] / "alerts" / "host.rules.yaml"
DOWN_S = 600


def test_last_scrapes_survive_a_long_outage_of_prometheus(tmp_path: Path) -> None:
    heard_s = int(time.time()) - DOWN_S
    with prometheus(tmp_path, heard_s=heard_s) as query:
        eventually(lambda: query("gpuwarden:host_last_scrape:timestamp_seconds") == {"b": heard_s}, within_s=30)
        (blind_s,) = query("gpuwarden:no_host_scraped:timestamp_seconds").values()

    assert blind_s > heard_s + DOWN_S - 60, "no host was scraped in that time"


@contextmanager
def prometheus(work: Path, *, heard_s: int) -> Iterator[Callable[[str], dict[str, float]]]:
    """Run a Prometheus without targets, with the record of host b from before its outage."""
    history = work / "history"
    history.write_text(
        "# TYPE gpuwarden:host_last_scrape:timestamp_seconds gauge\n"
        f'gpuwarden:host_last_scrape:timestamp_seconds{{host="b"}} {heard_s} {heard_s}\n# EOF\n',
        encoding="ascii",
    )
    promtool: list[str | Path] = [
        debian_packages.find("promtool"),
        "tsdb",
        "create-blocks-from",
        "openmetrics",
        history,
        work / "data",
    ]
    subprocess.run(promtool, env=debian_packages.env_for_parts(), capture_output=True, check=True)
    config = work / "prometheus.yml"
    config.write_text(json.dumps({"global": {"evaluation_interval": "1s"}, "rule_files": [str(RULES)]}), "ascii")
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    prometheus = str(debian_packages.find("prometheus"))
    command = [prometheus, f"--config.file={config}", f"--storage.tsdb.path={work / 'data'}",
               f"--web.listen-address={address}"]  # fmt: skip
    with (
        (work / "log").open("wb") as log,
        subprocess.Popen(command, env=debian_packages.env_for_parts(), stderr=log) as server,
        httpx.Client(base_url=f"http://{address}", trust_env=False) as http,
    ):

        def query(expression: str) -> dict[str, float]:
            try:
                found = http.get("/api/v1/query", params={"query": expression}).json()
            except (httpx.HTTPError, json.JSONDecodeError):
                return {}  # it still starts
            return {each["metric"].get("host", ""): float(each["value"][1]) for each in found["data"]["result"]}

        try:
            yield query
        finally:
            server.terminate()
