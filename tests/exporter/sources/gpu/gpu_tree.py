"""Folders like /sys and /proc of a host with AMD and Intel GPUs, as the kernel documents them.

gpus.py, kfd.py and fdinfo.py in exporter/sources/gpu/drm name the source of each format.
"""

import os
import shutil
from pathlib import Path

CHILD = """
import sys
from functools import partial
from pathlib import Path
from exporter.sources.gpu.drm import child, clients, gpus
clients.is_device = lambda _: True
root = Path({root!r})
gpus.DrmGpus = partial(gpus.DrmGpus, sys=root / "sys", proc=root / "proc")
sys.exit(child.main())
"""
"""The process that reads the kernel's drivers, here from a tree. Open files are devices by their names."""

AMDGPU = """\
pos:\t0
flags:\t02100002
mnt_id:\t26
ino:\t685
drm-driver:\tamdgpu
drm-client-id:\t{client}
drm-pdev:\t{pci}
pasid:\t32771
drm-memory-vram:\t{vram_kib} KiB
drm-memory-gtt: \t44 KiB
drm-memory-cpu: \t6200 KiB
amd-memory-visible-vram:\t76 KiB
"""
I915 = """\
drm-driver:\ti915
drm-client-id:\t{client}
drm-pdev:\t{pci}
drm-total-system0:\t3836720 KiB
drm-resident-system0:\t3835792 KiB
drm-total-local0:\t900 MiB
drm-resident-local0:\t{local_mib} MiB
drm-resident-stolen-local0:\t64 MiB
drm-engine-render:\t{render_ns} ns
drm-engine-copy:\t0 ns
drm-engine-video:\t{video_ns} ns
drm-engine-capacity-video:\t2
drm-engine-video-enhance:\t0 ns
"""
XE = """\
drm-driver:\txe
drm-client-id:\t{client}
drm-pdev:\t{pci}
drm-total-gtt:\t192 KiB
drm-resident-gtt:\t192 KiB
drm-total-vram0:\t23992 KiB
drm-resident-vram0:\t23992 KiB
drm-cycles-rcs:\t{cycles}
drm-total-cycles-rcs:\t{total}
drm-cycles-ccs:\t0
drm-total-cycles-ccs:\t{total}
drm-engine-capacity-ccs:\t4
"""


def amdgpu(pci: str, *, client: int = 7, vram_kib: int = 76, **engines_ns: int) -> str:
    """The fdinfo of one open file of amdgpu. It has no line for an engine that was never used."""
    lines = [f"drm-engine-{name}:\t{ns} ns\n" for name, ns in engines_ns.items() if ns]
    return AMDGPU.format(client=client, pci=pci, vram_kib=vram_kib) + "".join(lines)


def i915(pci: str, *, client: int = 7, render_ns: int = 0, video_ns: int = 0, local_mib: int = 512) -> str:
    """The fdinfo of one open file of i915."""
    return I915.format(client=client, pci=pci, render_ns=render_ns, video_ns=video_ns, local_mib=local_mib)


def xe(pci: str, *, client: int = 7, cycles: int = 0, total: int = 1000) -> str:
    """The fdinfo of one open file of xe."""
    return XE.format(client=client, pci=pci, cycles=cycles, total=total)


