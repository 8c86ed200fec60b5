"""Programs that exit: when they are restarted, and when the supervisor gives up."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from deploy.standalone.stack import ChainError
from deploy.standalone.supervisor import GiveUp, PartKeepsExiting, Restart, RestartLimits, Supervisor, next_step

RESTART_LIMITS = RestartLimits(exits_max=3, window_s=100.0, first_s=1.0, longest_s=3.0)


class Room:
    """Programs that exit when a test says so."""

    def __init__(self) -> None:
        self.codes: dict[str, int] = {}
        self.started: list[str] = []
        self.refuses = False

    def ended(self) -> Mapping[str, int]:
        return dict(self.codes)

    def start(self, name: str) -> None:
        if self.refuses:
            raise ChainError("no such program")
        self.started.append(name)
        del self.codes[name]

    def log_file(self, name: str) -> Path:
        return Path("/log") / f"{name}.log"

    def log_tail(self, name: str) -> str:
        return f"the last words of {name}"


@pytest.fixture
def room() -> Room:
    return Room()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def supervisor(room: Room, said: list[str]) -> Supervisor:
    return Supervisor(room, say=said.append, limits=RESTART_LIMITS)


@pytest.mark.parametrize(
    ("ends", "step"),
    [
        pytest.param([5.0], Restart(after_s=1.0, exits=1), id="first exit: short delay"),
        pytest.param([5.0, 6.0], Restart(after_s=2.0, exits=2), id="second exit: longer delay"),
        pytest.param([5.0, 6.0, 9.0], Restart(after_s=3.0, exits=3), id="longest delay"),
        pytest.param([5.0, 6.0, 9.0, 12.0], GiveUp(reason="4 exits within 100 s"), id="too many exits"),
        pytest.param([5.0, 106.0, 109.0, 112.0], Restart(after_s=3.0, exits=3), id="old exits do not count"),
    ],
)
def test_next_step_after_an_exit(ends: list[float], step: Restart | GiveUp) -> None:
    assert next_step(ends, limits=RESTART_LIMITS) == step


def test_running_program_is_not_restarted(room: Room, supervisor: Supervisor, said: list[str]) -> None:
    supervisor.tick(0.0)

    assert (room.started, said) == ([], [])


def test_exited_program_is_restarted_after_the_delay(room: Room, supervisor: Supervisor, said: list[str]) -> None:
    room.codes = {"serve": -9}
    supervisor.tick(10.0)
    supervisor.tick(10.5)
    assert room.started == []
    supervisor.tick(11.0)

    assert room.started == ["serve"]
    assert said == [
        "serve exited (killed by SIGKILL): restart in 1 s (exit 1 of at most 3 in 100 s); see "
        + str(room.log_file("serve")),
        "serve restarted",
    ]


def test_programs_are_restarted_independently(room: Room, supervisor: Supervisor) -> None:
    room.codes = {"serve": 1}
    supervisor.tick(10.0)
    room.codes["exporter"] = 1
    supervisor.tick(11.0)

    assert room.started == ["serve"]


def test_program_that_keeps_exiting_ends_all_with_its_last_log_lines(room: Room, supervisor: Supervisor) -> None:
    for now_s in (0.0, 10.0, 20.0):
        room.codes = {"execute": 1}
        supervisor.tick(now_s)
        supervisor.tick(now_s + 5)
    room.codes = {"execute": 1}

    with pytest.raises(PartKeepsExiting, match="execute keeps exiting") as given_up:
        supervisor.tick(30.0)
    assert "exit code 1; 4 exits within 100 s" in str(given_up.value)
    assert "the last words of execute" in str(given_up.value)


def test_program_that_cannot_start_is_given_up(room: Room, supervisor: Supervisor, said: list[str]) -> None:
    room.codes, room.refuses = {"prometheus": -15}, True

    for second in range(9):
        supervisor.tick(float(second))
    with pytest.raises(PartKeepsExiting):
        supervisor.tick(20.0)
    assert said.count("prometheus cannot be started: no such program") == RESTART_LIMITS.exits_max
