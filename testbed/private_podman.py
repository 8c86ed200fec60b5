"""Configuration of a private Podman, unpacked and not installed.

Podman finds its configuration by environment variables (containers.conf(5), storage.conf(5), policy.json(5)).
Containers have the network `none` or `host` and the storage driver `vfs`, which works on every file system.
"""

import json
import os
import resource
from pathlib import Path

from deploy.standalone import debian_packages
from testbed.private_engine import EnginePaths

HELPERS = "usr/lib/podman"
"""Debian's folder of Podman's helpers, below the root of its packages."""


def environment(paths: EnginePaths, podman: Path, runc: Path, conmon: Path) -> dict[str, str]:
    """Write the configuration of Podman and return its environment.

    conmon gets almost no environment but starts Podman at the end of a container, so it is a script that sets the
    library path. The runtime is runc, because crun 1.8 refuses hosts with both cgroup versions.
    """
    home = paths.work / "podman"
    (home / ".config/containers").mkdir(parents=True, exist_ok=True)
    libraries = os.pathsep.join(str(folder) for folder in debian_packages.library_folders(podman.parents[2]))
    env = {**debian_packages.env_for_parts(), "HOME": str(home)}
    if podman.is_relative_to(debian_packages.PARTS_DIR):
        env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [libraries, env.get("LD_LIBRARY_PATH")]))
    starter = home / "conmon"
    starter.write_text(
        f"#!/bin/sh\nexport LD_LIBRARY_PATH='{env.get('LD_LIBRARY_PATH', '')}'\nexec '{conmon}' \"$@\"\n"
    )
    starter.chmod(0o755)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # Podman's defaults are more than root without CAP_SYS_RESOURCE may set. Soft and hard limits are equal, because its
    # Docker API (4.3) swaps them.
    ulimits = [f"nofile={files}:{files}", "nproc=8192:8192"]
    (home / "containers.conf").write_text(
        f"""[containers]
seccomp_profile = "unconfined"
apparmor_profile = "unconfined"
log_driver = "k8s-file"
default_ulimits = {json.dumps(ulimits)}
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
compat_api_enforce_docker_hub = false
runtime = "runc"
conmon_path = [{json.dumps(str(starter))}]
helper_binaries_dir = [{json.dumps(str(podman.parents[2] / HELPERS))}]
tmp_dir = {json.dumps(str(paths.run / "libpod"))}
[engine.runtimes]
runc = [{json.dumps(str(runc))}]
""",
        encoding="utf-8",
    )
    (home / "storage.conf").write_text(
        f"""[storage]
driver = "vfs"
runroot = {json.dumps(str(paths.run / "storage"))}
graphroot = {json.dumps(str(paths.data / "data"))}
""",
        encoding="utf-8",
    )
    (home / ".config/containers/policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    env["CONTAINERS_CONF"] = str(home / "containers.conf")
    env["CONTAINERS_STORAGE_CONF"] = str(home / "storage.conf")
    return env
