"""Stand-in for the Prometheus operator: its schemas, and the configuration that it makes of its objects.

The schemas are those of PyPI's cloudcoil models, which are made from the operator's own. No package index has the
operator itself.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

Schema = dict[str, Any]

_GROUP: Final = "monitoring.coreos.com"
KINDS: Final = MappingProxyType({"PodMonitor": "v1", "PrometheusRule": "v1", "AlertmanagerConfig": "v1alpha1"})
"""Version of each kind that the manifests have."""
_LEFT_OUT: Final = ("title", "default", "description")


@functools.cache
def schema(kind: str) -> Schema:
    """JSON schema of a kind. It refuses unknown fields."""
    from cloudcoil.models.prometheus_operator import v1, v1alpha1  # noqa: PLC0415 - 1 s, and few tests use it

    whole = getattr({"v1": v1, "v1alpha1": v1alpha1}[KINDS[kind]], kind).model_json_schema(by_alias=True)
    # The API server itself checks the metadata.
    properties = whole["properties"] | {"metadata": {"type": "object"}}
    return _resolved({**whole, "properties": properties}, whole["$defs"])


def _resolved(its: Schema, definitions: Schema) -> Schema:
    """A schema without references and without `null`: an object leaves a field out instead."""
    if "$ref" in its:
        return _resolved(definitions[its["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in its:
        kinds = [each for each in its["anyOf"] if each != {"type": "null"}]
        if len(kinds) == 1:
            return _resolved(kinds[0], definitions)
        # Numbers and quantities, the only alternatives of these schemas.
        return {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]}
    made = {key: value for key, value in its.items() if key not in (*_LEFT_OUT, "$defs")}
    if "const" in made:
        made["enum"] = [made.pop("const")]
    if "properties" in made:
        made["properties"] = {name: _resolved(each, definitions) for name, each in made["properties"].items()}
        made["additionalProperties"] = False
    elif isinstance(made.get("additionalProperties"), dict):
        made["additionalProperties"] = _resolved(made["additionalProperties"], definitions)
    if "items" in made:
        made["items"] = _resolved(made["items"], definitions)
    return made


def definition(kind: str) -> Schema:
    """CustomResourceDefinition of a kind, as an API server accepts it."""
    plural = f"{kind.lower()}s"
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    version = {"name": KINDS[kind], "served": True, "storage": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{_GROUP}"},
        "spec": {
            "group": _GROUP,
            "names": names,
            "scope": "Namespaced",
            "versions": [{**version, "schema": {"openAPIV3Schema": _structural(schema(kind))}}],
        },
    }


def _structural(its: Any) -> Any:
    """A schema as the API server takes it, which drops unknown fields by itself."""
    if isinstance(its, list):
        return [_structural(each) for each in its]
    if not isinstance(its, dict):
        return its
    if not its:
        return {"x-kubernetes-preserve-unknown-fields": True}
    return {key: _structural(value) for key, value in its.items() if (key, value) != ("additionalProperties", False)}


def alertmanager_config(
    configs: Sequence[Mapping[str, Any]], base: Mapping[str, Any], secret: Callable[[str, str], str]
) -> dict[str, Any]:
    """The configuration of an Alertmanager with `alertmanagerConfigMatcherStrategy: {type: None}`.

    The routes of the objects come before those of `base`, and continue. `secret` reads a key of a secret.
    """
    routes, receivers, inhibitions = [], [], []
    for config in configs:
        its, prefix = config["spec"], f"{config['metadata']['namespace']}/{config['metadata']['name']}"
        inhibitions += [_snake(each) for each in its.get("inhibitRules", ())]
        routes.append({**_snake(its["route"]), "receiver": f"{prefix}/{its['route']['receiver']}", "continue": True})
        for receiver in its["receivers"]:
            webhooks = [_snake(each) for each in receiver["webhookConfigs"]]
            for each in webhooks:
                authorization = each["http_config"]["authorization"]
                named = authorization.pop("credentials")
                authorization["credentials"] = secret(named["name"], named["key"])
            receivers.append({"name": f"{prefix}/{receiver['name']}", "webhook_configs": webhooks})
    route = {**base["route"], "routes": [*routes, *base["route"].get("routes", ())]}
    return {"route": route, "receivers": [*receivers, *base["receivers"]], "inhibit_rules": inhibitions}


def scrape_configs(
    monitor: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], secret: Callable[[str, str], str]
) -> list[dict[str, Any]]:
    """The scrape configurations of a PodMonitor.

    Debian's Prometheus cannot ask Kubernetes. The targets of `pods` have the labels that it would give them.
    """
    its, space = monitor["spec"], monitor["metadata"]["namespace"]
    pod = "__meta_kubernetes_pod_"
    targets = [target for each in pods for target in _targets(each)]
    configs = []
    for number, endpoint in enumerate(its["podMetricsEndpoints"]):
        keep = [
            {"action": "keep", "source_labels": [f"{pod}label_{_label(name)}"], "regex": value}
            for name, value in its["selector"]["matchLabels"].items()
        ]
        keep.append({"action": "keep", "source_labels": [f"{pod}container_port_name"], "regex": endpoint["port"]})
        own = [
            {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
            {"source_labels": [f"{pod}container_name"], "target_label": "container"},
            {"source_labels": [f"{pod}name"], "target_label": "pod"},
            {"target_label": "job", "replacement": f"{space}/{monitor['metadata']['name']}"},
            {"target_label": "endpoint", "replacement": endpoint["port"]},
        ]
        config: dict[str, Any] = {
            "job_name": f"podMonitor/{space}/{monitor['metadata']['name']}/{number}",
            "static_configs": targets,
            "scrape_interval": endpoint["interval"],
            "relabel_configs": [*keep, *own, *(_snake(each) for each in endpoint["relabelings"])],
        }
        if named := endpoint.get("authorization"):
            credentials = named["credentials"]
            config["authorization"] = {"credentials": secret(credentials["name"], credentials["key"])}
        configs.append(config)
    return configs


def _targets(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A target for each port of a pod."""
    its, prefix = pod["metadata"], "__meta_kubernetes_pod_"
    labels = {f"{prefix}label_{_label(name)}": value for name, value in its["labels"].items()}
    labels |= {
        "__meta_kubernetes_namespace": its["namespace"],
        f"{prefix}name": its["name"],
        f"{prefix}node_name": pod["spec"]["nodeName"],
    }
    return [
        {
            "targets": [f"{pod['status']['podIP']}:{port['containerPort']}"],
            "labels": {
                **labels,
                f"{prefix}container_name": container["name"],
                f"{prefix}container_port_name": port["name"],
            },
        }
        for container in pod["spec"]["containers"]
        for port in container.get("ports", ())
    ]


def _label(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _snake(its: Mapping[str, Any]) -> dict[str, Any]:
    """Fields and matchers as Prometheus and Alertmanager name them."""
    made: dict[str, Any] = {}
    for key, value in its.items():
        if key in ("matchers", "sourceMatch", "targetMatch"):
            name = {"sourceMatch": "source_matchers", "targetMatch": "target_matchers"}.get(key, key)
            made[name] = [f'{each["name"]}{each["matchType"]}"{each["value"]}"' for each in value]
        else:
            name = re.sub(r"[A-Z]", lambda found: f"_{found[0].lower()}", key)
            made[name] = _snake(value) if isinstance(value, dict) else value
    return made
