"""`gpuwarden run --notify` sends one mail when its command has failed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpuwarden.supervisor.guarded import Guarded
from tests.mailbox import mail_server


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Guarded]:
    found = Guarded(tmp_path)
    yield found
    for process in found.started:
        process.kill()
        process.communicate()


def test_a_failed_command_is_one_mail_and_a_completed_one_none(run: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    with mail_server() as box:
        monkeypatch.setenv("GPUWARDEN_MAIL_SERVER", box.url)
        completed = run.result(["true"], "--notify", "alice@example.com")
        failed = run.result(["sh", "-c", "exit 3"], "--notify", "alice@example.com")

    assert (completed[0], failed[0]) == (0, 3)
    assert failed[1].splitlines()[-1] == "gpuwarden run: notification sent"
    (mail,) = box.mails
    assert (mail.to, mail.subject) == ("alice@example.com", "[gpuwarden] job failed")
    assert mail.text.startswith("Command sh -c 'exit 3', worker job of ")
    assert "Reason: exit code 3\n" in mail.text


def test_an_invalid_address_is_refused_before_the_start(run: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUWARDEN_MAIL_SERVER", raising=False)

    code, said = run.result(["touch", str(run.directory / "ran")], "--notify", "alice@example.com")

    assert (code, (run.directory / "ran").exists()) == (1, False)
    assert "gpuwarden run: a mail address needs $GPUWARDEN_MAIL_SERVER" in said
