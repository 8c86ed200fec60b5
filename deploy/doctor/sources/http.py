"""What the parts answer over HTTP. Each function raises httpx.HTTPError, GpuwardenError, ValueError or LookupError."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy.doctor.facts import Alertmanager, Offset, Page, Prometheus, Rule, Sample, Target, TokenAnswer
from deploy.doctor.finding import Unread
from deploy.doctor.routes import PATH, credentials_file, webhooks_of
from deploy.doctor.sources.addresses import Addresses
from deploy.standalone import package_data
from remediator.clients.exporter_access import ExporterAuth, connect
from remediator.clients.http import authorities, shown

TIMEOUT_S: Final = 3.0
"""Timeout of one request, seconds."""

SETTLED_S: Final = 20.0
SETTLE_WAIT_S: Final = 6.0
"""A Prometheus that started less than SETTLED_S ago gets this time, seconds: it finds Alertmanagers after 5 s."""

WORD_MAX: Final = 200
"""Characters of an error answer."""

_SCRAPED: Final = "gpuwarden_exporter_info and time() - timestamp(gpuwarden_exporter_info) < 90"
"""Exporters that are still scraped. Prometheus repeats a series without an end for five minutes."""

_UNITS_S: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800, "y": 31536000}
_READ: Final = ("gpuwarden_collector_success{", "gpuwarden_sample_age_seconds ", "gpuwarden_gpu_info{",
                "gpuwarden_container_gpu_attribution_missing{", "gpuwarden_worker_info{",
                "gpuwarden_container_managed{", "gpuwarden_container_info{",
                "gpuwarden_remediator_watchdog_timestamp_seconds ",
                "gpuwarden_remediator_notification_administrators ")  # fmt: skip
"""Beginnings of the lines that the checks use."""


def read_exporter(addresses: Addresses) -> Page:
    """The exporter's readiness and metrics."""
    url = addresses.urls["exporter"]
    access = ExporterAuth(**addresses.access)  # type: ignore[arg-type]
    secure = url.lower().startswith("https:")
    with connect(access, timeout_s=TIMEOUT_S) if secure or access != ExporterAuth() else _client(url) as client:
        return _page(client, url)


def read_webhook(addresses: Addresses) -> Page:
    """The webhook's readiness and metrics."""
    url = addresses.urls["remediator"]
    with _client(url) as client:
        return _page(client, url)


def _page(client: httpx.Client, url: str) -> Page:
    ready = client.get(f"{url}/-/ready")
    if not ready.is_success:
        return Page(url=shown(url), not_ready=_word(ready) or f"status {ready.status_code}", samples=())
    answer = _checked(client.get(f"{url}/metrics"))
    lines = "\n".join(line for line in answer.text.splitlines() if line.startswith(_READ))
    samples = [
        Sample(name=each.name, labels=each.labels, value=each.value)
        for family in text_string_to_metric_families(lines)
        for each in family.samples
    ]
    return Page(url=shown(url), not_ready="", samples=samples)


def read_alertmanager(addresses: Addresses) -> Alertmanager:
    """Alertmanager's configuration in use."""
    url = addresses.urls["alertmanager"]
    with _client(url) as client:
        status = _checked(client.get(f"{url}/api/v2/status")).json()
    config = yaml.safe_load(status["config"]["original"])
    if not isinstance(config, dict):
        raise ValueError("its configuration is not a mapping")  # noqa: TRY004 - an answer, not an argument
    return Alertmanager(url=shown(url), config=config, started_at=_unix_s(status.get("uptime", "")))


def token_files(addresses: Addresses, alertmanager: Alertmanager | Unread) -> list[Path]:
    """The files with the tokens that Alertmanager may send to this webhook."""
    if isinstance(alertmanager, Unread):
        return []
    files = map(credentials_file, webhooks_of(alertmanager.config, addresses.urls["remediator"]))
    return list(dict.fromkeys(Path(file) for file in files if file))


def send_token(addresses: Addresses, alertmanager: Alertmanager | Unread) -> TokenAnswer | Unread:
    """Send a call without alerts, with Alertmanager's credentials. The webhook stores nothing.

    Alertmanager may hide which token is for this webhook. Then one that is accepted suffices.
    """
    if isinstance(alertmanager, Unread):
        return Unread(why="Alertmanager's configuration is unknown")
    answers = [_send(addresses.urls["remediator"], file) for file in token_files(addresses, alertmanager)]
    if not answers:
        return Unread(why="Alertmanager's configuration names no credentials_file for the webhook")
    accepted = [each for each in answers if isinstance(each, TokenAnswer) and each.accepted]
    return next(iter(accepted), next((each for each in answers if isinstance(each, Unread)), answers[0]))


