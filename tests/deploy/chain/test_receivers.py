"""Receivers of operators: their URLs, the configuration for Alertmanager, and messages through the real one."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.standalone import init, receivers, stack
from deploy.standalone.config_files import ABOUT_REMEDIATOR, Intervals, alertmanager_config
from deploy.standalone.stack import Chain, Plan
from remediator.settings.notify_file import NotifySettings, read
from testbed.check_release import run_part
from tests.deploy.test_alertmanager import DOWN, STALL, alertmanager, program
from tests.json_server import json_server
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

    assert found is not None
    assert (found.integration, dict(found.config)) == ("email_configs", expected)


def test_slack_urls() -> None:
    for url, channel in ((WEBHOOK, None), ("slack://T0/B0/abcXYZ", None), ("slack://T0/B0/abcXYZ/#gpus", "#gpus")):
        found = receivers.parse(url)
        assert found is not None
        assert (found.secret, found.secret_field, found.config.get("channel")) == (WEBHOOK, "api_url_file", channel)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ops@example.com", "not a URL to notify: expected a Slack webhook, or for example mailtos://"),
        ("mailto:ops@example.com", "no mail server in the URL: expected for example mailtos://"),
        ("mailto://mail:0x", "invalid address or port"),
        ("mailto://mail?to=ops@example.com", "no valid address in `from`"),
        ("mailto://mail?from=a@b.c&to=ops", "no valid address in `to`"),
        ("mailto://ann:pw-of-ann@mail?from=a@b.c", "unencrypted: use mailtos://"),
        ("mailtos://ann@mail?from=a@b.c", "needs both user and password"),
        ("mailtos://mail?from=a@b.c&cc=x@y.z", "unknown option 'cc'"),
        ("mailtos://mail?from=a@b.c&mode=tls", "unknown mode 'tls'"),
        ("mailtos://mail/pw-of-ann@b.c?from=a@b.c", "write recipients as `to=`"),
        ("mailtos://mail?from=a@b.c#&to=ops@b.c", "write recipients as `to=`"),
        ("https://hooks.slack.com/services/T0/pw-of-ann", "invalid Slack webhook"),
        ("slack://xoxb-pw-of-ann/#gpus", "invalid Slack URL"),
        ("teams://pw-of-ann", "teams:// is not supported: use one of mailto"),
        ("json://example.com/?template=/etc/pw-of-ann", "reads a file: leave it out"),
        ("https://example.com/pw-of-ann", "use the Apprise URL of the service, for example jsons://"),
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


def test_init_writes_the_notify_file_and_warns_without_a_native_receiver(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, token = tmp_path / "files", "ntfys://ntfy.sh/t0pic"
    assert init.command([str(folder), "--command", "/bin/true", "--notify", token]) == 0

    assert receivers.NO_NATIVE in capsys.readouterr().out
    file = folder / "gpuwarden" / "notify.toml"
    assert file.stat().st_mode & 0o777 == 0o600
    assert read(file).administrators == [token]
    assert "NOTIFY_FILE=/etc/gpuwarden/notify.toml\n" in (folder / "gpuwarden" / "gpuwarden.env").read_text()
    assert "-g gpuwarden gpuwarden/notify.toml /etc/gpuwarden/\n" in (folder / "README.md").read_text()
    config = (folder / "alertmanager.yml").read_text()
    assert ("url: http://127.0.0.1:9836/api/v1/notifications" in config, "t0pic" in config) == (True, False)

    assert init.command([str(folder), "--command", "/bin/true", "--notify", MAIL]) == 0
    assert receivers.NO_NATIVE not in capsys.readouterr().out
    assert not file.exists()
    assert "NOTIFY_FILE" not in (folder / "gpuwarden" / "gpuwarden.env").read_text()


def test_notify_file_keeps_what_its_base_has(tmp_path: Path) -> None:
    base = NotifySettings(
        mail_server="mailto://mail?from=a@b.c",
        administrators=["ops@example.com"],
        submitters={"*": "{user}@example.com", 'a"b': "b@example.com"},
    )
    file = tmp_path / "notify.toml"
    file.write_text(receivers.notify_file(["json://example.com/é", MAIL], base))

    expected = base.model_copy(update={"administrators": ["ops@example.com", "json://example.com/é"]})
    assert read(file) == expected


@pytest.mark.needs_parts
@pytest.mark.parametrize("alert", ABOUT_REMEDIATOR)
def test_alerts_about_the_remediator_go_only_to_native_receivers(alert: str, tmp_path: Path) -> None:
    program("amtool")
    assert init.command([str(tmp_path), "--command", "/bin/true", "--notify", MAIL, "--notify", "json://x"]) == 0
    file = tmp_path / "alertmanager.yml"

    for name, receiver in ((alert, "people-direct"), ("GpuwardenVramLow", "people")):
        asked = ("config", "routes", "test", f"--config.file={file}", f"--verify.receivers={receiver}")
        assert run_part("amtool", *asked, f"alertname={name}", "host=a") == []
    by_name = {each.pop("name"): each for each in yaml.safe_load(file.read_text())["receivers"]}
    assert [*by_name["people"]] == ["email_configs", "webhook_configs"]
    assert [*by_name["people-direct"]] == ["email_configs"]


@pytest.mark.needs_parts
@pytest.mark.slow
@pytest.mark.behaviour("B8")
def test_alert_reaches_a_webhook_by_the_remediator_except_alerts_about_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real Alertmanager, `serve`, HTTP server and SMTP server."""
    monkeypatch.setattr(
        stack,
        "alertmanager_config",
        lambda **its: alertmanager_config(**its).replace("group_wait: 30s", "group_wait: 0s"),
    )
    with mail_server() as mailbox, json_server() as (url, bodies):
        notify = [f"{mailbox.url}&to=ops@example.com", url]
        chain = Chain(Plan(work=tmp_path, host="a", docker=None, simulate_gpu=None, notify=notify))
        try:
            chain.start("alertmanager")
            eventually(chain._answers(f"{chain.alertmanager_url}/-/ready"), "Alertmanager answers")
            send_alerts(chain.alertmanager_url, {"alertname": "GpuwardenRemediatorDown", "host": "a"})
            eventually(lambda: bool(mailbox.mails), "the mail about the stopped remediator arrives")
            chain.start("serve")
            eventually(chain._answers(f"{chain.remediator_url}/-/ready"), "serve answers", within_s=30)
            send_alerts(chain.alertmanager_url, DOWN, STALL)
            eventually(lambda: bool(bodies), "the webhook is called", within_s=30)
            eventually(lambda: len(mailbox.mails) == 2, "a mail arrives too")
        finally:
            chain.__exit__(None, None, None)

    assert (tmp_path / "notify.toml").stat().st_mode & 0o777 == 0o600
    assert [body["title"] for body in bodies] == ["[gpuwarden] stalled"]
    assert bodies[0]["message"].startswith("GpuwardenExporterDown: stalled.")
    assert ["RemediatorDown" in mail.subject for mail in mailbox.mails] == [True, False]
