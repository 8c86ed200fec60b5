"""Entries on a driver's list that outlive their process: whoever has the pid by now is not charged with it."""

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

from exporter.readings import GpuReadings
from exporter.sources.recycled import WORKING_LOOKS, Recycled
from gpuwarden import cgroup
from tests.exporter import builders as build

GIB = 2**30
Within = Mapping[str, frozenset[int] | None]


class Host:
    """Processes by pid, each with its start, in files shaped like the kernel's (proc_pid_stat(5))."""

    def __init__(self, proc: Path) -> None:
        self.proc = proc
        self.recycled = Recycled(proc=proc)

    def process(self, pid: int, ticks: int) -> None:
        folder = self.proc / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "stat").write_text(f"{pid} (body) S " + "0 " * 18 + f"{ticks} 0 0\n")

    def end(self, pid: int) -> None:
        (self.proc / str(pid) / "stat").unlink()

    def look(self, *pids: int, within: Within = {}, **changes: Any) -> tuple[int, ...]:  # noqa: B006 - it is only read
        """What is recycled of a GPU that lists these pids."""
        gpu = build.gpu(0, *(build.process(pid, 0.5, GIB) for pid in pids), **changes)
        found = self.recycled.mark(build.gpus(gpu), within)
        assert found is not None
        return found.gpus[0].recycled


def within(**containers: set[int] | None) -> Within:
    return {name: None if pids is None else frozenset(pids) for name, pids in containers.items()}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_an_entry_of_a_process_that_ended_is_not_its_pids_next_owners(host: Host) -> None:
    host.process(41, ticks=1)
    before = host.look(41, within=within(beta={41}))
    host.end(41)
    meanwhile = host.look(41, within=within(beta=None))
    host.process(41, ticks=2)

    assert (before, meanwhile) == ((), ())
    assert host.look(41, within=within(alpha={41})) == (41,)
    assert host.look(41, within=within(alpha={41})) == (41,)


def test_once_its_entry_goes_and_comes_anew_it_is_the_new_owners(host: Host) -> None:
    host.process(41, ticks=1)
    host.look(41)
    host.process(41, ticks=2)
    host.look(41, within=within(alpha={41}))

    assert host.look(within=within(alpha={41})) == ()
    assert host.look(41, within=within(alpha={41})) == ()


def reused_unseen(host: Host) -> None:
    """Its list cannot be read while a process ends, another has its pid, and that one comes to be on the GPU."""
    host.process(41, ticks=1)
    host.look(41, within=within(beta={41}))
    host.process(41, ticks=2)
    host.look(processes=None, within=within(alpha={41}))


def holds(host: Host, memory_bytes: int | None, *, working: float = 0.0, there: str = "alpha") -> tuple[int, ...]:
    gpu = build.gpu(0, build.process(41, working, memory_bytes))
    found = host.recycled.mark(build.gpus(gpu), within(**{there: {41}}))
    assert found is not None
    return found.gpus[0].recycled


def test_an_entry_whose_memory_grows_is_of_who_has_its_pid_now(host: Host) -> None:
    reused_unseen(host)

    seen = [holds(host, each) for each in (GIB, GIB, None, GIB + 1, GIB + 1)]

    assert seen == [(41,), (41,), (41,), (), ()]
    assert holds(host, GIB + 1, there="moved") == ()  # nor is it marked again as it is looked up


def test_an_entry_whose_memory_is_given_back_is_still_of_the_dead(host: Host) -> None:
    reused_unseen(host)

    assert [holds(host, each) for each in (GIB, GIB // 2, 0)] == [(41,)] * 3
    assert holds(host, 1) == ()


def test_an_entry_that_works_look_after_look_is_of_who_has_its_pid_now(host: Host) -> None:
    reused_unseen(host)

    once = [holds(host, GIB, working=0.5) for _ in range(WORKING_LOOKS - 1)]
    holds(host, GIB)
    anew = [holds(host, GIB, working=0.5) for _ in range(WORKING_LOOKS)]

    assert once == [(41,)] * (WORKING_LOOKS - 1)
    assert anew == [*once, ()]


def test_an_entry_that_neither_works_nor_grows_stays_nobodys(host: Host) -> None:
    reused_unseen(host)

    assert {holds(host, GIB) for _ in range(3 * WORKING_LOOKS)} == {(41,)}


def test_whose_process_moves_to_another_container_takes_its_entry_along(host: Host) -> None:
    host.process(41, ticks=1)
    host.look(41, within=within(alpha={41}))

    assert host.look(41, within=within(alpha=None, beta={41})) == ()


def test_a_process_of_its_own_container_has_the_pid_of_one_that_ended_there(host: Host) -> None:
    host.process(41, ticks=1)
    host.look(41, within=within(alpha={40, 41}))
    host.end(41)
    host.look(41, within=within(alpha={40}))
    host.process(41, ticks=2)

    assert host.look(41, within=within(alpha={40, 41})) == (41,)


@pytest.mark.parametrize(
    "unread",
    [
        pytest.param(lambda host: host.look(processes=None), id="its list cannot be read"),
        pytest.param(lambda host: host.recycled.mark(None, {}), id="no source answers"),
        pytest.param(
            lambda host: host.recycled.mark(GpuReadings(source="test", gpus=(), failed=("gpu",)), {}), id="its fails"
        ),
    ],
)
def test_a_look_that_cannot_see_the_list_has_not_seen_the_entry_go(host: Host, unread: Any) -> None:
    host.process(41, ticks=1)
    host.look(41)
    host.process(41, ticks=2)

    unread(host)

    assert host.look(41, within=within(alpha={41})) == (41,)


def test_who_comes_while_no_source_answers_is_compared_all_the_same(host: Host) -> None:
    host.process(41, ticks=1)
    host.look(41)
    host.process(41, ticks=2)
    host.recycled.mark(None, within(alpha={41}))

    assert host.look(41, within=within(alpha={41})) == (41,)


def test_a_gpu_that_is_gone_is_forgotten(host: Host) -> None:
    host.process(41, ticks=1)
    host.look(41)
    host.recycled.mark(build.gpus(), {})
    host.process(41, ticks=2)

    assert host.look(41, within=within(alpha={41})) == ()


def test_an_entry_that_was_first_seen_without_a_process_is_nobodys(host: Host) -> None:
    host.look(41)
    host.process(41, ticks=2)

    assert host.look(41, within=within(alpha={41})) == (41,)


def test_processes_whose_start_is_hidden_from_us_are_believed_as_they_are(host: Host) -> None:
    host.look(41)

    assert host.look(41, within=within(alpha={41})) == ()


def test_while_we_are_short_of_files_the_entry_is_nobodys_and_compared_again(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.EMFILE, "too many open files")

    host.process(41, ticks=1)
    host.look(41)
    with monkeypatch.context() as patched:
        patched.setattr(cgroup, "start_ticks", short)
        short_of_files = host.look(41, 42, within=within(alpha={41}))
    host.process(42, ticks=1)

    assert short_of_files == (41,)
    assert host.look(41, 42, within=within(alpha={41, 42})) == ()


def test_a_look_at_which_nothing_has_changed_reads_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = cgroup.start_ticks

    def counted(pid: int, *, proc: Path) -> int:
        read.append(pid)
        return real(pid, proc=proc)

    monkeypatch.setattr(cgroup, "start_ticks", counted)
    for pid in (41, 42):
        host.process(pid, ticks=1)
    there = within(alpha={41, 42})
    host.look(41, 42, within=there)
    first = len(read)

    for _ in range(3):
        host.look(41, 42, within={"alpha": frozenset({41, 42})})

    assert (first, len(read)) == (2, 2)
