"""Write the objects of the Prometheus operator, and the templates of the Helm chart from the Kustomize manifests.

    python -m testbed.chart [--check]

With `--check` nothing is written, and the exit status is 1 if a file is out of date. Values replace what users change:
image, resources, node selector, settings, namespace. Everything else is copied as Kustomize renders it.
"""

import argparse
import difflib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

import yaml

import deploy
from testbed import operator_objects

MANIFESTS: Final = Path(deploy.__file__).parent / "kubernetes"
CHART: Final = Path(deploy.__file__).parent / "helm"
COMMAND: Final = "python -m testbed.chart"
SPACE: Final = "gpuwarden"
SETTINGS: Final = "gpuwarden-settings"
STORAGES: Final = MappingProxyType({"sqlite": "one-node", "postgres": "postgres"})
"""Overlays by the value `storage`."""

OPTIONS: Final = MappingProxyType(
    {
        "admission": "{{- if .Values.admission.enabled }}",
        "taint": "{{- if .Values.taint.enabled }}",
        "demand-gate": "{{- range $space, $names := .Values.demandGate.deployments }}",
        "evict": "{{- range $space := .Values.evict.namespaces }}",
        "operator": "{{- if .Values.operator.enabled }}",
    }
)
"""Folders of optional objects, and when the chart has them."""

_SPACE: Final = "⟪$.Release.Namespace⟫"
_HEADER: Final = f"{{{{- /* Written by {COMMAND} from deploy/kubernetes. Do not edit. */ -}}}}\n"
_RESOURCES: Final = MappingProxyType({"gpuwarden-gateway": {"gateway": "centralGateway"}})
"""Names in the value `resources`, by workload and container. Others have the container's name."""

Object = dict[str, Any]


def kustomize(folder: Path) -> list[Object]:
    """The objects of a kustomization. The ConfigMap has its name without the hash.

    Raises:
        CalledProcessError: kubectl refuses it.
    """
    kubectl = Path(sys.executable).with_name("kubectl")
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=True)
    return load(re.sub(rf"{SETTINGS}-\w{{10}}\b", SETTINGS, done.stdout))


class _Loader(yaml.SafeLoader):
    """Reads `=` as a text, as Go's programs write it."""


_Loader.yaml_implicit_resolvers = {
    first: resolvers for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items() if first != "="
}


def load(text: str) -> list[Object]:
    """Objects that kubectl or Helm wrote."""
    return [each for each in yaml.load_all(text, _Loader) if each]


def for_operator() -> dict[Path, str]:
    """Content of the generated objects of the Prometheus operator by path."""
    header = f"# Written by {COMMAND}. Do not edit.\n"
    made = {"alertmanager.yaml": operator_objects.alertmanager(), "rules.yaml": operator_objects.rules()}
    return {MANIFESTS / "operator" / name: header + text for name, text in made.items()}


def files() -> dict[Path, str]:
    """Content of the generated templates by path."""
    overlays = {storage: kustomize(MANIFESTS / "overlays" / name) for storage, name in STORAGES.items()}
    made = {
        "_defaults.tpl": '{{- define "gpuwarden.defaults" }}\n'
        + _either({storage: _dump(_settings(its)) for storage, its in overlays.items()})
        + "{{- end }}\n",
        "install.yaml": _either(
            {
                storage: templates(
                    [each for each in its if each["kind"] != "Namespace" and each["metadata"]["name"] != SETTINGS]
                )
                for storage, its in overlays.items()
            }
        ),
    }
    for name, condition in OPTIONS.items():
        space = "⟪$space⟫" if "$space" in condition else _SPACE
        made[f"{name}.yaml"] = f"{condition}\n{templates(kustomize(MANIFESTS / name), space)}{{{{- end }}}}\n"
    return {CHART / "templates" / name: _HEADER + text for name, text in made.items()}


def _settings(objects: Sequence[Object]) -> dict[str, str]:
    (settings,) = (each for each in objects if each["metadata"]["name"] == SETTINGS)
    found: dict[str, str] = settings["data"]
    return found


def templates(objects: Sequence[Object], space: str = _SPACE) -> str:
    """Templates of objects. An object without a namespace gets `space`."""
    for each in objects:
        if not each["kind"].startswith(("Cluster", "Validating")):
            each["metadata"]["namespace"] = _SPACE if each["metadata"].get("namespace") else space
        for subject in each.get("subjects", ()):
            subject["namespace"] = _SPACE
        for rule in each.get("rules", ()):
            if rule.get("resourceNames") == ["NAME"]:
                rule["resourceNames"] = _Block("$names")
        if each["apiVersion"].startswith("monitoring.coreos.com/"):
            each["metadata"]["labels"] = _Block("$.Values.operator.labels", optional=True)
        if each["kind"] == "ResourceQuota":
            (scope,) = each["spec"]["scopeSelector"]["matchExpressions"]
            scope["values"] = ["⟪$.Values.priorityClassName⟫"]
        if "template" in each.get("spec", {}):
            _add_values(each)
    text = "".join(f"---\n{_dump(each)}" for each in objects)
    text = text.replace(f":{SPACE}:", f":{_SPACE}:").replace(f".{SPACE}:", f".{_SPACE}:")
    return _expressions(text.replace("gpuwarden/vram-mib", "⟪$.Values.resourceName⟫"))