class Tree:
    """A host with the folders `sys` and `proc`."""

    def __init__(self, root: Path) -> None:
        self.child = "-c", CHILD.format(root=str(root))
        self.sys = root / "sys"
        self.proc = root / "proc"
        self.generation = 1
        for folder in (self.sys / "class/drm", self.sys / "bus/pci/devices", self.proc):
            folder.mkdir(parents=True)

    def gpu(
        self,
        minor: int,
        pci: str,
        driver: str,
        *,
        busy_percent: int | None = None,
        vram: tuple[int, int] | None = None,
        status: str = "active",
    ) -> Path:
        """A GPU with a render node; returns its folder. `vram` is used and total, bytes."""
        folder = self.device(pci, driver)
        for name in (f"renderD{minor}", f"card{minor - 128}"):
            (folder / "drm" / name).mkdir(parents=True)
            (self.sys / "class/drm" / name).symlink_to(f"../../devices/pci0000:00/{pci}/drm/{name}")
        self.write(folder / "power/runtime_status", status)
        if busy_percent is not None:
            self.write(folder / "gpu_busy_percent", busy_percent)
        if vram is not None:
            self.write(folder / "mem_info_vram_used", vram[0])
            self.write(folder / "mem_info_vram_total", vram[1])
        return folder

    def device(self, pci: str, driver: str) -> Path:
        """A PCI device with a driver; returns its folder."""
        folder = self.sys / "devices/pci0000:00" / pci
        if not (folder / "driver").is_symlink():
            maker = 0x8086 if driver in {"i915", "xe"} else 0x1002
            self.write(folder / "vendor", f"0x{maker:04x}")
            self.write(folder / "device", "0x744c")
            (folder / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")
            for place in (self.sys / "bus/pci/devices", self.sys / "bus/pci/drivers" / driver):
                place.mkdir(parents=True, exist_ok=True)
                (place / pci).symlink_to(folder)
        return folder

    def take_out(self, pci: str) -> None:
        """Remove a GPU from its bus, and an AMD GPU from the topology."""
        folder = self.sys / "devices/pci0000:00" / pci
        driver = (folder / "driver").readlink().name
        for link in (self.sys / "class/drm").iterdir():
            if pci in str(link.resolve()) or (driver == "amdgpu" and "amdgpu_xcp" in str(link.resolve())):
                link.unlink()
        shutil.rmtree(folder)
        for place in ("devices", f"drivers/{driver}"):
            (self.sys / "bus/pci" / place / pci).unlink()
        if driver == "amdgpu":
            self._clear_topology()

    def cut(self, pci: str, mode: str, parts: int, *, minor: int = 128, unique_id: int = 0, fold: bool = False) -> None:
        """Partition an AMD GPU into `parts` of its topology, each with its own node.

        The first part has the GPU's own node. Each other part has one of the seven platform devices which always exist
        (amdgpu_xcp_dev_alloc in amdgpu_xcp.c). With `fold`, the number of a part replaces the PCI function
        (kfd_topology_add_device in kfd_topology.c).
        """
        folder = self.sys / "devices/pci0000:00" / pci
        for number in range(7):
            device = self.sys / "devices/platform" / f"amdgpu_xcp_{number}"
            for name in (f"renderD{minor + 1 + number}", f"card{minor - 127 + number}"):
                if not (device / "drm" / name).exists():
                    (device / "drm" / name).mkdir(parents=True)
                    (self.sys / "class/drm" / name).symlink_to(f"../../devices/platform/{device.name}/drm/{name}")
        self._clear_topology()
        self.write(folder / "current_compute_partition", mode)  # The kernel blocks readers until the change ends.
        bus, device_function = pci.split(":")[1:]
        place = (int(bus, 16) << 8) + (int(device_function[:2], 16) << 3)
        for part in range(parts):
            location = place + part if fold else place + (part << 28) * (parts > 1)
            self.node(part + 1, gpu_id=5000 + part, minor=minor + part, unique_id=unique_id, location=location)

    def _clear_topology(self) -> None:
        topology = self.sys / "class/kfd/kfd/topology"
        if topology.exists():
            shutil.rmtree(topology / "nodes", ignore_errors=True)
            (topology / "nodes").mkdir()
            self.generation += 100
            self.write(topology / "generation_id", self.generation)

    def node(
        self,
        number: int,
        *,
        gpu_id: int,
        minor: int = 0,
        unique_id: int = 0,
        name: str = "navi31",
        location: int = 0x300,
    ) -> Path:
        """A node of AMD's topology; `gpu_id` 0 is a CPU."""
        topology = self.sys / "class/kfd/kfd/topology"
        (self.sys / "class/kfd/kfd/proc").mkdir(parents=True, exist_ok=True)
        self.generation += 1
        self.write(topology / "generation_id", self.generation)
        folder = topology / "nodes" / str(number)
        self.write(folder / "gpu_id", gpu_id)
        self.write(folder / "name", name)
        self.write(
            folder / "properties",
            f"cpu_cores_count 0\nsimd_count 192\nvendor_id 4098\nlocation_id {location}\ndomain 0\n"
            f"drm_render_minor {minor}\nhive_id 0\nunique_id {unique_id}",
        )
        return folder

    def computes(
        self,
        pid: int,
        *,
        vram: dict[int, int],
        queues: dict[int, int],
        occupied: dict[int, int] | None = None,
    ) -> Path:
        """A process of AMD's compute driver: bytes by GPU, the GPU of each queue, occupied units by GPU."""
        folder = self.sys / "class/kfd/kfd/proc" / str(pid)
        for gpu_id, size in vram.items():
            self.write(folder / f"vram_{gpu_id}", size)
        for gpu_id, units in (occupied or {}).items():
            self.write(folder / f"stats_{gpu_id}/cu_occupancy", units)
        (folder / "queues").mkdir(exist_ok=True)
        for queue, gpu_id in queues.items():
            (folder / "queues" / str(queue)).mkdir(exist_ok=True)
            (folder / "queues" / str(queue) / "gpuid").write_text(str(gpu_id), encoding="ascii")
        return folder

    def opens(self, pid: int, files: dict[int, tuple[str, str]]) -> None:
        """A process with open files: link target and fdinfo by number."""
        for number, (target, text) in files.items():
            link = self.proc / str(pid) / "fd" / str(number)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(target)
            self.write(self.proc / str(pid) / "fdinfo" / str(number), text)

    @staticmethod
    def write(file: Path, what: object) -> None:
        """Write a file of the kernel: one line."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{what}\n", encoding="utf-8")

    @staticmethod
    def hang(file: Path) -> None:
        """Make every later open of this file hang until the reader is killed."""
        pipe = file.with_name(f"{file.name}.pipe")
        os.mkfifo(pipe)
        pipe.replace(file)
