"""Group commit: concurrent payloads share a transaction, and each caller gets its own result."""

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from contextlib import closing

import pytest

from gpuwarden.db.errors import DatabaseError, NoAnswerError
from remediator.ledger.ledger import Ledger
from remediator.webhook import batch_writer
from remediator.webhook.batch_writer import BATCH_MAX, GroupCommit
from remediator.webhook.intake import Inbox
from tests.remediator.builders import HOST, alert
from tests.remediator.ledger.test_ledger import rows
from tests.waiting import eventually, together


class Disk:
    """Records the items of each transaction, which waits for `go_on`."""

    def __init__(self) -> None:
        self.written: list[list[int]] = []
        self.go_on = threading.Event()
        self.refuses: set[int] = set()
        self.breaks: set[int] = set()
        self.is_away = False

    def write(self, some: Sequence[int]) -> list[str]:
        self.written.append(list(some))
        assert self.go_on.wait(10)
        if self.breaks.intersection(some):
            raise ValueError("an unexpected error")
        if self.is_away:
            raise NoAnswerError("it is away")
        if self.refuses.intersection(some):
            raise DatabaseError(f"one of {list(some)} cannot be written")
        return [f"{each} is kept" for each in some]


def written_at_once(disk: Disk, count: int) -> list[BaseException | None]:
    """Submit `count` items, all but the first during a transaction. Returns the exception of each."""
    writes = GroupCommit(disk.write)
    first = writes(0)
    eventually(lambda: disk.written, "the first is being written")
    rest = [writes(number) for number in range(1, count)]
    disk.go_on.set()
    return [each.exception(10) for each in [first, *rest]]


def test_items_that_wait_for_a_transaction_share_the_next() -> None:
    disk = Disk()

    assert written_at_once(disk, 6) == [None] * 6

    assert disk.written == [[0], [1, 2, 3, 4, 5]]


def test_transaction_has_at_most_the_batch_limit() -> None:
    disk = Disk()

    assert written_at_once(disk, 2 * BATCH_MAX + 5) == [None] * (2 * BATCH_MAX + 5)

    assert [len(each) for each in disk.written] == [1, BATCH_MAX, BATCH_MAX, 4]
    assert [number for each in disk.written for number in each] == list(range(2 * BATCH_MAX + 5))


def test_item_that_cannot_be_written_fails_alone() -> None:
    disk = Disk()
    disk.refuses = {2}

    errors = written_at_once(disk, 4)

    assert [each and str(each) for each in errors] == [None, None, "one of [2] cannot be written", None]
    assert disk.written[1] == [1, 2, 3]


def test_unreachable_database_is_tried_once_for_all_items() -> None:
    disk = Disk()
    disk.is_away = True

    errors = written_at_once(disk, 6)

    assert [type(each) for each in errors] == [NoAnswerError] * 6
    assert len(disk.written) == 2


def test_unexpected_error_fails_all_items_of_its_transaction() -> None:
    disk = Disk()
    disk.breaks = {2}

    errors = written_at_once(disk, 4)

    assert [type(each) for each in errors] == [type(None), ValueError, ValueError, ValueError]


def test_each_caller_gets_its_own_result() -> None:
    disk = Disk()
    writes = GroupCommit(disk.write)
    disk.go_on.set()

    assert [each.result(10) for each in (writes(7), writes(8))] == ["7 is kept", "8 is kept"]


def test_cancelled_item_is_not_written() -> None:
    disk = Disk()
    writes = GroupCommit(disk.write)
    first = writes(0)
    eventually(lambda: disk.written, "the first is being written")
    gone, rest = writes(1), writes(2)

    assert (first.cancel(), gone.cancel()) == (False, True)
    disk.go_on.set()

    assert (first.result(10), rest.result(10)) == ("0 is kept", "2 is kept")
    assert disk.written == [[0], [2]]
    with pytest.raises(CancelledError):
        gone.result(10)


def test_items_over_the_waiting_limit_fail_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_writer, "WAITING_MAX", 2)
    disk = Disk()
    writes = GroupCommit(disk.write)
    first = writes(0)
    eventually(lambda: disk.written, "the first is being written")
    rest = [writes(1), writes(2)]

    with pytest.raises(NoAnswerError, match="2 payloads already wait for the database"):
        writes(3).result(0)

    disk.go_on.set()
    assert [each.result(10) for each in (first, *rest)] == ["0 is kept", "1 is kept", "2 is kept"]
    assert writes(4).result(10) == "4 is kept"


def test_idle_thread_ends_and_the_next_item_starts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_writer, "IDLE_S", 0.01)
    disk = Disk()
    disk.go_on.set()
    writes = GroupCommit(disk.write)

    assert writes(1).result(10) == "1 is kept"
    eventually(lambda: not writes._writes and not any(each.name == "joined" for each in threading.enumerate()))

    assert writes(2).result(10) == "2 is kept"


def test_all_concurrent_payloads_are_saved(ledger: Ledger) -> None:
    inbox = Inbox(ledger, host=HOST)

    def deliver(sender: int) -> None:
        for number in range(10):
            took = inbox.take([alert(f"{sender}.{number}.{each}") for each in range(3)], [])
            assert took.result(10) == (3, 0)

    assert together(*(lambda sender=sender: deliver(sender) for sender in range(8))) == [None] * 8

    assert rows(ledger, "SELECT count(*), count(DISTINCT fingerprint) FROM alerts") == [(240, 240)]


def test_locked_file_refuses_until_it_is_unlocked(
    ledger: Ledger, ledger_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuwarden.db.engine.BUSY_TIMEOUT_S", 0.1)
    with closing(Ledger.open(ledger_url, host=HOST)) as serve:
        inbox = Inbox(serve, host=HOST)
        with ledger._engine.connect().execution_options(writes=True) as other, other.begin():
            answers = [each.exception(10) for each in [inbox.take([alert(f"f{n}")], []) for n in range(3)]]
        assert [type(each) for each in answers] == [NoAnswerError] * 3

        assert inbox.take([alert("later")], []).result(10) == (1, 0)

    assert rows(ledger, "SELECT fingerprint FROM alerts") == [("later",)]
