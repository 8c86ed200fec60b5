"""`gpuwarden host` with the queue that the gateway reads, on both databases."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.queue import JobStore
from gpuwarden.queue.hosts.reports import Kind
from gpuwarden.queue.hosts.tokens import PREFIX, Scope
from tests.conftest import Cli
from tests.gpuwarden.queue.builders import put_to_work

pytestmark = pytest.mark.both_databases


def token_of(cli: Cli, *said: str) -> str:
    """The token that a command prints."""
    code, out, err = cli("host", *said)
    assert code == 0, err
    assert out.count("\n") == 1
    assert out.startswith(PREFIX)
    assert out.strip() not in err
    return out.removesuffix("\n")


def host_of(store: JobStore, token: str, scope: Scope = Scope.QUEUE) -> str | None:
    found = store.host_tokens.verify(token, scope, store.now())
    return None if found is None else found.host


def listed(cli: Cli) -> list[dict[str, Any]]:
    code, out, _ = cli("host", "list", "--json")
    assert code == 0
    return [json.loads(line) for line in out.splitlines()]


def test_file_takes_the_token_alone_and_the_terminal_the_words(store: JobStore, url: str, tmp_path: Path) -> None:
    kept = tmp_path / "token"
    command = [sys.executable, "-m", "gpuwarden", "host", "enrol", "box1"]

    with kept.open("w") as file:
        ran = subprocess.run(
            command, env={**os.environ, "GPUWARDEN_QUEUE_DB": url}, stdout=file, stderr=subprocess.PIPE, text=True,
            check=True, timeout=60,
        )  # fmt: skip

    assert host_of(store, kept.read_text().removesuffix("\n")) == "box1"
    assert ran.stderr == "gpuwarden host: box1 is enrolled for queue and reports; the token is shown only now\n"


def test_token_has_the_named_scopes(store: JobStore, cli: Cli) -> None:
    token = token_of(cli, "enrol", "box1", "--scopes", "reports")

    assert (host_of(store, token, Scope.REPORTS), host_of(store, token, Scope.QUEUE)) == ("box1", None)
    assert [each["scopes"] for each in listed(cli)] == [["reports"]]


def test_token_of_some_queues_is_shown_with_them(store: JobStore, cli: Cli) -> None:
    _, _, said = cli("host", "enrol", "box1", "--queue", "gpu", "--queue", "big")
    token_of(cli, "enrol", "box2")
    token_of(cli, "rotate", "box1", "--grace-s", "60")

    assert said.startswith("gpuwarden host: box1 is enrolled for queue and reports, only for queue gpu and big; ")
    assert [each["queues"] for each in listed(cli)] == [["big", "gpu"], ["big", "gpu"], None]
    assert re.findall("^queues +(.*)$", cli("host", "show", "box1")[1], re.MULTILINE) == ["big, gpu"] * 2
    assert re.findall("^queues +(.*)$", cli("host", "show", "box2")[1], re.MULTILINE) == ["all"]
    assert [each.queues for each in store.host_tokens.rows("box2")] == [None]


def test_enrolment_of_a_known_host_names_rotate_and_changes_nothing(store: JobStore, cli: Cli) -> None:
    token = token_of(cli, "enrol", "box1")

    code, out, err = cli("host", "enrol", "box1", "--scopes", "reports")

    assert (code, out) == (1, "")
    assert "box1 is enrolled: `gpuwarden host rotate box1` replaces its token" in err
    assert host_of(store, token) == "box1"


def test_rotated_token_replaces_the_old_one_at_once(store: JobStore, cli: Cli) -> None:
    old = token_of(cli, "enrol", "box1")

    new = token_of(cli, "rotate", "box1")

    assert (host_of(store, old), host_of(store, new)) == (None, "box1")
    assert len(listed(cli)) == 1


def test_grace_of_a_rotation_keeps_both_tokens_valid(store: JobStore, cli: Cli) -> None:
    old = token_of(cli, "enrol", "box1")

    new = token_of(cli, "rotate", "box1", "--grace-s", "3600")

    assert (host_of(store, old), host_of(store, new)) == ("box1", "box1")
    assert [(each["valid"], each["revoked_at"] is None) for each in listed(cli)] == [(True, True), (True, False)]
    _, out, _ = cli("host", "show", "box1")
    assert "replaced, valid until " in out


def test_revoked_host_is_refused_until_it_is_enrolled_again(store: JobStore, cli: Cli) -> None:
    old = token_of(cli, "enrol", "box1")

    assert cli("host", "revoke", "box1") == (0, "box1 is revoked: the gateway refuses its token\n", "")

    assert host_of(store, old) is None
    assert cli("host", "list")[1].splitlines()[1].split()[:2] == ["box1", "revoked"]
    said = "gpuwarden host: box1 has no valid token: see `gpuwarden host list`\n"
    assert cli("host", "revoke", "box1") == (1, "", said)
    code, _, err = cli("host", "rotate", "box1")
    assert (code, "box1 has no valid token: `gpuwarden host enrol box1` makes one" in err) == (1, True)
    new = token_of(cli, "enrol", "box1")
    assert (host_of(store, old), host_of(store, new)) == (None, "box1")


@pytest.mark.parametrize(
    "said", [["list"], ["list", "--json"], ["show", "box1"], ["show", "box1", "--json"]], ids=" ".join
)
def test_lists_show_the_last_use_and_no_secret(store: JobStore, cli: Cli, said: list[str]) -> None:
    before = cli("host", *said)[1]
    token = token_of(cli, "enrol", "box1")
    unused = cli("host", *said)[1]
    host_of(store, token)

    code, out, _ = cli("host", *said)

    assert (code, before) == (0, "")
    *_, secret = token.split("_")
    assert [each for each in (token, secret, PREFIX, "hash") if each in out] == []
    if "--json" in said:
        (found,) = json.loads(out)["tokens"] if "show" in said else [json.loads(out)]
        assert (found["host"], found["valid"], found["scopes"]) == ("box1", True, ["queue", "reports"])
        assert 0 <= store.now() - found["last_seen_at"] < 60
    else:
        assert ("never" in unused, "never" in out, " s ago" in out) == (True, False, True)


def test_host_is_shown_with_the_age_of_its_reports(store: JobStore, cli: Cli) -> None:
    store.host_tokens.enrol("box1", now=store.now())
    store.host_reports.save("box1", Kind.PAGE, b"", now=store.now() - 75)
    store.host_reports.save("box2", Kind.GPU, b"", now=store.now())

    _, out, _ = cli("host", "show", "box1")
    assert re.search(r"^report   page, 1 min 1\d s ago$", out, re.MULTILINE)
    assert "gpu" not in out
    _, out, _ = cli("host", "show", "box1", "--json")
    assert list(json.loads(out)["report_ages_s"]) == ["page"]


def test_removed_host_is_forgotten_once_it_is_silent(store: JobStore, cli: Cli) -> None:
    now = store.now()
    put_to_work(store, "box1")
    store.batches.sync("box1", [], [], now=now - 600)
    store.batches.sync("box2", [], [], now=now)
    store.seen_hosts.decide(now=now, since=now - 600, after_s=180.0)

    first, second = cli("host", "list")[1].splitlines()[1:]
    assert re.fullmatch(r"box1 +no token +- +- +- +lost, 10 min .*ago", first)
    assert re.fullmatch(r"box2 +no token +- +- +- +\d s ago", second)
    assert [(each["host"], each["lost_at"] is None) for each in listed(cli)] == [("box1", False), ("box2", True)]
    assert cli("host", "forget", "box1") == (0, "box1 is forgotten until it is heard again\n", "")
    code, _, err = cli("host", "forget", "box2")
    assert (code, "box2 is not forgotten" in err, "stop its workers first" in err) == (1, True, True)
    assert [each["host"] for each in listed(cli)] == ["box2"]


def test_unknown_host_is_not_shown(store: JobStore, cli: Cli) -> None:
    assert store
    code, out, err = cli("host", "show", "box9")

    assert (code, out) == (1, "")
    assert err == "gpuwarden host: box9 is not enrolled: see `gpuwarden host list`\n"
    assert cli("host", "list") == (0, "", "no host is enrolled: `gpuwarden host enrol NAME` makes its token\n")


def test_token_that_cannot_be_printed_is_replaced_by_a_rotation(store: JobStore, cli: Cli, url: str) -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "gpuwarden", "host", "enrol", "box1"],
            env={**os.environ, "GPUWARDEN_QUEUE_DB": url}, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            timeout=60,
        )  # fmt: skip

    assert ran.returncode != 0
    assert "cannot be printed (No space left on device): make another with `gpuwarden host rotate box1`" in ran.stderr
    assert host_of(store, token_of(cli, "rotate", "box1")) == "box1"


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (["enrol"], "missing NAME"),
        (["enrol", "box 1"], "host name 'box 1' is invalid"),
        (["enrol", "box1", "--scopes", "repots"], "scope 'repots' is unknown; did you mean reports?"),
        (["enrol", "box1", "--scopes", ""], "scope '' is unknown: use queue,reports"),
        (["enrol", "box1", "--queue", "a\nb"], r"queue 'a\nb' is invalid"),
        (["rotate", "box1", "--grace-s", "-1"], "'-1' is invalid: use seconds from 0 to 604800"),
        (["rotate", "box1", "--grace-s", "nan"], "'nan' is invalid"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else None,
)  # fmt: skip
def test_wrong_usage_is_named_and_makes_no_token(store: JobStore, cli: Cli, said: list[str], says: str) -> None:
    code, out, err = cli("host", *said)

    assert (code, out) == (2, "")
    assert says in err
    assert store.host_tokens.rows() == []