def _send(url: str, file: Path) -> TokenAnswer | Unread:
    try:
        given = file.read_text(encoding="utf-8").strip()
    except PermissionError:
        return Unread(why=f"this user may not read {file}", denied=True)
    except (OSError, UnicodeDecodeError) as error:
        return Unread(why=f"{file} of Alertmanager's configuration cannot be read here: {error}")
    with _client(url) as client:
        answer = client.post(f"{url}{PATH}", json={"alerts": []}, headers={"Authorization": f"Bearer {given}"})
    return TokenAnswer(status=answer.status_code, says=_word(answer), file=file)


def read_prometheus(addresses: Addresses, now: Callable[[], float]) -> Prometheus:
    """Prometheus' rules, Alertmanagers, the exporters that it scrapes, and its clock."""
    url = addresses.urls["prometheus"]
    with _client(url) as client:
        _checked(client.get(f"{url}/-/ready"))
        _wait_until_settled(client, url, now)
        began_s = now()
        at_s = float(_data(client, url, "query", {"query": "time()"})["result"][1])
        took_s = now() - began_s
        offset = Offset(of="Prometheus", ahead_s=at_s - began_s - took_s / 2, uncertain_s=took_s / 2)
        infos = _data(client, url, "query", {"query": _SCRAPED})["result"]
        active = _data(client, url, "targets", {"state": "active"})["activeTargets"]
        targets = _data(client, url, "alertmanagers", {})["activeAlertmanagers"]
        loaded = [
            _loaded(group["name"], rule)
            for group in _data(client, url, "rules", {"type": "alert"})["groups"]
            for rule in group["rules"]
        ]
        return Prometheus(
            url=shown(url),
            offset=offset,
            exporters=[each["metric"] for each in infos],
            down=[
                Target(job=each["labels"].get("job", ""), host=each["labels"].get("host", ""), error=each["lastError"])
                for each in active
                if each["health"] == "down"
            ],
            alertmanagers=[str(each["url"]).split("/api/")[0] for each in targets],
            loaded=[_formatted(client, url, each) for each in loaded],
            shipped=[_formatted(client, url, each) for each in shipped_rules()],
        )


def _wait_until_settled(client: httpx.Client, url: str, now: Callable[[], float]) -> None:
    """Wait for the first scrape and the Alertmanagers of a Prometheus that has just started."""
    end_s = time.monotonic() + SETTLE_WAIT_S
    started_at = _unix_s(_data(client, url, "status/runtimeinfo", {}).get("startTime", ""))
    while started_at is not None and now() - started_at < SETTLED_S and time.monotonic() < end_s:
        if (
            _data(client, url, "alertmanagers", {})["activeAlertmanagers"]
            and _data(client, url, "query", {"query": _SCRAPED})["result"]
        ):
            return
        time.sleep(0.2)


def shipped_rules() -> Iterator[Rule]:
    """This version's alerting rules."""
    for file in package_data.rules():
        for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]:
            for rule in group["rules"]:
                if "alert" in rule:
                    yield Rule(
                        group=group["name"],
                        name=rule["alert"],
                        query=rule["expr"],
                        for_s=seconds(str(rule.get("for", "0s"))),
                        labels=rule.get("labels", {}),
                        annotations=rule.get("annotations", {}),
                    )


def seconds(duration: str) -> float:
    """Seconds of a duration as Prometheus writes it: `1h30m`."""
    return sum(float(number) * _UNITS_S[unit] for number, unit in re.findall(r"(\d+)(ms|[smhdwy])", duration))


def _loaded(group: str, rule: Mapping[str, Any]) -> Rule:
    return Rule(
        group=group,
        name=rule["name"],
        query=rule["query"],
        for_s=float(rule["duration"]),
        labels=rule.get("labels") or {},
        annotations=rule.get("annotations") or {},
        error=rule.get("lastError", "") if rule.get("health") == "err" else "",
    )


def _formatted(client: httpx.Client, url: str, rule: Rule) -> Rule:
    """A rule with its query as this server formats it, so that two spellings compare equal."""
    return Rule(**{**vars(rule), "query": _data(client, url, "format_query", {"query": rule.query})})


def _data(client: httpx.Client, url: str, path: str, asked: Mapping[str, str]) -> Any:
    return _checked(client.get(f"{url}/api/v1/{path}", params=dict(asked))).json()["data"]


def _client(url: str) -> httpx.Client:
    """A client. Plain HTTP loads no authorities, which takes 30 ms."""
    secure = url.lower().startswith("https:")
    return httpx.Client(timeout=TIMEOUT_S, trust_env=False, verify=authorities() if secure else False)


def _checked(answer: httpx.Response) -> httpx.Response:
    if not answer.is_success:
        raise ValueError(f"status {answer.status_code} at {answer.url.path}: {_word(answer)}")
    return answer


def _unix_s(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _word(answer: httpx.Response) -> str:
    return " ".join(answer.text[:WORD_MAX].split())
