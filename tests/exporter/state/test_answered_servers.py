"""The file of servers that have answered: written, read by the next exporter, or rejected."""

import json
import os
import resource
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import LogCapture

import exporter.sources.servers.monitor
from exporter.model.container import Container, ServerEvidence
from exporter.model.thresholds import Thresholds
from exporter.sampler import Sampler
from exporter.sources.servers.http_probe import Prober
from exporter.sources.servers.monitor import Servers
from exporter.state import answered_servers
from exporter.state.answered_servers import ANSWERED_MAX, AnsweredFile, parse, render
from exporter.state.file import PersistedFileError
from gpuwarden import clock
from gpuwarden.state_file import Stamp
from tests.exporter import builders as build
from tests.exporter.sources.servers.test_monitor import Docker, by_health

NOW = Stamp(boottime_s=100.0, boot_id="this boot", unix_s=1.8e9)
LATER = replace(NOW, boottime_s=5000.0)
FAILING: dict[str, Any] = {"status": "unhealthy", "passed": False, "newest": "2", "failing_streak": 3}


@pytest.fixture
def answered_file(tmp_path: Path) -> AnsweredFile:
    return AnsweredFile(tmp_path / "exporter")


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> LogCapture:
    capture = LogCapture()
    monkeypatch.setattr(exporter.sources.servers.monitor, "log", structlog.wrap_logger(None, processors=[capture]))
    return capture


def evidence_of_run(answered_file: AnsweredFile | None, *containers: Container) -> ServerEvidence:
    """The server's evidence from one exporter, from start to stop."""
    with closing(Servers(Prober(), answered_file)) as servers:
        found = servers.observe(containers, build.NO_WORKERS, now_s=100.0)
        servers.keep()
    return found[0]


def content(**changes: Any) -> bytes:
    """A valid file with one incarnation, with `changes`; `None` removes a field."""
    fields = {**json.loads(render(["c@1"], now=NOW)), **changes}
    return json.dumps({key: value for key, value in fields.items() if value is not None}).encode()


@pytest.mark.parametrize("incarnations", [(), ("c@2026",), ("c@2026", 'é\n"d"@1')], ids=len)
def test_written_file_is_read_back_in_order(incarnations: tuple[str, ...]) -> None:
    assert parse(render(incarnations, now=NOW), now=LATER) == incarnations


def test_newest_incarnations_are_kept_if_there_are_too_many() -> None:
    many = [f"{number:0256}" for number in range(ANSWERED_MAX + 2)]

    assert parse(render(many, now=NOW), now=LATER) == tuple(many[2:])


@pytest.mark.parametrize(
    ("found", "says"),
    [
        pytest.param(b"", "not valid JSON", id="empty"),
        pytest.param(content()[:-9], "not valid JSON", id="torn"),
        pytest.param(b"\xff", "not valid JSON", id="not UTF-8"),
        pytest.param(b"[" * 200_000, "not valid JSON", id="deep"),
        pytest.param(b" " * (answered_servers.SIZE_MAX_BYTES + 1), "over 524288 bytes", id="oversized"),
        pytest.param(b"[]", "has not format 1", id="no object"),
        pytest.param(content(format=2), "has not format 1", id="other format"),
        pytest.param(content(written=None), "no valid time", id="no time"),
        pytest.param(
            content(written={"boottime_s": "1", "boot_id": "this boot"}), "no valid time", id="time without a number"
        ),
        pytest.param(
            content(written={"boottime_s": 10**400, "boot_id": "this boot"}),
            "no valid time",
            id="time too large for a float",
        ),
        pytest.param(content(written={"boottime_s": 1.0, "boot_id": "x"}), "from another boot", id="other boot"),
        pytest.param(content(written={"boottime_s": 5001.0, "boot_id": "this boot"}), "1 s in the future", id="future"),
        pytest.param(content(answered=None), "has no list", id="no list"),
        pytest.param(content(answered={"c@1": 1}), "has no list", id="not a list"),
        pytest.param(content(answered=["c@1", ""]), "has no list", id="an empty incarnation"),
        pytest.param(content(answered=["c@1"] * (ANSWERED_MAX + 1)), "has no list", id="too many"),
    ],
)
def test_invalid_file_is_rejected(found: bytes, says: str) -> None:
    assert parse(content(), now=LATER) == ("c@1",)
    with pytest.raises(PersistedFileError, match=says):
        parse(found, now=LATER)


def test_missing_file_has_no_incarnations(answered_file: AnsweredFile) -> None:
    assert answered_file.read() == ()


def test_file_and_folder_are_private(answered_file: AnsweredFile) -> None:
    answered_file.write(["c@1"])

    assert [each.name for each in answered_file.path.parent.iterdir()] == [answered_servers.NAME]
    assert (answered_file.path.stat().st_mode & 0o777, answered_file.path.parent.stat().st_mode & 0o777) == (
        0o600,
        0o700,
    )


