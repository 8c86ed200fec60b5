"""Receivers of operators: their URLs, the configuration for Alertmanager, and a mail through the real one."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.standalone import init, receivers
from deploy.standalone.config_files import Intervals, alertmanager_config
from testbed.check_release import run_part
from tests.deploy.test_alertmanager import DOWN, STALL, alertmanager, program
from tests.mailbox import mail_server
from tests.remediator.alertmanager import send_alerts
from tests.waiting import eventually

WEBHOOK = "https://hooks.slack.com/services/T0/B0/abcXYZ"
MAIL = "mailtos://ann:s%2Fcret@smtp.example.com?from=gpu@example.com&to=ops%2Bgpu@example.com,b@example.com"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        pytest.param(MAIL, {"to": "ops+gpu@example.com, b@example.com", "from": "gpu@example.com",
                            "smarthost": "smtp.example.com:587", "require_tls": True, "auth_username": "ann"},
                     id="STARTTLS and a password"),
        pytest.param("mailtos://ann:x@example.com?mode=ssl", {"to": "ann@example.com", "from": "ann@example.com",
                     "smarthost": "example.com:465", "require_tls": True, "auth_username": "ann"},
                     id="TLS from the start, to oneself"),
        pytest.param("mailto://mail?from=a@b.c&to=o+p@b.c", {"to": "o+p@b.c", "from": "a@b.c", "smarthost": "mail:25",
                     "require_tls": False}, id="no TLS and no password"),
        pytest.param("mailto://example.com:2525?smtp=::1&from=a@b.c", {"to": "a@b.c", "from": "a@b.c",
                     "smarthost": "[::1]:2525", "require_tls": False}, id="another server"),
    ],
)  # fmt: skip
def test_mail_urls(url: str, expected: dict[str, Any]) -> None:
    found = receivers.parse(url)

    assert (found.integration, dict(found.config)) == ("email_configs", expected)


def test_slack_urls() -> None:
    for url, channel in ((WEBHOOK, None), ("slack://T0/B0/abcXYZ", None), ("slack://T0/B0/abcXYZ/#gpus", "#gpus")):
        found = receivers.parse(url)
        assert (found.secret, found.secret_field, found.config.get("channel")) == (WEBHOOK, "api_url_file", channel)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ops@example.com", "Alertmanager cannot send to it: expected a Slack webhook, or for example mailtos://"),
        ("mailto:ops@example.com", "no mail server in the URL: expected for example mailtos://"),
        ("mailto://mail:0x", "invalid address or port"),
        ("mailto://mail?to=ops@example.com", "no valid address in `from`"),
        ("mailto://mail?from=a@b.c&to=ops", "no valid address in `to`"),
        ("mailto://ann:pw-of-ann@mail?from=a@b.c", "unencrypted: use mailtos://"),
        ("mailtos://ann@mail?from=a@b.c", "needs both user and password"),
        ("mailtos://mail?from=a@b.c&cc=x@y.z", "unknown option 'cc'"),
        ("mailtos://mail?from=a@b.c&mode=tls", "unknown mode 'tls'"),
        ("https://hooks.slack.com/services/T0/pw-of-ann", "invalid Slack webhook"),
        ("slack://xoxb-pw-of-ann/#gpus", "invalid Slack URL"),
        ("teams://pw-of-ann", "Messages of the remediator also go to other services"),
    ],
)
def test_invalid_urls_are_refused_without_their_secret(
    url: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        init.command([str(tmp_path), "--notify", url])

    said = capsys.readouterr().err
    assert message in said
    assert "pw-of-ann" not in said


@pytest.mark.needs_parts
def test_alertmanager_accepts_the_receivers_and_finds_secrets_in_files(tmp_path: Path) -> None:
    program("amtool")
    urls = [WEBHOOK, MAIL, "mailto://mail?from=a@b.c"]
    file = tmp_path / "alertmanager.yml"
    people = receivers.configs(urls, tmp_path)
    file.write_text(
        alertmanager_config(
            webhook="http://127.0.0.1:1", token_file=tmp_path / "token", intervals=Intervals(), people=people
        )
    )

    assert run_part("amtool", "check-config", str(file)) == []
    assert receivers.secrets(urls) == {"notify-1": WEBHOOK, "notify-2": "s/cret"}
    assert not [secret for secret in receivers.secrets(urls).values() if secret in file.read_text()]


def test_init_writes_and_keeps_the_receivers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    its = tmp_path / "urls"
    its.write_text(f"# of the team\n{WEBHOOK}\n\n{MAIL}\n")
    folder = tmp_path / "files"
    assert init.command([str(folder), "--command", "/bin/true", "--notify", f"@{its}"]) == 0
    assert init.command([str(folder), "--command", "/bin/true"]) == 0

    assert f"alerts for operators go to the URLs in {folder / '.notify-urls'}" in capsys.readouterr().out
    people = yaml.safe_load((folder / "alertmanager.yml").read_text())["receivers"][0]
    assert people["slack_configs"][0]["api_url_file"] == "/etc/gpuwarden/notify-1"
    assert people["email_configs"][0]["auth_password_file"] == "/etc/gpuwarden/notify-2"
    assert (folder / "gpuwarden" / "notify-2").read_text() == "s/cret"
    for name in ("gpuwarden/notify-1", "gpuwarden/notify-2", ".notify-urls", ".written.json", "alertmanager.yml"):
        assert (folder / name).stat().st_mode & 0o777 == 0o600, name
    secret = [path for path in folder.rglob("*") if path.is_file() and "s/cret" in path.read_text(errors="replace")]
    assert secret == [folder / "gpuwarden" / "notify-2"]
    assert "gpuwarden/token gpuwarden/notify-1 gpuwarden/notify-2\n" in (folder / "README.md").read_text()

    (folder / ".notify-urls").unlink()
    assert init.command([str(folder), "--command", "/bin/true"]) == 0
    assert not (folder / "gpuwarden" / "notify-1").exists()
    assert "are not sent, not even those about gpuwarden itself" in capsys.readouterr().out


@pytest.mark.needs_parts
def test_a_mail_about_an_alert_for_operators_arrives(tmp_path: Path) -> None:
    with mail_server() as mailbox:
        urls = [f"{mailbox.url}&to=ops@example.com"]
        with alertmanager(tmp_path, integrations=receivers.configs(urls, tmp_path)) as address:
            send_alerts(address, DOWN, STALL)
            eventually(lambda: bool(mailbox.mails), "a mail arrives")

    assert [mail.to for mail in mailbox.mails] == ["ops@example.com"]
    assert "GpuwardenExporterDown" in mailbox.mails[0].subject
    assert "GpuwardenJobStalled" not in mailbox.mails[0].text
