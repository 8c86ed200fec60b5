"""What is kept of servers that have answered: written, read back by the next exporter, or not believed."""

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
def kept(tmp_path: Path) -> AnsweredFile:
    return AnsweredFile(tmp_path / "exporter")


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> LogCapture:
    capture = LogCapture()
    monkeypatch.setattr(exporter.sources.servers.monitor, "log", structlog.wrap_logger(None, processors=[capture]))
    return capture


def seen(kept: AnsweredFile | None, *containers: Container) -> ServerEvidence:
    """What one exporter sees of the first, from its start to its end."""
    with closing(Servers(Prober(), kept)) as servers:
        found = servers.observe(containers, build.NO_WORKERS, now_s=100.0)
        servers.keep()
    return found[0]


def content(**changes: Any) -> bytes:
    """A whole file that tells of one incarnation, but for what is changed; `None` takes a field away."""
    fields = {**json.loads(render(["c@1"], now=NOW)), **changes}
    return json.dumps({key: value for key, value in fields.items() if value is not None}).encode()


@pytest.mark.parametrize("incarnations", [(), ("c@2026",), ("c@2026", 'é\n"d"@1')], ids=len)
def test_what_is_written_is_read_back_in_order(incarnations: tuple[str, ...]) -> None:
    assert parse(render(incarnations, now=NOW), now=LATER) == incarnations


def test_of_more_than_fit_those_that_were_seen_last_are_written() -> None:
    many = [f"{number:0256}" for number in range(ANSWERED_MAX + 2)]

    assert parse(render(many, now=NOW), now=LATER) == tuple(many[2:])


@pytest.mark.parametrize(
    ("found", "says"),
    [
        pytest.param(b"", "not valid JSON", id="empty"),
        pytest.param(content()[:-9], "not valid JSON", id="torn"),
        pytest.param(b"\xff", "not valid JSON", id="no UTF-8"),
        pytest.param(b"[" * 200_000, "not valid JSON", id="deep"),
        pytest.param(b" " * (answered_servers.SIZE_MAX_BYTES + 1), "over 524288 bytes", id="oversized"),
        pytest.param(b"[]", "has not format 1", id="no object"),
        pytest.param(content(format=2), "has not format 1", id="of another format"),
        pytest.param(content(written=None), "no valid time", id="without a time"),
        pytest.param(content(written={"boottime_s": "1", "boot_id": "this boot"}), "no valid time", id="of no time"),
        pytest.param(
            content(written={"boottime_s": 10**400, "boot_id": "this boot"}), "no valid time", id="of no float"
        ),
        pytest.param(content(written={"boottime_s": 1.0, "boot_id": "x"}), "from another boot", id="of another boot"),
        pytest.param(content(written={"boottime_s": 5001.0, "boot_id": "this boot"}), "1 s in the future", id="future"),
        pytest.param(content(answered=None), "has no list", id="without a list"),
        pytest.param(content(answered={"c@1": 1}), "has no list", id="something else than a list"),
        pytest.param(content(answered=["c@1", ""]), "has no list", id="an empty incarnation"),
        pytest.param(content(answered=["c@1"] * (ANSWERED_MAX + 1)), "has no list", id="too many"),
    ],
)
def test_what_cannot_be_believed_tells_nothing(found: bytes, says: str) -> None:
    assert parse(content(), now=LATER) == ("c@1",)
    with pytest.raises(PersistedFileError, match=says):
        parse(found, now=LATER)


def test_nobody_has_answered_where_there_is_no_file(kept: AnsweredFile) -> None:
    assert kept.read() == ()