def _add_values(workload: Object) -> None:
    template, name = workload["spec"]["template"], workload["metadata"]["name"]
    spec = template["spec"]
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        container["image"] = '⟪include "gpuwarden.image" $⟫'
        if "resources" in container:
            known = _RESOURCES.get(name, {}).get(container["name"], container["name"])
            container["resources"] = _Block(f"$.Values.resources.{known}")
        if any(SETTINGS in str(each) for each in container.get("envFrom", ())):
            annotations = template["metadata"].setdefault("annotations", {})
            annotations["checksum/settings"] = '⟪include "gpuwarden.settings" $ | sha256sum⟫'
    for key in ("nodeSelector", "tolerations"):
        if key in spec:
            spec[key] = _Block(f"$.Values.{key}")
    if "priorityClassName" in spec:
        spec["priorityClassName"] = "⟪$.Values.priorityClassName⟫"
    spec["imagePullSecrets"] = _Block("$.Values.image.pullSecrets", optional=True)
    if "nodeSelector" in spec:
        spec["runtimeClassName"] = _Block("$.Values.runtimeClassName", optional=True)


class _Block(str):
    """A value as YAML. An optional one is left out while it is empty."""

    __slots__ = ()

    def __new__(cls, value: str, *, optional: bool = False) -> Self:
        return super().__new__(cls, f"«{'?' if optional else ''}{value}»")


class _Dumper(yaml.SafeDumper):
    """Dumps long texts as blocks, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - as the base class has it
        return True


_Dumper.add_representer(_Block, lambda dumper, block: dumper.represent_str(str(block)))
_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else "")
)


def _dump(value: object) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)


def _expressions(text: str) -> str:
    """Escape the expressions of others, such as alert rules, and write those of the chart."""
    text = text.replace("{{", '{{ "{{" }}')
    text = re.sub(r": ⟪([^⟫]+)⟫$", r": {{ \1 | quote }}", text, flags=re.MULTILINE)
    text = text.replace("⟪", "{{ ").replace("⟫", " }}")
    return re.sub(r"^( *)(\w+): «(\??)(.+)»\n", _as_block, text, flags=re.MULTILINE)


def _as_block(found: re.Match[str]) -> str:
    indent, key, optional, value = found.groups()
    if not optional:
        return f"{indent}{key}:\n{indent}  {{{{- toYaml {value} | nindent {len(indent) + 2} }}}}\n"
    inside = f"{indent}{key}:\n{indent}  {{{{- toYaml . | nindent {len(indent) + 2} }}}}\n"
    return f"{indent}{{{{- with {value} }}}}\n{inside}{indent}{{{{- end }}}}\n"


def _either(texts: Mapping[str, str]) -> str:
    """One template of the two storages: the lines of both, and conditions around those of one."""
    (first, one), (_, other) = ((storage, text.splitlines(keepends=True)) for storage, text in texts.items())
    lines: list[str] = []
    for what, start, end, other_start, other_end in difflib.SequenceMatcher(
        None, one, other, autojunk=False
    ).get_opcodes():
        if what == "equal":
            lines += one[start:end]
            continue
        kept, added = one[start:end], other[other_start:other_end]
        condition = f'eq $.Values.storage "{first}"' if kept else f'ne $.Values.storage "{first}"'
        lines += [f"{{{{- if {condition} }}}}\n", *(kept or added)]
        lines += ["{{- else }}\n", *added] if kept and added else []
        lines.append("{{- end }}\n")
    return "".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or compare. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description="Write the objects of the operator and the templates of the Helm chart."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    check = parser.parse_args(arguments).check
    # The chart's templates are made from the operator's objects.
    old = [*_write(for_operator(), check=check), *_write(files(), check=check)]
    if not old or not check:
        return 0
    print(f"{', '.join(path.name for path in old)} out of date: run {COMMAND}", file=sys.stderr)
    return 1


def _write(made: Mapping[Path, str], *, check: bool) -> list[Path]:
    old = [path for path, text in made.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in old:
        if not check:
            path.write_text(made[path], encoding="utf-8")
    return old


if __name__ == "__main__":
    sys.exit(main())
