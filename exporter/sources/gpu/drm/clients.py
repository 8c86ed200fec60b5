"""Processes with a DRM GPU open, and their use of it: /proc/PID/fd and /proc/PID/fdinfo.

New processes are listed at once, others in every `RELIST_LOOKS`th sample: listing all each second would cost more than
everything else. Known files are read in every sample, and parsed when they change.

A process may open any number of files and mount anything at /dev/dri. So a file counts only if it is a DRM device, and
a sample has a time limit. Processes that are not read in full may use any GPU.

Sources: proc_pid_fd(5), proc_pid_fdinfo(5); fdinfo.py has the format.
"""

import itertools
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from exporter.sources.gpu.drm import fdinfo
from exporter.sources.gpu.drm.fdinfo import Client, Meter
from exporter.sources.gpu.drm.kfd import Announce, content
from exporter.sources.gpu.isolated.protocol import Question

PROC: Final = Path("/proc")
RELIST_LOOKS: Final = 5
DEVICES: Final = "/dev/dri/"

MAJOR: Final = 226
"""Major number of DRM devices (Documentation/admin-guide/devices.txt of the kernel)."""

FILES_MAX: Final = 16_384
"""Open files of one process that are read."""

LOOK_S: Final = 0.5
"""Time limit of listing files in one sample, seconds, and of reading them."""


@dataclass(kw_only=True)
class ProcessUse:
    """One process's use of one GPU: share of its time by kind of engine, and bytes; `None` is unknown."""

    shares: dict[str, float] | None = field(default_factory=dict)
    local_bytes: int | None = 0


@dataclass(frozen=True, kw_only=True)
class GpuClients:
    """Use by GPU (PCI address, or node without one), then by pid.

    `unlisted` are processes that were not read in full and may use any GPU.
    """

    by_gpu: Mapping[str, Mapping[int, ProcessUse]]
    unlisted: frozenset[int]


_Key = tuple[str, int]
"""A client: its GPU and its number there."""