def test_nobody_else_may_write_what_is_kept(kept: AnsweredFile) -> None:
    kept.write(["c@1"])

    assert [each.name for each in kept.path.parent.iterdir()] == [answered_servers.NAME]
    assert (kept.path.stat().st_mode & 0o777, kept.path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_what_an_exporter_left_that_was_killed_as_it_wrote_is_in_nobodys_way(kept: AnsweredFile) -> None:
    kept.write(["c@1"])
    (kept.path.parent / f".{answered_servers.NAME}.new").write_bytes(b'{"form')

    assert kept.read() == ("c@1",)
    kept.write(["c@1", "c@2"])
    assert kept.read() == ("c@1", "c@2")


def test_what_was_kept_stays_where_the_disk_fills_up_in_the_middle(kept: AnsweredFile) -> None:
    kept.write(["c@1"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match="too large") as refused:
            kept.write(["c@1", "c@2"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert kept.read() == ("c@1",)
    assert refused.value.filename == str(kept.path)


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
def test_a_file_that_others_may_write_is_not_believed(kept: AnsweredFile, spoil: Callable[[Path], None]) -> None:
    kept.write(["c@1"])
    assert kept.read() == ("c@1",)

    spoil(kept.path)

    with pytest.raises((PersistedFileError, OSError)):
        kept.read()


def test_a_server_that_hangs_as_its_exporter_is_started_anew_has_answered(kept: AnsweredFile) -> None:
    seen(kept, by_health())

    assert seen(kept, by_health(**FAILING)).answered is True
    assert seen(None, by_health(**FAILING)).answered is False


def test_that_it_has_answered_is_of_one_incarnation(kept: AnsweredFile) -> None:
    seen(kept, by_health())
    reborn = replace(by_health(**FAILING), incarnation="another")

    assert seen(kept, reborn).answered is False


def test_it_is_known_through_a_start_at_which_the_server_is_not_seen(kept: AnsweredFile) -> None:
    seen(kept, by_health())
    seen(kept, replace(by_health(), id="other", name="other", incarnation="other"))

    assert kept.read() == (by_health().incarnation, "other")
    assert seen(kept, by_health(**FAILING)).answered is True


def test_incarnations_that_ended_make_room_and_those_that_are_there_do_not(kept: AnsweredFile) -> None:
    kept.write([by_health().incarnation, *(f"over@{number}" for number in range(ANSWERED_MAX - 1))])

    seen(kept, by_health(), replace(by_health(), id="other", name="other", incarnation="other"))

    assert kept.read() == (
        *(f"over@{number}" for number in range(1, ANSWERED_MAX - 1)),
        by_health().incarnation,
        "other",
    )


@pytest.mark.parametrize(
    "found",
    [b"{", render(["c@1"], now=replace(clock.stamp(), boot_id="x"))],
    ids=["half a file", "of another boot"],  # the same in each process of a run
)
def test_an_empty_file_is_reported_and_rewritten(kept: AnsweredFile, logged: LogCapture, found: bytes) -> None:
    kept.write(())
    kept.path.write_bytes(found)

    assert seen(kept, by_health(**FAILING)).answered is False
    (entry,) = [each for each in logged.entries if each["log_level"] == "warning"]
    assert entry["event"] == "file of answered servers not read"
    seen(kept, by_health())
    assert kept.read() == (by_health().incarnation,)


def test_nothing_is_written_while_nothing_changes(kept: AnsweredFile) -> None:
    with closing(Servers(Prober(), kept)) as servers:
        servers.observe([by_health()], build.NO_WORKERS, now_s=100.0)
        servers.keep()
        kept.path.unlink()
        servers.observe([by_health()], build.NO_WORKERS, now_s=101.0)
        servers.keep()

    assert not kept.path.exists()


def test_an_unwritable_folder_is_reported_and_tried_again(house: Path, kept: AnsweredFile) -> None:
    kept.path.parent.write_bytes(b"a file in the place of the folder")
    with closing(Servers(Prober(), kept)) as servers:
        sampler = Sampler(
            host="box-1", directory=house, containers={"docker": Docker(by_health())}, gpus=None,
            thresholds=Thresholds(), servers=servers,
        )  # fmt: skip

        failed = sampler.sample()
        kept.path.parent.unlink()
        mended = sampler.sample()

    success = [{each.source: each.success for each in snapshot.sources} for snapshot in (failed, mended)]
    everything = {"workers": True, "docker": True, "servers": True}
    assert success == [{**everything, "answered": False}, {**everything, "answered": True}]
    assert failed.servers is not None
    assert [each.answered for each in failed.servers] == [True]
    assert kept.read() == (by_health().incarnation,)
