"""`gpuwarden notify test`, and the line of `gpuwarden status` about notifications."""

from collections.abc import Callable
from pathlib import Path

import pytest

from remediator.ledger.ledger import Ledger
from tests.mailbox import mail_server


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "notify.toml"


def test_a_test_message_reaches_every_administrator_or_one_address(
    cli: Callable[..., int], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mail_server() as box:
        file.write_text(f'mail_server = "{box.url}"\nadministrators = ["a@example.com", "b@example.com"]\n')
        assert cli("notify", "test", "--notify-file", str(file)) == 0
        assert cli("notify", "test", "c@example.com", "--notify-file", str(file)) == 0

    assert [each.to for each in box.mails] == ["a@example.com", "b@example.com", "c@example.com"]
    assert {each.subject for each in box.mails} == {"[gpuwarden] test message"}
    assert capsys.readouterr().out.splitlines()[0] == "a@example.com: accepted by the server"


def test_a_failed_test_message_says_why_without_the_password(
    cli: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("notify", "test", "mailto://u:p4ssword@127.0.0.1:1?from=x@example.com&to=y@example.com") == 1

    said = capsys.readouterr().err
    assert said.startswith("gpuwarden notify: mailto://127.0.0.1: ")
    assert "Connection refused" in said
    assert "p4ssword" not in said


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no address to notify: give an address, or `administrators`"),
        ('administrators = ["ops@example.com"]', "a mail address needs mail_server = "),
        ('administrators = ["json://host/secret", "x://secret"]', "administrators: number 2: x:// is not supported"),
        ('mail_server = "smtp://u:secret@host"', "mail_server: use mailtos://USER:PASSWORD@HOST?from=ADDRESS"),
        ('admins = ["secret"]', "unknown name 'admins': use mail_server, administrators, submitters"),
        ('administrators = ["secret', "is not TOML: at "),
        ('[submitters]\nbob = "bob"', "submitters: 'bob': the address is invalid"),
    ],
)
def test_an_invalid_file_is_refused_without_its_addresses(
    cli: Callable[..., int], file: Path, capsys: pytest.CaptureFixture[str], content: str, says: str
) -> None:
    file.write_text(content)

    assert cli("notify", "test", "--notify-file", str(file)) == 1
    said = capsys.readouterr().err
    assert says in said
    assert "secret" not in said


def test_status_shows_messages_that_fail_for_long(
    cli: Callable[..., int], ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = ("--exporter", "none", "--prometheus", "none", "--alertmanager", "none", "--remediator", "none")
    began = ledger.now() - 900
    ledger.notices.notify_administrators(key="k", kind="chain", title="dead", text="dead", now=began)
    ledger.notices.expand(1, now=began)
    parcel = ledger.notices.claim("administrator 0", now=began)
    assert parcel is not None
    ledger.notices.mark_failed(parcel, "Connection refused", now=began)

    cli("status", "--queue-db", "none", *parts)

    says = "messages to an administrator fail for 15 min: Connection refused"
    assert f"1 notice not sent; {says}" in capsys.readouterr().out

    ledger.notices.withdraw("k", now=ledger.now())
    assert cli("status", "--queue-db", "none", *parts) == 1
    assert f"notifications DOWN      {says}" in capsys.readouterr().out
