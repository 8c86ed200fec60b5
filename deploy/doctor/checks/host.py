"""Checks of this host: settings, host key, files, disk and clocks. Pure."""

from typing import Final

from deploy.doctor.facts import Facts, File, Runs
from deploy.doctor.finding import Finding, Unread, failed, ok, unknown, unread, warning
from gpuwarden.format import count_of
from remediator.commands.status import DISK_FREE_MIN

DISK_FREE_LOW: Final = 2 * 2**30
"""Free space below this and below the share is low, bytes."""
DISK_FREE_LOW_RATIO: Final = 0.05
OFFSET_WARNING_S: Final = 1.0
OFFSET_MAX_S: Final = 5.0
"""Largest offset of a clock, seconds: the maximum age of evidence."""
_READ: Final = 0o4
_WRITE: Final = 0o2


def installation(facts: Facts) -> Finding:
    """`gpuwarden up` runs, or the services have settings."""
    place = facts.host.place
    if place.runs is Runs.NOT:
        return failed(
            "no `gpuwarden up` of this user runs, and no settings of services were found",
            "start `gpuwarden up`, or name the environment file of the services by --env-file",
        )
    if place.runs is Runs.UP:
        return ok(f"`gpuwarden up` with its data in {place.data}")
    if place.runs is Runs.SERVICES:
        return ok(f"services with the settings of {place.env_file or 'this environment'}")
    return ok("as the options say")


def settings(facts: Facts) -> Finding:
    """Settings files are valid and have no unknown keys."""
    found = facts.host.settings
    if found.problems:
        says, fix = found.problems[0]
        more = f" (and {len(found.problems) - 1} more)" if len(found.problems) > 1 else ""
        return failed(f"{says}{more}", fix)
    if found.unreadable:
        return unknown(f"{found.unreadable[0]} is not readable", "run the command as root")
    return ok(f"valid: {', '.join(found.checked)}" if found.checked else "defaults: no file and no variables")


def host_key(facts: Facts) -> Finding:
    """The host has a valid key."""
    key = facts.host.key
    if isinstance(key, Unread):
        return unread(key, "start `gpuwarden up`, or install tmpfiles.d/gpuwarden.conf of `gpuwarden init`")
    return ok(f"host key {key}")


def permissions(facts: Facts) -> Finding:
    """Other users cannot read secrets or write what gpuwarden trusts, and sockets exist."""
    files = facts.host.files
    if isinstance(files, Unread):
        return unread(files, "check the permissions of the data directory")
    for each in files:
        if each.missing:
            return failed(f"{each.what} {each.path} does not exist", f"start its service, or {_setting(facts, each)}")
        if each.others is not None and each.others & _WRITE and not each.sticky:
            return failed(f"every user may write {each.what} {each.path}", f"chmod o-w {each.path}")
        if each.others is not None and each.secret and each.others & _READ:
            return failed(f"every user may read {each.what} {each.path}", f"chmod o-r {each.path}")
    for each in files:
        if each.others is None:
            return unknown(f"{each.what} {each.path} is closed to this user", "run the command as root")
    return ok(f"other users cannot change any of {count_of(len(files), 'path')}")


def _setting(facts: Facts, file: File) -> str:
    return facts.host.place.settings(f"GPUWARDEN_REMEDIATOR_{file.what.split(' ')[0].upper()}")


def disk(facts: Facts) -> Finding:
    """There is free space for the databases."""
    disks = facts.host.disks
    if isinstance(disks, Unread):
        return unread(disks, "check that the data directory exists")
    if not disks:
        return unknown("no data directory found", "name it by --ledger")
    least = min(disks, key=lambda each: each.free_bytes)
    says = f"{_size(least.free_bytes)} free at {least.path}"
    if least.free_bytes < DISK_FREE_MIN:
        return failed(f"only {says}: soon nothing is recorded or done", "free some space, or use a larger disk")
    for each in disks:
        if each.free_files == 0:
            return failed(f"no inode is free at {each.path}", "remove files: df -i shows the file system")
    if least.free_bytes < min(DISK_FREE_LOW, DISK_FREE_LOW_RATIO * least.size_bytes):
        return warning(f"only {says}", "free some space")
    return ok(says)


def clock(facts: Facts) -> Finding:
    """The clocks of this host, Prometheus and the database agree."""
    if not facts.offsets:
        return unknown("Prometheus and the database gave no time")
    worst = max(facts.offsets, key=lambda each: abs(each.ahead_s) - each.uncertain_s)
    certain_s = abs(worst.ahead_s) - worst.uncertain_s
    way = "ahead of" if worst.ahead_s > 0 else "behind"
    says = f"the clock of {worst.of} is {abs(worst.ahead_s):.1f} s {way} this host's"
    fix = "synchronize both clocks (chrony or systemd-timesyncd); compare `timedatectl` on both"
    if certain_s > OFFSET_MAX_S:
        return failed(says, fix)
    if certain_s > OFFSET_WARNING_S:
        return warning(says, fix)
    return ok(f"host, {', '.join(each.of for each in facts.offsets)}: equal within {max(0.1, certain_s):.1f} s")


def _size(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"
