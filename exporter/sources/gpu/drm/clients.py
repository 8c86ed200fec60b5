"""Who holds a GPU of the DRM open, and how busy each keeps it: /proc/PID/fd and /proc/PID/fdinfo of every process.

To list every open file of every process each second would cost more than all else together. So a process that is new is
listed at once and every other one at each `RELIST_LOOKS`th look: by then it is seen what it does on a GPU that it has
opened in between. What it was seen to hold is read at each look, and parsed where it says something else than before.

Whoever runs a process chooses how many files it opens and what lies at /dev/dri in its own mount namespace. So a name
makes no GPU: it has to be a device of the DRM, opened to be used. And a look takes a bounded time: who is not looked at
in whole is told apart, as one that may hold any GPU.

Sources: proc_pid_fd(5), proc_pid_fdinfo(5); what the files say is in exporter/sources/gpu/drm/fdinfo.py.
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
from exporter.sources.gpu.drm.kfd import Asks, content
from exporter.sources.gpu.isolated.protocol import Question

PROC: Final = Path("/proc")
RELIST_LOOKS: Final = 5
DEVICES: Final = "/dev/dri/"

MAJOR: Final = 226
"""The major number of every device of the DRM (Documentation/admin-guide/devices.txt of the kernel)."""

FILES_MAX: Final = 16_384
"""How many open files of one process are looked at."""

LOOK_S: Final = 0.5
"""How long to list open files may take in one look, seconds, and how long to read them."""


@dataclass(kw_only=True)
class Held:
    """What one process holds of one GPU.

    `shares` is the part of the GPU's time by kind of engine and `local_bytes` its memory; `None` is unknown.
    """

    shares: dict[str, float] | None = field(default_factory=dict)
    local_bytes: int | None = 0


@dataclass(frozen=True, kw_only=True)
class Holders:
    """By the GPU's PCI address, or the name of the node where the driver tells none, then by pid.

    `unlisted` are the processes whose open files we may not list or read, or not in the time and number that one look
    allows: they may hold any GPU.
    """

    by_gpu: Mapping[str, Mapping[int, Held]]
    unlisted: frozenset[int]


_Key = tuple[str, int]
"""A client: its GPU, and its number there."""


class Clients:
    """Follows every client of every GPU of the DRM; one thread at a time. `asks` as of `kfd.Kfd`."""

    def __init__(self, *, proc: Path = PROC, asks: Asks = lambda _: None) -> None:
        self._proc = proc
        self._asks = asks
        self._left_out: set[str] = set()
        self._looks = 0
        self._looked_s: float | None = None
        self._files: dict[int, dict[str, str]] = {}
        self._said: dict[tuple[int, str], tuple[bytes, Client | None]] = {}
        self._unlisted: set[int] = set()
        self._missed: set[int] = set()
        self._meters: dict[_Key, Meter] = {}
        self._owners: dict[_Key, int] = {}

    def look(
        self,
        now_s: float,
        *,
        asleep: frozenset[str] = frozenset(),
        places: Mapping[str, int] = MappingProxyType({}),
        question: Question | None = None,
    ) -> Holders:
        """Read every client of the GPUs that are asked about; those of others are in no answer.

        Args:
            now_s: the time, monotonic seconds.
            asleep: GPUs, by their node's name, that asking would wake: they did nothing.
            places: the number of each GPU by the names of its nodes.
            question: which are asked about, by these numbers.

        Raises:
            OSError: processes cannot be listed.
        """
        self._list()
        holders: dict[_Key, list[int]] = {}
        told: dict[_Key, Client] = {}
        said: dict[tuple[int, str], tuple[bytes, Client | None]] = {}
        found: dict[str, dict[int, Held]] = {}
        late: set[int] = set()
        question = question or Question()
        asked = {node: place for node, place in places.items() if question.is_about(place)}
        unasked, back = set[str](), set[str]()
        until_s = time.monotonic() + LOOK_S
        # GPU by GPU: each change of the GPU that is asked about is a message to the exporter.
        for pid, number, node in sorted(self._each(), key=lambda each: asked.get(each[2], -1)):
            place = asked.get(node)
            if place is None and (node in places or question.only is not None):
                unasked.add(node)
                continue
            if node in asleep:
                found.setdefault(node, {})[pid] = Held(local_bytes=None)
                continue
            if time.monotonic() > until_s:
                late.add(pid)
                unasked |= {node} & self._left_out  # it is back for this one when it is read
                found.setdefault(node, {})[pid] = Held(shares=None, local_bytes=None)
                continue
            self._asks(place)
            read = self._read(pid, number)
            if read is None:
                continue
            said[pid, number] = read
            client = read[1]
            gpu = node if client is None or client.pci is None else client.pci
            if node in self._left_out:
                back.add(gpu)
            held = found.setdefault(gpu, {}).setdefault(pid, Held())
            if client is None:
                held.shares, held.local_bytes = None, None
                continue
            key = gpu, client.number
            told[key] = client
            holders.setdefault(key, []).append(pid)
        self._asks(None)
        self._said = said
        self._left_out = unasked
        self._count(found, told, holders, now_s, late, back)
        self._looked_s = now_s
        return Holders(by_gpu=found, unlisted=frozenset(self._unlisted | late))

    def _read(self, pid: int, number: str) -> tuple[bytes, Client | None] | None:
        """What a file says, and whom that tells of; `None` where it is none of a GPU any more, or cannot be read."""
        try:
            text = content(f"{self._proc}/{pid}/fdinfo/{number}")
            before, client = self._said.get((pid, number), (b"", None))
            if text != before:
                client = fdinfo.parse(text.decode("utf-8", "replace"))
            if client is None and self._node(pid, number) is None:
                return None  # another file has that number by now
        except (FileNotFoundError, ProcessLookupError):  # closed, or gone with its process
            return None
        except OSError:
            self._unlisted.add(pid)
            return None
        return text, client

    def _each(self) -> Iterator[tuple[int, str, str]]:
        """Every file that is a GPU: the process, the file's number there, and its node."""
        return ((pid, number, node) for pid, files in self._files.items() for number, node in files.items())

    def _count(
        self,
        found: dict[str, dict[int, Held]],
        told: dict[_Key, Client],
        holders: dict[_Key, list[int]],
        now_s: float,
        late: set[int],
        back: set[str],
    ) -> None:
        """Each client once: for the process that held it first, and of several at once the one with the lowest pid.

        What is known of those who were too `late` for this look stays as it is, for the next one. GPUs that are `back`
        were left out by the one before: when their clients did what they did nobody saw.
        """
        owners = {key: pid for key, pid in self._owners.items() if pid in late}
        meters = {key: meter for key, meter in self._meters.items() if key in owners}
        for key, client in told.items():
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
            shares = fdinfo.busy(before, client.engines, now_s=now_s, looked_s=looked_s)
            meters[key] = fdinfo.read_on(before, client.engines, now_s=now_s)
            if shares is None:
                held.shares = None
            elif held.shares is not None:
                for name, share in shares.items():
                    held.shares[name] = held.shares.get(name, 0.0) + share
        self._meters, self._owners = meters, owners

    def _list(self) -> None:
        """Which files of which processes are GPUs, as far as it is this look's turn."""
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
                    self._files[pid] = self._listed(pid)
                except (FileNotFoundError, ProcessLookupError):  # it has just ended
                    self._files.pop(pid, None)
                except OSError:
                    self._files[pid] = {}
                    self._unlisted.add(pid)

    def _listed(self, pid: int) -> dict[str, str]:
        """The open files of a process that are GPUs: the number of each, and the name of its node.

        Raises:
            OSError: they may not be listed, or the process is gone.
        """
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
        """The name of the GPU's node that an open file is; `None` where it is none, or closed by now.

        Raises:
            OSError: it may not be looked at, or the process is gone.
        """
        file = f"{self._proc}/{pid}/fd/{number}"
        try:
            target = os.readlink(file)  # noqa: PTH115 - half the time
            if not target.startswith(DEVICES):
                return None
            # A file that was opened for neither reading nor writing (O_PATH) is none that anything is done with.
            if not stat.S_IMODE(os.lstat(file).st_mode) & (stat.S_IRUSR | stat.S_IWUSR):
                return None
        except FileNotFoundError:
            return None
        return target.removeprefix(DEVICES) if is_device(file) else None


def is_device(file: str) -> bool:
    """Whether an open file is a device of the DRM's; what its own file system does not tell of is none."""
    try:
        found = Path(file).stat()
    except OSError:
        return False
    return stat.S_ISCHR(found.st_mode) and os.major(found.st_rdev) == MAJOR
