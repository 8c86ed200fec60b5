"""`gpuwarden drill` through real Prometheus, Alertmanager, webhook and executor. A stopped part is named."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from deploy.standalone.config_files import Intervals
from deploy.standalone.stack import Chain, Plan
from remediator.commands import drill
from remediator.commands.notify import FILE_ENV
from tests.deploy.test_alertmanager import program
from tests.json_server import json_server
from tests.remediator.alertmanager import expire, silence
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_parts, pytest.mark.slow, pytest.mark.xdist_group("drill")]

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def hook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An administrator: a webhook."""
    with json_server() as found:
        yield found


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, hook: tuple[str, list[dict[str, Any]]]) -> Iterator[Chain]:
    """All programs of one host."""
    for name in ("prometheus", "alertmanager"):
        program(name)
    work = tmp_path_factory.mktemp("chain")
    file = work / "notify.toml"
    file.write_text(f'administrators = ["{hook[0]}"]')
    plan = Plan(work=work, host="box1", docker=None, simulate_gpu=None, intervals=Intervals(scrape_s=1))
    with pytest.MonkeyPatch.context() as environment, ExitStack() as stack:
        environment.setenv(FILE_ENV, str(file))
        chain = stack.enter_context(Chain(plan))
        eventually(lambda: bool(chain.query("gpuwarden_remediator_info")), "Prometheus scrapes the webhook")
        yield chain


@pytest.fixture
def run(chain: Chain, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a drill of this chain; its result."""

    def run(*options: str, exit_code: int) -> dict[str, Any]:
        urls = {
            "ledger": chain.ledger_url,
            "remediator": chain.remediator_url,
            "prometheus": chain.prometheus_url,
            "alertmanager": chain.alertmanager_url,
        }
        asked = [word for name, url in urls.items() for word in (f"--{name}", url)]
        assert drill.command([*asked, "--json", *options]) == exit_code
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that is stopped is given up sooner."""
    monkeypatch.setattr(drill, "UNREACHABLE_S", 1.0)
    for hop in ("webhook", "executor"):
        monkeypatch.setitem(drill.HOP_TIMEOUT_S, hop, 3.0)


def restarted(chain: Chain, part: str) -> None:
    chain.start(part)
    url = {"serve": chain.remediator_url, "alertmanager": chain.alertmanager_url, "prometheus": chain.prometheus_url}
    if part in url:
        eventually(chain._answers(f"{url[part]}/-/ready"), f"{part} answers", within_s=30)


def test_drill_passes_each_hop_and_opens_no_episode(chain: Chain, run: Run) -> None:
    found = run(exit_code=0)

    assert [hop["hop"] for hop in found["hops"] if hop["seconds"] is not None] == list(drill.HOP_TIMEOUT_S)
    assert (found["ok"], found["broken"]) == (True, None)
    assert sum(hop["seconds"] for hop in found["hops"]) == pytest.approx(found["took_s"])
    assert '"drill"' not in chain.log("execute")


def test_last_hop_is_a_message_to_administrators(run: Run, hook: tuple[str, list[dict[str, Any]]]) -> None:
    found = run("--notify", exit_code=0)

    last = found["hops"][-1]
    assert (last["hop"], last["says"]) == ("notification", "accepted for 1 administrator")
    assert last["seconds"] > 0
    assert [body["title"] for body in hook[1]] == ["[gpuwarden] drill: notifications arrive"]

    again = run("--notify", exit_code=0)
    assert again["hops"][-1]["seconds"] < 30
    assert len(hook[1]) == 2


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("part", "broken", "says"),
    [
        ("serve", "serve", "cannot be reached"),
        ("prometheus", "prometheus", "cannot be reached"),
        ("alertmanager", "alertmanager", "cannot be reached"),
        ("execute", "executor", "the alert was not taken on box1"),
    ],
)
def test_stopped_part_is_named(part: str, broken: str, says: str, chain: Chain, run: Run) -> None:
    chain.stop(part)
    try:
        found = run(exit_code=1)
    finally:
        restarted(chain, part)

    assert found["broken"] == broken
    assert says in found["says"]
    assert found["fix"] == drill.FIXES[broken]


@pytest.mark.usefixtures("impatient")
def test_silenced_drill_names_the_silence(chain: Chain, run: Run) -> None:
    identifier = silence(chain.alertmanager_url, alertname="GpuwardenDrill")
    try:
        found = run(exit_code=1)
    finally:
        expire(chain.alertmanager_url, identifier)

    assert found["broken"] == "webhook"
    assert f"silenced by {identifier}" in found["says"]
    assert found["fix"].startswith(f"run `amtool silence expire {identifier}`")
