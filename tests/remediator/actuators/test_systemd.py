"""The systemd actuator on a real systemd: opt-in, KillMode, restarts and refusals."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gpuwarden import cgroup
from remediator.actuators import ActuatorError
from remediator.actuators import systemd as module
from remediator.actuators.systemd import SystemdActuator
from remediator.plan import ContainerState
from testbed.private_systemd import NoSystemd, Systemd, private_systemd
from tests.waiting import answered, eventually

UNIT = "[Unit]\nDefaultDependencies=no\n[Service]\n"
PATIENT = f"{UNIT}ExecStart=/bin/sleep 600\n"
FAMILY = f"{UNIT}KillMode=process\nExecStart=/bin/sh -c 'sleep 601 & exec sleep 602'\n"


@pytest.fixture(scope="module")
def systemd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Systemd]:
    with private_systemd(tmp_path_factory.mktemp("systemd")) as found:
        if isinstance(found, NoSystemd):
            pytest.skip(found.reason)
        yield found


def actuator(systemd: Systemd, *patterns: str) -> SystemdActuator:
    return SystemdActuator(patterns or ("*",), systemctl=[*systemd.enter, "systemctl"])


def systemctl(systemd: Systemd, *arguments: str) -> None:
    subprocess.run([*systemd.enter, "systemctl", *arguments], check=True, capture_output=True, timeout=30)


def look(found: SystemdActuator, unit: str, *, cgroup: str | None = None) -> ContainerState:
    state = found.look(unit, cgroup=cgroup)
    assert state is not None
    return state


@pytest.mark.needs_systemd
@pytest.mark.parametrize(
    ("patterns", "managed"),
    [
        (("gpu-worker@*.service",), True),
        (("other.service", "gpu-worker@a.service"), True),
        (("gpu-worker@b.service",), False),
        (("gpu-worker",), False),
        (("GPU-worker@*.service",), False),
    ],
    ids=["pattern", "exact name", "another instance", "partial name", "another case"],
)
def test_only_a_matching_name_opts_in(systemd: Systemd, patterns: Sequence[str], *, managed: bool) -> None:
    systemd.write("gpu-worker@.service", PATIENT)
    systemctl(systemd, "start", "gpu-worker@a.service")
    units = actuator(systemd, *patterns)
    before = look(units, "gpu-worker@a.service")

    if not managed:
        with pytest.raises(ActuatorError, match=r"gpu-worker@a.service matches no --systemd-unit pattern"):
            units.stop("gpu-worker@a.service", grace_s=0.0)
        with pytest.raises(ActuatorError, match="matches no --systemd-unit pattern"):
            units.start("gpu-worker@a.service")
    else:
        units.stop("gpu-worker@a.service", grace_s=5.0)

    assert before.managed is managed
    assert look(units, "gpu-worker@a.service").running is not managed


@pytest.mark.needs_systemd
def test_own_unit_of_the_remediator_is_refused(systemd: Systemd, monkeypatch: pytest.MonkeyPatch) -> None:
    systemd.write("own.service", PATIENT)
    systemctl(systemd, "start", "own.service")
    monkeypatch.setattr(cgroup, "unit", lambda _: "own.service")

    with pytest.raises(ActuatorError, match="is the remediator's own unit"):
        actuator(systemd).stop("own.service", grace_s=0.0)

    assert look(actuator(systemd), "own.service").running
    assert not look(actuator(systemd), "own.service").managed


@pytest.mark.needs_systemd
def test_processes_spared_by_kill_mode_are_killed_after_the_grace(systemd: Systemd) -> None:
    systemd.write("family.service", FAMILY)
    units = actuator(systemd)
    units.start("family.service")
    up = eventually(
        lambda: found if len((found := look(units, "family.service")).pids) == 2 else None, "both processes run"
    )

    units.stop("family.service", grace_s=0.2)

    down = look(units, "family.service", cgroup=up.cgroup)
    assert (down.running, down.pids) == (False, frozenset())
    assert not any(Path(f"/proc/{pid}").exists() for pid in up.pids)


STUBBORN = f"{UNIT}TimeoutStopSec=infinity\nExecStart=/bin/sh -c 'trap true TERM; while :; do sleep 0.1; done'\n"


@pytest.mark.needs_systemd
@pytest.mark.parametrize("looks", [2, 3, 4])
def test_incarnation_started_during_the_kill_is_spared(
    systemd: Systemd, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    systemd.write("stubborn.service", STUBBORN)
    units = actuator(systemd)
    units.start("stubborn.service")
    before = look(units, "stubborn.service")
    seen: list[str] = []

    def show(handle: str) -> dict[str, str]:
        """Restart the unit during the given look."""
        shown = SystemdActuator._show(units, handle)
        seen.append(shown["InvocationID"])
        if len(seen) == looks:
            systemctl(systemd, "kill", "--signal=SIGKILL", handle)
            systemctl(systemd, "stop", handle)
            systemctl(systemd, "start", handle)
        return shown

    with monkeypatch.context() as raced:
        raced.setattr(units, "_show", show)
        units.stop("stubborn.service", grace_s=0.0)

    after = look(units, "stubborn.service")
    assert len(seen) > looks
    assert (after.running, after.incarnation != before.incarnation) == (True, True)
    units.stop("stubborn.service", grace_s=0.0)
    assert not look(units, "stubborn.service").running, "the control"


@pytest.mark.needs_systemd
def test_missing_right_to_kill_is_an_error(systemd: Systemd, monkeypatch: pytest.MonkeyPatch) -> None:
    systemd.write("stubborn.service", STUBBORN)
    units = actuator(systemd)
    units.start("stubborn.service")

    def refused(*_: int) -> None:
        raise PermissionError

    with monkeypatch.context() as no_root:  # this systemd answers only root
        no_root.setattr("signal.pidfd_send_signal", refused)
        with pytest.raises(ActuatorError, match=r"of stubborn\.service may not be killed: run the executor as root"):
            units.stop("stubborn.service", grace_s=0.0)

    assert look(units, "stubborn.service").running
    units.stop("stubborn.service", grace_s=0.0)


@pytest.mark.needs_systemd
@pytest.mark.parametrize(("restart", "left_down"), [("always", True), ("on-failure", False), ("no", False)])
def test_service_stopped_by_an_operator_is_left_down(systemd: Systemd, restart: str, *, left_down: bool) -> None:
    systemd.write("kept.service", f"{PATIENT}Restart={restart}\n")
    units = actuator(systemd)
    units.start("kept.service")
    up = look(units, "kept.service")

    systemctl(systemd, "stop", "kept.service")

    down = look(units, "kept.service")
    assert (up.left_down, down.left_down) == (False, left_down)
    assert not down.running


@pytest.mark.needs_systemd
def test_service_between_two_restarts_is_not_left_down(systemd: Systemd) -> None:
    systemd.write("loop.service", f"{UNIT}ExecStart=/bin/false\nRestart=always\nRestartSec=600\n")
    units = actuator(systemd)
    systemctl(systemd, "start", "loop.service")

    found = eventually(
        lambda: state if not (state := answered(lambda: look(units, "loop.service"))).running else None,
        "its first incarnation ended",
    )

    assert not found.left_down
    assert found.incarnation.startswith("loop.service@")
    systemctl(systemd, "stop", "loop.service")


@pytest.mark.needs_systemd
def test_start_limit_hit_is_an_error_that_names_journalctl(systemd: Systemd) -> None:
    limits = "StartLimitIntervalSec=600\nStartLimitBurst=1\n"
    systemd.write("broken.service", f"[Unit]\nDefaultDependencies=no\n{limits}[Service]\nExecStart=/bin/false\n")
    systemctl(systemd, "start", "broken.service")
    failed = [*systemd.enter, "systemctl", "is-failed", "--quiet", "broken.service"]
    eventually(lambda: subprocess.run(failed, check=False, timeout=30).returncode == 0, "its only start failed")

    with pytest.raises(
        ActuatorError, match=r"broken.service does not start \(failed, .*journalctl --unit=broken.service"
    ):
        actuator(systemd).start("broken.service")


@pytest.mark.needs_systemd
@pytest.mark.parametrize(
    ("start", "state"),
    [("ExecStart=/bin/sh -c 'sleep 0.2; exit 3'", "failed, exit-code"), ("ExecStart=/bin/true", "inactive, success")],
    ids=["fails while active", "exits with 0"],
)
def test_service_that_ends_at_once_is_not_started(
    systemd: Systemd, monkeypatch: pytest.MonkeyPatch, start: str, state: str
) -> None:
    monkeypatch.setattr(module, "RUNS_FOR_S", 5.0)
    systemd.write("brief.service", f"{UNIT}{start}\n")

    with pytest.raises(ActuatorError, match=rf"brief\.service does not start \({state}\): see journalctl"):
        actuator(systemd).start("brief.service")


@pytest.mark.needs_systemd
@pytest.mark.parametrize(("kind", "starting"), [("notify", True), ("oneshot", False), ("simple", False)])
def test_unit_that_systemd_waits_for_is_starting(systemd: Systemd, kind: str, *, starting: bool) -> None:
    systemd.write("slow.service", f"{PATIENT}Type={kind}\nTimeoutStartSec=infinity\n")
    units = actuator(systemd)

    units.start("slow.service")

    found = look(units, "slow.service")
    assert (found.running, found.starting) == (True, starting)
    units.stop("slow.service", grace_s=5.0)


@pytest.mark.needs_systemd
def test_start_after_an_earlier_failure_succeeds(systemd: Systemd, monkeypatch: pytest.MonkeyPatch) -> None:
    systemd.write(
        "late.service", f"{UNIT}ExecStartPre=/bin/sh -c 'sleep 0.3; test -e /run/may'\nExecStart=/bin/sleep 9\n"
    )
    units = actuator(systemd)
    with monkeypatch.context() as patient:
        patient.setattr(module, "RUNS_FOR_S", 5.0)
        with pytest.raises(ActuatorError, match=r"does not start \(failed, exit-code\)"):
            units.start("late.service")
    (systemd.root / "run/may").touch()

    units.start("late.service")

    assert look(units, "late.service").running


@pytest.mark.needs_systemd
def test_transient_unit_vanishes_at_its_end(systemd: Systemd) -> None:
    subprocess.run(
        [*systemd.enter, "systemd-run", "--property=DefaultDependencies=no", "--unit=fleeting", "sleep", "600"],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    units = actuator(systemd)
    up = look(units, "fleeting.service")

    units.stop("fleeting.service", grace_s=5.0)

    assert up.vanishes
    assert units.look("fleeting.service") is None


@pytest.mark.needs_systemd
def test_alias_is_refused(systemd: Systemd) -> None:
    systemd.write("real.service", f"{PATIENT}[Install]\nAlias=also.service\n")
    (systemd.root / "run/systemd/system/also.service").symlink_to("real.service")
    systemctl(systemd, "daemon-reload")
    systemctl(systemd, "start", "real.service")

    with pytest.raises(ActuatorError, match=r"also\.service is an alias of real\.service"):
        actuator(systemd).look("also.service")


@pytest.mark.parametrize(
    "name",
    ["", "*.service", "w@[ab].service", "--root=/x.service", "../w.service", "w.socket", "a b.service", "w\n.service"],
)
def test_invalid_service_name_never_reaches_systemctl(name: str) -> None:
    units = SystemdActuator(("*",), systemctl=[sys.executable, "-c", "raise SystemExit('it was asked')"])

    with pytest.raises(ActuatorError, match="is not a full service name"):
        units.look(name)


@pytest.mark.parametrize(
    ("systemctl", "says"),
    [
        (["/no/such/systemctl"], "systemctl cannot be run: .*No such file"),
        (
            ["sh", "-c", "echo 'System has not been booted' >&2; exit 1", "sh"],
            "refused to show w.service: System has not",
        ),
        (["sh", "-c", "echo Id=w.service", "sh"], "does not report LoadState"),
    ],
    ids=["no systemctl", "no systemd", "old systemd"],
)
def test_host_without_systemd_is_an_error(systemctl: list[str], says: str) -> None:
    with pytest.raises(ActuatorError, match=says):
        SystemdActuator(("*",), systemctl=systemctl).look("w.service")
