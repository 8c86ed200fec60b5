"""Tokens of hosts: which the gateway accepts, and what the database keeps of them."""

import hashlib
import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event, select, update

from gpuwarden.db.transactions import reading, writing
from gpuwarden.queue import JobStore
from gpuwarden.queue.hosts.tokens import GRACE_MAX_S, KEPT_S, PREFIX, SEEN_EVERY_S, HostTokenError, Scope
from gpuwarden.queue.schema import HOST_TOKENS
from gpuwarden.state_file import StateFileError
from tests.gpuwarden.queue.builders import NOW
from tests.waiting import together

pytestmark = pytest.mark.both_databases


def enrol(store: JobStore, host: str = "box1", **its: Any) -> str:
    return store.host_tokens.enrol(host, **{"now": NOW, **its})


def host_of(store: JobStore, token: str, *, scope: Scope = Scope.QUEUE, now: float = NOW) -> str | None:
    found = store.host_tokens.verify(token, scope, now)
    return None if found is None else found.host


def seen_at(store: JobStore, host: str = "box1") -> float | None:
    return store.host_tokens.rows(host)[0].last_seen_at


def stored(store: JobStore) -> list[dict[str, Any]]:
    with reading(store._engine) as connection:
        return [dict(row) for row in connection.execute(select(HOST_TOKENS)).mappings()]


@contextmanager
def statements(store: JobStore) -> Iterator[list[str]]:
    """The statements that are executed."""
    found: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_others: Any) -> None:
        found.append(statement.split(maxsplit=1)[0])

    event.listen(store._engine, "before_cursor_execute", note)
    yield found
    event.remove(store._engine, "before_cursor_execute", note)


# --- which tokens are accepted


def test_token_names_its_own_host_only(store: JobStore) -> None:
    first, second = enrol(store, "box1"), enrol(store, "box2")

    assert (host_of(store, first), host_of(store, second)) == ("box1", "box2")


@pytest.mark.parametrize("scope", Scope)
def test_token_allows_its_scopes_only(store: JobStore, scope: Scope) -> None:
    token = enrol(store, scopes=[scope])

    assert {each for each in Scope if host_of(store, token, scope=each)} == {scope}


def test_wrong_token_is_refused(store: JobStore) -> None:
    token, other = enrol(store), enrol(store, "box2")
    secret = token.rpartition("_")[2]
    last = "0" if token[-1] != "0" else "1"

    wrong = (
        "", "box1", PREFIX, secret, token[:-1], token[:-1] + last, token + "0", f"{token}\n", f" {token}",
        token.upper(), token.replace(secret, other.rpartition("_")[2]), f"{PREFIX}{'0' * 16}_{secret}",
        token[:-1] + "\u0661", token[:-1] + "\udcff", token[:-1] + "\0", "x" * 1_000_000,
    )  # fmt: skip
    assert [each for each in wrong if host_of(store, each) is not None] == []
    assert seen_at(store) is None
    assert host_of(store, token) == "box1", "the right one"


def test_text_that_is_no_token_costs_no_query(store: JobStore) -> None:
    token = enrol(store)

    with statements(store) as found:
        for each in ("", "x" * 1_000_000, token[:-1], token + "0"):
            assert host_of(store, each) is None

    assert found == []


def test_accepted_token_costs_one_query_and_a_write_a_minute(store: JobStore) -> None:
    token = enrol(store)
    host_of(store, token)

    with statements(store) as found:
        for after_s in (1, 30, SEEN_EVERY_S - 1, SEEN_EVERY_S, SEEN_EVERY_S + 1):
            assert host_of(store, token, now=NOW + after_s) == "box1"

    assert [each for each in found if each != "BEGIN"] == ["SELECT"] * 4 + ["UPDATE", "SELECT"]
    assert seen_at(store) == NOW + SEEN_EVERY_S


def test_last_use_is_set_again_after_the_clock_went_back(store: JobStore) -> None:
    token = enrol(store)
    host_of(store, token)

    host_of(store, token, now=NOW - 3600)

    assert seen_at(store) == NOW - 3600


def test_refused_use_is_not_seen(store: JobStore) -> None:
    token = enrol(store, scopes=[Scope.REPORTS])
    assert host_of(store, token, scope=Scope.QUEUE) is None
    store.host_tokens.revoke("box1", now=NOW)
    assert host_of(store, token, scope=Scope.REPORTS) is None

    assert seen_at(store) is None