class Clients:
    """Reads every client of every GPU, in one thread at a time; `announce` as in `kfd.Kfd`."""

    def __init__(self, *, proc: Path = PROC, announce: Announce = lambda _: None) -> None:
        self._proc = proc
        self._announce = announce
        self._left_out: set[str] = set()
        self._looks = 0
        self._looked_s: float | None = None
        self._files: dict[int, dict[str, str]] = {}
        self._parsed: dict[tuple[int, str], tuple[bytes, Client | None]] = {}
        self._unlisted: set[int] = set()
        self._missed: set[int] = set()
        self._meters: dict[_Key, Meter] = {}
        self._owners: dict[_Key, int] = {}

    def read(
        self,
        now_s: float,
        *,
        asleep: frozenset[str] = frozenset(),
        places: Mapping[str, int] = MappingProxyType({}),
        question: Question | None = None,
    ) -> GpuClients:
        """Read the clients of some GPUs.

        Args:
            now_s: the time, monotonic seconds.
            asleep: GPUs by node that a read would wake: they did nothing.
            places: the number of each GPU by node.
            question: the GPUs to read, by these numbers.

        Raises:
            OSError: processes cannot be listed.
        """
        self._update_files()
        holders: dict[_Key, list[int]] = {}
        clients: dict[_Key, Client] = {}
        parsed: dict[tuple[int, str], tuple[bytes, Client | None]] = {}
        found: dict[str, dict[int, ProcessUse]] = {}
        late: set[int] = set()
        question = question or Question()
        asked = {node: place for node, place in places.items() if question.is_about(place)}
        unasked, back = set[str](), set[str]()
        until_s = time.monotonic() + LOOK_S
        # By GPU: each change of GPU is a message to the exporter.
        for pid, number, node in sorted(self._each(), key=lambda each: asked.get(each[2], -1)):
            place = asked.get(node)
            if place is None and (node in places or question.only is not None):
                unasked.add(node)
                continue
            if node in asleep:
                found.setdefault(node, {})[pid] = ProcessUse(local_bytes=None)
                continue
            if time.monotonic() > until_s:
                late.add(pid)
                unasked |= {node} & self._left_out
                found.setdefault(node, {})[pid] = ProcessUse(shares=None, local_bytes=None)
                continue
            self._announce(place)
            read = self._read(pid, number)
            if read is None:
                continue
            parsed[pid, number] = read
            client = read[1]
            gpu = node if client is None or client.pci is None else client.pci
            if node in self._left_out:
                back.add(gpu)
            held = found.setdefault(gpu, {}).setdefault(pid, ProcessUse())
            if client is None:
                held.shares, held.local_bytes = None, None
                continue
            key = gpu, client.number
            clients[key] = client
            holders.setdefault(key, []).append(pid)
        self._announce(None)
        self._parsed = parsed
        self._left_out = unasked
        self._attribute(found, clients, holders, now_s, late, back)
        self._looked_s = now_s
        return GpuClients(by_gpu=found, unlisted=frozenset(self._unlisted | late))

    def _read(self, pid: int, number: str) -> tuple[bytes, Client | None] | None:
        # `None` if the file was closed or its number reused.
        try:
            text = content(f"{self._proc}/{pid}/fdinfo/{number}")
            before, client = self._parsed.get((pid, number), (b"", None))
            if text != before:
                client = fdinfo.parse(text.decode("utf-8", "replace"))
            if client is None and self._node(pid, number) is None:
                return None  # the number was reused
        except (FileNotFoundError, ProcessLookupError):
            return None
        except OSError:
            self._unlisted.add(pid)
            return None
        return text, client

    def _each(self) -> Iterator[tuple[int, str, str]]:
        """Yield pid, file number and node of every GPU file."""
        return ((pid, number, node) for pid, files in self._files.items() for number, node in files.items())

    def _attribute(
        self,
        found: dict[str, dict[int, ProcessUse]],
        clients: dict[_Key, Client],
        holders: dict[_Key, list[int]],
        now_s: float,
        late: set[int],
        back: set[str],
    ) -> None:
        """Count each client once, for the process that held it first, or that with the lowest pid.

        Counters of `late` processes wait for the next sample. Those of GPUs that the last sample left out (`back`)
        restart.
        """
        owners = {key: pid for key, pid in self._owners.items() if pid in late}
        meters = {key: meter for key, meter in self._meters.items() if key in owners}
        for key, client in clients.items():
            owner = self._owners.get(key)
            owners[key] = owner if owner in holders[key] else min(holders[key])
            held = found[key[0]][owners[key]]
            if held.local_bytes is not None:
                held.local_bytes = None if client.local_bytes is None else held.local_bytes + client.local_bytes
            if client.engines is None:
                held.shares = None
                continue
            before = self._meters.get(key)
            looked_s = None if key[0] in back else self._looked_s
            shares = fdinfo.utilization(before, client.engines, now_s=now_s, looked_s=looked_s)
            meters[key] = fdinfo.advance(before, client.engines, now_s=now_s)
            if shares is None:
                held.shares = None
            elif held.shares is not None:
                for name, share in shares.items():
                    held.shares[name] = held.shares.get(name, 0.0) + share
        self._meters, self._owners = meters, owners

    def _update_files(self) -> None:
        # Lists new processes, and a part of the others.
        pids = {int(name) for name in os.listdir(self._proc) if name.isdecimal()}  # noqa: PTH208 - half the time
        for pid in self._files.keys() - pids:
            del self._files[pid]
        self._unlisted &= pids
        turn = self._looks % RELIST_LOOKS
        self._looks += 1
        until_s = time.monotonic() + LOOK_S
        first = self._missed & pids
        self._missed = set()
        for pid in (*first, *(pids - first)):
            if pid in first or pid % RELIST_LOOKS == turn or pid not in self._files:
                if time.monotonic() > until_s:
                    self._missed.add(pid)
                    self._unlisted.add(pid)
                    continue
                self._unlisted.discard(pid)
                try:
                    self._files[pid] = self._list_files(pid)
                except (FileNotFoundError, ProcessLookupError):  # it just ended
                    self._files.pop(pid, None)
                except OSError:
                    self._files[pid] = {}
                    self._unlisted.add(pid)

    def _list_files(self, pid: int) -> dict[str, str]:
        found: dict[str, str] = {}
        with os.scandir(f"{self._proc}/{pid}/fd") as entries:
            for entry in itertools.islice(entries, FILES_MAX):
                node = self._node(pid, entry.name)
                if node is not None:
                    found[entry.name] = node
            if next(entries, None) is not None:
                self._unlisted.add(pid)
        return found

    def _node(self, pid: int, number: str) -> str | None:
        file = f"{self._proc}/{pid}/fd/{number}"
        try:
            target = os.readlink(file)  # noqa: PTH115 - half the time
            if not target.startswith(DEVICES):
                return None
            # An open O_PATH file is not used.
            if not stat.S_IMODE(os.lstat(file).st_mode) & (stat.S_IRUSR | stat.S_IWUSR):
                return None
        except FileNotFoundError:
            return None
        return target.removeprefix(DEVICES) if is_device(file) else None


def is_device(file: str) -> bool:
    """Whether an open file is a DRM device."""
    try:
        found = Path(file).stat()
    except OSError:
        return False
    return stat.S_ISCHR(found.st_mode) and os.major(found.st_rdev) == MAJOR