def test_partial_write_of_a_killed_exporter_does_not_matter(answered_file: AnsweredFile) -> None:
    answered_file.write(["c@1"])
    (answered_file.path.parent / f".{answered_servers.NAME}.new").write_bytes(b'{"form')

    assert answered_file.read() == ("c@1",)
    answered_file.write(["c@1", "c@2"])
    assert answered_file.read() == ("c@1", "c@2")


def test_file_stays_if_the_disk_is_full(answered_file: AnsweredFile) -> None:
    answered_file.write(["c@1"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match="too large") as refused:
            answered_file.write(["c@1", "c@2"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert answered_file.read() == ("c@1",)
    assert refused.value.filename == str(answered_file.path)


def writable_by_others(file: Path) -> None:
    file.chmod(0o622)


def of_another_user(file: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(file, 65534, -1)


def a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


def a_link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


@pytest.mark.parametrize("spoil", [writable_by_others, of_another_user, a_pipe, a_link])
def test_file_writable_by_others_is_rejected(answered_file: AnsweredFile, spoil: Callable[[Path], None]) -> None:
    answered_file.write(["c@1"])
    assert answered_file.read() == ("c@1",)

    spoil(answered_file.path)

    with pytest.raises((PersistedFileError, OSError)):
        answered_file.read()


def test_server_that_hangs_during_a_restart_of_the_exporter_has_answered(answered_file: AnsweredFile) -> None:
    evidence_of_run(answered_file, by_health())

    assert evidence_of_run(answered_file, by_health(**FAILING)).answered is True
    assert evidence_of_run(None, by_health(**FAILING)).answered is False


def test_answer_belongs_to_one_incarnation(answered_file: AnsweredFile) -> None:
    evidence_of_run(answered_file, by_health())
    reborn = replace(by_health(**FAILING), incarnation="another")

    assert evidence_of_run(answered_file, reborn).answered is False


def test_answer_is_known_after_a_restart_without_the_server(answered_file: AnsweredFile) -> None:
    evidence_of_run(answered_file, by_health())
    evidence_of_run(answered_file, replace(by_health(), id="other", name="other", incarnation="other"))

    assert answered_file.read() == (by_health().incarnation, "other")
    assert evidence_of_run(answered_file, by_health(**FAILING)).answered is True


def test_ended_incarnations_are_removed_first(answered_file: AnsweredFile) -> None:
    answered_file.write([by_health().incarnation, *(f"over@{number}" for number in range(ANSWERED_MAX - 1))])

    evidence_of_run(answered_file, by_health(), replace(by_health(), id="other", name="other", incarnation="other"))

    assert answered_file.read() == (
        *(f"over@{number}" for number in range(1, ANSWERED_MAX - 1)),
        by_health().incarnation,
        "other",
    )


@pytest.mark.parametrize(
    "found",
    [b"{", render(["c@1"], now=replace(clock.stamp(), boot_id="x"))],
    ids=["half a file", "other boot"],  # the same in each process of a run
)
def test_invalid_file_is_reported_and_rewritten(answered_file: AnsweredFile, logged: LogCapture, found: bytes) -> None:
    answered_file.write(())
    answered_file.path.write_bytes(found)

    assert evidence_of_run(answered_file, by_health(**FAILING)).answered is False
    (entry,) = [each for each in logged.entries if each["log_level"] == "warning"]
    assert entry["event"] == "file of answered servers not read"
    evidence_of_run(answered_file, by_health())
    assert answered_file.read() == (by_health().incarnation,)


def test_unchanged_file_is_not_written(answered_file: AnsweredFile) -> None:
    with closing(Servers(Prober(), answered_file)) as servers:
        servers.observe([by_health()], build.NO_WORKERS, now_s=100.0)
        servers.keep()
        answered_file.path.unlink()
        servers.observe([by_health()], build.NO_WORKERS, now_s=101.0)
        servers.keep()

    assert not answered_file.path.exists()


def test_unwritable_folder_is_reported_and_retried(house: Path, answered_file: AnsweredFile) -> None:
    answered_file.path.parent.write_bytes(b"a file in the place of the folder")
    with closing(Servers(Prober(), answered_file)) as servers:
        sampler = Sampler(
            host="box-1", directory=house, containers={"docker": Docker(by_health())}, gpus=None,
            thresholds=Thresholds(), servers=servers,
        )  # fmt: skip

        failed = sampler.sample()
        answered_file.path.parent.unlink()
        retried = sampler.sample()

    success = [{each.source: each.success for each in snapshot.sources} for snapshot in (failed, retried)]
    everything = {"workers": True, "docker": True, "servers": True}
    assert success == [{**everything, "answered": False}, {**everything, "answered": True}]
    assert failed.servers is not None
    assert [each.answered for each in failed.servers] == [True]
    assert answered_file.read() == (by_health().incarnation,)
