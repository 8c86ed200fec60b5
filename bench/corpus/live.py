"""Play scenarios in real time to a real Prometheus, which they kill and restart.

promtool cannot simulate a killed Prometheus: its log, its stale series, the restart of its scrapes. These scenarios
are short, with timeouts of seconds. Every second of the exporters is played, however late a scrape is.
"""

import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import httpx

from bench.corpus.host import Host
from bench.corpus.judge import JudgeError, Played, metrics, parse_alert
from bench.corpus.scenario import Scenario
from deploy.standalone import debian_packages
from exporter.http.exposition import TEXT
from testbed.check_release import CHECKOUT, RULES_GLOB

LIVE: Final = Path(__file__).with_name("live")
"""Folder of these scenarios."""

LATE_S: Final = 10
"""How much later than promtool a real Prometheus may fire, seconds."""

UP_S: Final = 60
"""Timeout of its start, and of its first scrapes, seconds."""


def play(scenario: Scenario, folder: Path, rules: Iterable[Path] | None = None) -> Played:
    """Play one scenario in real time.

    Args:
        scenario: to play.
        folder: of this Prometheus.
        rules: rule files; ours by default.

    Raises:
        PartMissing: Prometheus is not installed.
        JudgeError: it does not start or answer.
    """
    rules = sorted(CHECKOUT.glob(RULES_GLOB)) if rules is None else list(rules)
    targets = _Targets(scenario, metrics(rules))
    with targets.serve() as address:
        prometheus = _Prometheus(debian_packages.find("prometheus"), folder, scenario, rules, address, targets.names)
        try:
            prometheus.start()
            began_s = targets.begin()
            for at_s, state in (*scenario.prometheus, (scenario.plays_s, "ends")):
                time.sleep(max(0.0, began_s + at_s - time.time()))
                if state == "down":
                    prometheus.kill()
                elif state == "up":
                    prometheus.start()
            firing = prometheus.firing()
        finally:
            prometheus.kill()
    alerts = (parse_alert(labels, at_s=int(first_s - began_s)) for labels, first_s in firing)
    return Played(scenario=replace(scenario, late_s=LATE_S), fired=tuple(each for each in alerts if each is not None))


class _Targets:
    """The exporters of a scenario's hosts, one page each; status 503 if a scrape fails."""

    def __init__(self, scenario: Scenario, wanted: frozenset[str]) -> None:
        names = sorted({each.host for each in scenario.programs} | set(scenario.hosts))
        self._hosts = {name: Host(name, scenario) for name in names}
        self._wanted = wanted
        self._scraped = {name: threading.Event() for name in names}
        self._began_s: float | None = None
        self._played_s = -1
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        return list(self._hosts)

    def begin(self) -> float:
        """Start the scenario after the first scrape of each host; return the start, Unix seconds.

        Raises:
            JudgeError: a host is not scraped.
        """
        for name, scraped in self._scraped.items():
            if not scraped.wait(UP_S):
                raise JudgeError(f"Prometheus does not scrape host {name}")
        self._began_s = time.time()
        return self._began_s

    def page(self, name: str) -> str:
        """The current page of this host; empty if the scrape fails."""
        self._scraped[name].set()
        if self._began_s is None:
            return ""
        with self._lock:
            now_s = int(time.time() - self._began_s)
            for second in range(self._played_s + 1, now_s + 1):
                for host in self._hosts.values():
                    host.play(second)
            self._played_s = max(self._played_s, now_s)
            found = self._hosts[name].scrape(self._played_s, self._wanted, list(self._hosts.values()))
        return "".join(
            f"{metric}{{{','.join(f'{label}={json.dumps(text)}' for label, text in labels)}}} {value!r}\n"
            for (metric, labels), value in found.items()
        )

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Serve the pages; yields the address."""
        its = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = its.page(self.path.strip("/"))
                with suppress(ConnectionError):  # Prometheus was killed
                    self.send_response(200 if page else 503)
                    self.send_header("Content-Type", TEXT)  # Prometheus 3 requires it
                    self.end_headers()
                    self.wfile.write(page.encode())

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()


class _Prometheus:
    """A Prometheus that can be killed and restarted in its folder."""

    def __init__(
        self,
        program: Path,
        folder: Path,
        scenario: Scenario,
        rules: Sequence[Path],
        address: str,
        hosts: Sequence[str],
    ) -> None:
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._folder = folder
        self._url = f"http://127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "global": {"scrape_interval": f"{scenario.scrape_s}s", "scrape_timeout": f"{scenario.scrape_s}s",
                       "evaluation_interval": f"{scenario.evaluate_s}s"},
            "rule_files": [str(path) for path in rules],
            "scrape_configs": [
                {"job_name": host, "metrics_path": f"/{host}", "static_configs": [{"targets": [address]}]}
                for host in hosts
            ],
        }  # fmt: skip
        (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")  # which is YAML
        self._command = [
            *(str(program), f"--config.file={folder}/prometheus.yml"),
            *(f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"),
        ]

    def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command, env=debian_packages.env_for_parts(), stdout=log, stderr=log)
        until_s = time.monotonic() + UP_S
        while not self._is_ready():
            if time.monotonic() > until_s or self._process.poll() is not None:
                raise JudgeError(f"Prometheus did not start, see {self._folder / 'log'}")
            time.sleep(0.1)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def firing(self) -> Iterator[tuple[dict[str, str], float]]:
        """Labels of each fired alert, and its first time, Unix seconds."""
        alerts = self._get("/api/v1/query", query='ALERTS{alertstate="firing"}[1h]').json()["data"]["result"]
        return ((each["metric"], float(each["values"][0][0])) for each in alerts)

    def _is_ready(self) -> bool:
        with suppress(JudgeError):
            return self._get("/-/ready").is_success
        return False

    def _get(self, path: str, **parameters: str) -> httpx.Response:
        try:
            return httpx.get(f"{self._url}{path}", params=parameters, trust_env=False, timeout=10).raise_for_status()
        except httpx.HTTPError as error:
            raise JudgeError(f"Prometheus did not answer: {error}") from error
