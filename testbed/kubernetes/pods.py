"""Manifests of pods for tests."""

import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from testbed.kubernetes.images import BASE

CHECKOUT: Final = Path(__file__).resolve().parents[2]
FOREVER: Final = ("sleep", "infinity")


def container(
    name: str, command: Sequence[str] = FOREVER, *, limits: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """A container of the base image, which has busybox and Debian's Python."""
    return {
        "name": name,
        "image": BASE,
        "command": list(command),
        "resources": {"limits": {key: str(value) for key, value in (limits or {}).items()}},
    }


def pod(
    name: str,
    command: Sequence[str] = FOREVER,
    *,
    limits: Mapping[str, object] | None = None,
    labels: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A pod of one container, which ends at once when it is deleted and does not restart."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": dict(labels or {})},
        "spec": {
            "containers": [container("main", command, limits=limits)],
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
        },
    }


def deployment(name: str, *, annotations: dict[str, str] | None = None) -> dict[str, Any]:
    """Return a Deployment of no replicas, whose pods wait."""
    labels = {"app": name}
    spec = {"containers": [container("main")], "terminationGracePeriodSeconds": 0}
    return {
        "metadata": {"name": name, "annotations": annotations or {}},
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def with_project(manifest: dict[str, Any]) -> dict[str, Any]:
    """Mount this checkout and its Python packages into all containers of a pod.

    A command then may be `[python(), "-m", "gpuwarden", ...]`.
    """
    folders = {str(CHECKOUT), sysconfig.get_path("purelib"), *([] if sys.base_prefix == "/usr" else [sys.base_prefix])}
    names = {folder: f"project-{number}" for number, folder in enumerate(sorted(folders))}
    spec = manifest["spec"]
    spec.setdefault("volumes", []).extend(
        {"name": name, "hostPath": {"path": folder}} for folder, name in names.items()
    )
    for each in (*spec["containers"], *spec.get("initContainers", [])):
        each.setdefault("volumeMounts", []).extend(
            {"name": name, "mountPath": folder, "readOnly": True} for folder, name in names.items()
        )
        path = os.pathsep.join([str(CHECKOUT), sysconfig.get_path("purelib")])
        each.setdefault("env", []).extend(
            [{"name": "PYTHONPATH", "value": path}, {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"}]
        )
    return manifest


def python() -> str:
    """The Python of containers with the project."""
    return "/usr/bin/python3" if sys.base_prefix == "/usr" else os.path.realpath(sys.executable)
