"""Objects of the Prometheus operator, from the alert rules and from the routes of `gpuwarden init`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from deploy.standalone import package_data
from deploy.standalone.config_files import KNOWN, Intervals, alertmanager_config
from gpuwarden.docs_pages import RUNBOOKS

SERVICE: Final = "http://gpuwarden-remediator.gpuwarden:9836"
EVALUATE_S: Final = 5
"""Interval of rules with a remedy. Prometheus evaluates them for all nodes."""

Object = dict[str, Any]


def rules() -> str:
    """A PrometheusRule for each rule file, whose text it has as it is."""
    documents = []
    for path in package_data.rules():
        name = path.name.removesuffix(".rules.yaml").replace("_", "-")
        text = package_data.rule_file(path, runbooks_url=f"{SERVICE}/{RUNBOOKS}", evaluation_interval_s=EVALUATE_S)
        documents.append(
            "apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\n"
            f"metadata:\n  name: gpuwarden-{name}\nspec:\n{_indented(text)}"
        )
    return "---\n".join(documents)


def _indented(text: str) -> str:
    return "".join(f"  {line}" if line.strip() else line for line in text.splitlines(keepends=True))


def alertmanager() -> str:
    """Two AlertmanagerConfigs, because all routes of one must match those of its first."""
    webhook = f"{SERVICE}/api/v1/alerts"
    config = yaml.safe_load(alertmanager_config(webhook=webhook, token_file=Path("token"), intervals=Intervals()))
    watchdog, remedies = (_camel(each) for each in config["route"]["routes"] if each["receiver"] == "gpuwarden")
    # All other alerts stay with the routes of Alertmanager itself, also those that the remediator would refuse.
    remedies["matchers"] = _matchers([f'remedy=~"{KNOWN}"', 'host=~".+"'])
    inhibitions = [_camel(each) for each in config["inhibit_rules"]]
    objects = [
        _config("gpuwarden-watchdog", watchdog, webhook),
        _config("gpuwarden-remedies", remedies, webhook, inhibitRules=inhibitions),
    ]
    return "---\n".join(yaml.safe_dump(each, sort_keys=False, width=1000) for each in objects)


def _config(name: str, route: Object, webhook: str, **more: object) -> Object:
    authorization = {"credentials": {"name": "gpuwarden-web", "key": "token"}}
    webhooks = [{"url": webhook, "sendResolved": True, "httpConfig": {"authorization": authorization}}]
    receivers = [{"name": route["receiver"], "webhookConfigs": webhooks}]
    kind = {"apiVersion": "monitoring.coreos.com/v1alpha1", "kind": "AlertmanagerConfig", "metadata": {"name": name}}
    return {**kind, "spec": {"route": route, **more, "receivers": receivers}}


def _camel(its: Mapping[str, Any]) -> Object:
    """A route or an inhibition as the operator names it."""
    named = {"source_matchers": "sourceMatch", "target_matchers": "targetMatch"}
    made: Object = {}
    for key, value in its.items():
        name = named.get(key, re.sub(r"_(\w)", lambda found: found[1].upper(), key))
        made[name] = _matchers(value) if key.endswith("matchers") else value
    return made


def _matchers(texts: Sequence[str]) -> list[Object]:
    matchers = []
    for text in texts:
        name, kind, value = re.fullmatch(r'(\w+)(=~|!~|!=|=)"(.*)"', text).groups()  # type: ignore[union-attr]
        if not value:
            # Helm 4 with Kubernetes 1.20 applies an empty text as null.
            kind, value = {"=": "!~", "!=": "=~"}[kind], ".+"
        matchers.append({"name": name, "matchType": kind, "value": value})
    return matchers