def test_comparison_of_constant_time_decides(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    token = enrol(store)
    monkeypatch.setattr(hmac, "compare_digest", lambda *_: False)

    assert host_of(store, token) is None


def test_unreadable_row_is_refused(store: JobStore) -> None:
    token = enrol(store)
    with writing(store._engine) as connection:
        connection.execute(update(HOST_TOKENS).values(created_at=1e300))

    assert host_of(store, token) is None
    assert store.host_tokens.rows() == []


# --- what the database keeps


def test_database_keeps_a_hash_and_no_secret(store: JobStore) -> None:
    token = enrol(store)
    secret = token.rpartition("_")[2]

    (row,) = stored(store)

    assert len(bytes.fromhex(secret)) * 8 == 256
    assert row["token_hash"] == hashlib.sha256(token.encode()).hexdigest()
    assert secret not in str(row)
    assert len({enrol(store, f"other{n}").rpartition("_")[2] for n in range(20)} | {secret}) == 21


def test_row_of_a_revoked_host_is_deleted_after_90_days(store: JobStore) -> None:
    for host in ("old", "valid"):
        enrol(store, host)
    store.host_tokens.revoke("old", now=NOW)

    enrol(store, "box2", now=NOW + KEPT_S)
    assert {each.host for each in store.host_tokens.rows()} == {"old", "valid", "box2"}
    enrol(store, "box3", now=NOW + KEPT_S + 1)

    assert {each.host for each in store.host_tokens.rows()} == {"valid", "box2", "box3"}


# --- rotation and revocation


def test_rotation_ends_the_old_token_at_once_and_keeps_its_scopes(store: JobStore) -> None:
    old = enrol(store, scopes=[Scope.REPORTS])

    new = store.host_tokens.rotate("box1", now=NOW)

    assert new != old
    assert [host_of(store, each, scope=Scope.REPORTS) for each in (old, new)] == [None, "box1"]
    assert host_of(store, new, scope=Scope.QUEUE) is None
    assert len(stored(store)) == 1


def test_rotation_can_change_the_scopes(store: JobStore) -> None:
    enrol(store, scopes=[Scope.REPORTS])

    new = store.host_tokens.rotate("box1", scopes=[Scope.QUEUE], now=NOW)

    assert [host_of(store, new, scope=each) for each in (Scope.QUEUE, Scope.REPORTS)] == ["box1", None]


def test_rotation_keeps_the_queues_unless_it_names_others(store: JobStore) -> None:
    """An empty list or an unreadable one never means all queues."""
    enrol(store, queues=["train, big", "gpu"])
    enrol(store, "box2")

    def queues(host: str = "box1", **its: Any) -> tuple[str, ...] | None:
        found = store.host_tokens.verify(store.host_tokens.rotate(host, **its, now=NOW), Scope.QUEUE, NOW)
        assert found is not None
        return found.queues

    assert (queues(), queues("box2")) == (("gpu", "train, big"), None)
    assert (queues(queues=["gpu"]), queues(), queues(queues=[])) == (("gpu",), ("gpu",), ())
    token = store.host_tokens.rotate("box1", now=NOW)
    with writing(store._engine) as connection:
        connection.execute(update(HOST_TOKENS).where(HOST_TOKENS.c.host == "box1").values(queues=5))
    assert host_of(store, token) is None


def test_old_token_is_valid_for_the_grace_of_its_rotation(store: JobStore) -> None:
    old = enrol(store)
    new = store.host_tokens.rotate("box1", grace_s=GRACE_MAX_S, now=NOW)

    for now, found in ((NOW, "box1"), (NOW + GRACE_MAX_S - 1, "box1"), (NOW + GRACE_MAX_S, None)):
        assert (host_of(store, old, now=now), host_of(store, new, now=now)) == (found, "box1"), now


def test_second_rotation_ends_all_older_tokens(store: JobStore) -> None:
    first = enrol(store)
    second = store.host_tokens.rotate("box1", grace_s=3600, now=NOW)
    third = store.host_tokens.rotate("box1", now=NOW + 1)

    assert [host_of(store, each, now=NOW + 1) for each in (first, second, third)] == [None, None, "box1"]


def test_revocation_ends_all_tokens_of_one_host(store: JobStore) -> None:
    mine, others = [enrol(store)], enrol(store, "box2")
    mine.append(store.host_tokens.rotate("box1", grace_s=3600, now=NOW))

    assert store.host_tokens.revoke("box1", now=NOW)
    assert not store.host_tokens.revoke("box1", now=NOW)

    assert [host_of(store, each) for each in (*mine, others)] == [None, None, "box2"]


def test_revoked_host_is_enrolled_again_with_another_token(store: JobStore) -> None:
    old = enrol(store)
    store.host_tokens.revoke("box1", now=NOW)

    new = enrol(store)

    assert [host_of(store, each) for each in (old, new)] == [None, "box1"]


def test_enrolled_host_is_not_enrolled_again(store: JobStore) -> None:
    token = enrol(store)

    with pytest.raises(HostTokenError, match="box1 is enrolled: `gpuwarden host rotate box1` replaces its token"):
        enrol(store)

    assert host_of(store, token) == "box1"


def test_host_without_a_valid_token_is_not_rotated(store: JobStore) -> None:
    enrol(store)
    store.host_tokens.revoke("box1", now=NOW)

    for host in ("box1", "box2"):
        with pytest.raises(HostTokenError, match=f"{host} has no valid token: `gpuwarden host enrol {host}`"):
            store.host_tokens.rotate(host, now=NOW)


def test_invalid_host_name_is_refused(store: JobStore) -> None:
    with pytest.raises(StateFileError, match="host name 'box 1' is invalid"):
        enrol(store, "box 1")


def test_enrolments_at_once_leave_one_token(store: JobStore) -> None:
    made = together(*[lambda: enrol(store)] * 4)

    accepted = [each for each in made if isinstance(each, str)]
    assert len(accepted) == 1
    assert host_of(store, accepted[0]) == "box1"


def test_rotations_at_once_leave_one_valid_token(store: JobStore) -> None:
    enrol(store)

    made = together(*[lambda: store.host_tokens.rotate("box1", now=NOW)] * 4)

    assert len({*made}) == 4
    assert len([each for each in made if host_of(store, str(each))]) == 1
