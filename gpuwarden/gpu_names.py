"""Names of GPUs, as Docker, Podman, CDI, device plugins and Slurm write them. Pure.

Names are those of `exporter.model.gpu.Gpu.names`. A name of no known form stays as written.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

ALL: Final = "all"
"""All NVIDIA GPUs."""

ALL_NODES: Final = "dri"
"""All AMD and Intel GPUs."""

NODE: Final = re.compile(r"renderD[0-9]+")
"""A render node."""

MOUNTS: Final = "/var/run/nvidia-container-devices"
"""Folder whose mounts name GPUs (NVIDIA's container toolkit)."""

_UUID = r"(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"

_FORMS: Final = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"(.+)::\d+", r"\1"),  # NVIDIA's plugin
        (rf"({_UUID})-(?:_-)?\d+", r"\1"),  # HAMi, Aliyun
        (r"(card\d+)-\d+", r"\1"),  # Intel's plugin
        (r"(?:/dev/)?nvidia(\d+)(?:/vgpu\d+)?", r"\1"),  # GKE's plugin
        (r"nvidia(\d+)/gi(\d+)(?:/vgpu\d+)?", r"\1/gi\2"),
        (r"gpu-?(\d+)", r"\1"),  # CDI, NVIDIA's DRA driver
        (r"mig(\d+:\d+)", r"\1"),
        (r"/dev/dri/(renderD\d+)", r"\1"),
        (r"/dev/dri", ALL_NODES),
    )
)
"""Patterns of written names, and what they name."""

_KNOWN: Final = re.compile(
    rf"{ALL}|{ALL_NODES}|\d+(:\d+|/gi\d+)?|(GPU|MIG)-.+|{NODE.pattern}|card\d+|amdgpu_xcp_\d+|"
    r"(pci-)?[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7](/.+)?"
)

_CDI: Final = re.compile(r"([a-z0-9.-]+)/([a-z0-9_.-]+)=(.+)", re.IGNORECASE)
_MOUNTED_CDI: Final = re.compile(r"cdi/([^/]+)/([^/]+)/(.+)")
_AMD_UUID: Final = re.compile(r"0x([0-9a-f]{16})", re.IGNORECASE)
_NOTHING: Final = frozenset({"none", "void", "nodevfiles"})
_OTHER_VENDORS: Final = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")

Names = tuple[str, ...] | None
"""GPUs, or `None` for no GPU."""


def is_known(name: str) -> bool:
    """Whether a name from `read` has a known form."""
    return _KNOWN.fullmatch(name) is not None


def read(written: str) -> str:
    """Read one name of a GPU."""
    found = _CDI.fullmatch(written)
    vendor, name = (found[1], found[3]) if found else ("nvidia.com", written)
    if not vendor.endswith("nvidia.com"):
        return ALL_NODES if name == ALL else written if name.isdecimal() or not is_known(name) else name
    for pattern, meant in _FORMS:
        if match := pattern.fullmatch(name):
            return match.expand(meant)
    return name if is_known(name) else written


def read_cdi(written: str) -> str | None:
    """Read one CDI device; `None` if it is no GPU."""
    found = _CDI.fullmatch(written)
    return read(written) if found and "gpu" in found[2].lower() else None


def read_list(value: str) -> Names:
    """Read a list with commas, such as NVIDIA_VISIBLE_DEVICES."""
    names = [each.strip() for each in value.split(",") if each.strip()]
    return None if len(names) == 1 and names[0].lower() in _NOTHING else _unique(read(each) for each in names)


def of_container(env: Mapping[str, str], mounts: Iterable[str] = ()) -> Names:
    """The GPUs that a container's variables and mount points name."""
    mounted = [each.removeprefix(f"{MOUNTS}/") for each in mounts if each.startswith(f"{MOUNTS}/")]
    named = _unique(read(_MOUNTED_CDI.sub(r"\1/\2=\3", each)) for each in mounted if not each.startswith("imex/"))
    if named:
        return named
    swarm = [value for name, value in env.items() if name.startswith("DOCKER_RESOURCE_") and "GPU" in name]
    nvidia = ",".join(swarm) or env.get("NVIDIA_VISIBLE_DEVICES", "")
    amd = read_list(env.get("AMD_VISIBLE_DEVICES", "")) or ()
    others = _unique(ALL_NODES if each == ALL else _amd(each, "AMD_VISIBLE_DEVICES") for each in amd) or ()
    return (*((not nvidia.startswith("/") and read_list(nvidia)) or ()), *others) or None


def of_process(env: Mapping[str, str]) -> Names:
    """The GPUs that a process without an engine sees."""
    ours, cuda = read_list(env.get("GPUWARDEN_GPUS", "")), _cuda(env)
    if ours or (cuda and _have_uuids(cuda)):
        return ours or cuda
    for names in (read_list(env.get("NVIDIA_VISIBLE_DEVICES", ALL)), cuda):
        if names != (ALL,):
            return names
    for variable in _OTHER_VENDORS:
        if env.get(variable):
            return _unique(_amd(each, variable) for each in read_list(env[variable]) or ())
    return (ALL,)


def _cuda(env: Mapping[str, str]) -> Names:
    """CUDA_VISIBLE_DEVICES, which Slurm may count from 0 in each job."""
    value = env.get("CUDA_VISIBLE_DEVICES")
    slurm = read_list(env.get("SLURM_STEP_GPUS") or env.get("SLURM_JOB_GPUS") or "")
    if value is None:
        return slurm or (ALL,)
    names = read_list(re.split(r"(?:^|,)\s*-1", value)[0])
    if names is None or slurm is None or _have_uuids(names):
        return names
    return slurm if len(names) == len(slurm) else (f"CUDA_VISIBLE_DEVICES={value}",)


def _have_uuids(names: tuple[str, ...]) -> bool:
    return all(each.startswith(("GPU-", "MIG-")) for each in names)


def _amd(name: str, variable: str) -> str:
    number = _AMD_UUID.fullmatch(name)
    return f"GPU-{number[1].lower()}" if number else name if _have_uuids((name,)) else f"{variable}={name}"


def _unique(names: Iterable[str]) -> Names:
    return tuple(dict.fromkeys(names)) or None
