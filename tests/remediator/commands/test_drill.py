"""What `gpuwarden drill` makes of the times and errors of its hops."""

from collections.abc import Callable

import pytest

from remediator.commands import drill
from remediator.commands.drill import Hop, conclude, is_over, page
from remediator.ledger.ledger import Ledger
from remediator.ledger.notices import BACKOFF_S


def hops(*times: float | None) -> list[Hop]:
    return [
        Hop(name=name, passed=at_s is not None, at_s=at_s, says="said")
        for name, at_s in zip(drill.HOP_TIMEOUT_S, times, strict=True)
    ]


def test_hop_takes_the_time_since_the_one_before() -> None:
    found = conclude(hops(0.5, 3.0, 4.0, 4.25, 4.5, 5.0), None, took_s=9.0)

    assert [hop["seconds"] for hop in found.hops] == [0.5, 2.5, 1.0, 0.25, 0.25, 0.5]
    assert (found.ok, found.took_s, found.broken) == (True, 5.0, None)
    assert list(page(found))[-1] == "every hop answered within 5.0 s; nothing was touched"


def test_hop_noticed_after_a_later_one_took_no_longer() -> None:
    found = conclude(hops(0.5, 3.0, None, 4.5, 4.0, 4.0), None, took_s=9.0)

    assert [hop["seconds"] for hop in found.hops] == [0.5, 2.5, None, 1.0, 0.0, 0.0]


def test_broken_hop_is_named_with_its_repair() -> None:
    its = hops(0.5, 3.0, None, None, None, None)

    found = conclude(its, its[2], took_s=9.0)

    assert (found.ok, found.broken, found.took_s) == (False, "rule", 9.0)
    assert list(page(found)) == [
        "hop            seconds",
        "serve             0.50  said",
        "prometheus        2.50  said",
        "rule                 -  said",
        "",
        "broken at rule: said",
        f"fix: {drill.FIXES['rule']}",
    ]


def test_repair_of_a_hop_in_up_is_its_log() -> None:
    its = hops(0.5, None, None, None, None, None)
    up = {"GPUWARDEN_REMEDIATOR_LEDGER": "sqlite:////data/ledger/ledger.db"}

    fixes = drill.fixes_in_up("sqlite:////data/ledger/ledger.db", up)

    assert conclude(its, its[1], took_s=9.0, in_up=fixes).fix.startswith(
        "read /data/log/prometheus.log; `gpuwarden up`"
    )
    database = "postgresql://u:secret@db/gpuwarden"
    other = drill.fixes_in_up(database, {"GPUWARDEN_REMEDIATOR_LEDGER": database})
    assert other["executor"].startswith("read DATA_DIR/log/execute.log; ")
    assert fixes.keys() == drill.HOP_TIMEOUT_S.keys()
    assert drill.fixes_in_up("sqlite:////other/ledger/ledger.db", up) == drill.fixes_in_up("", {}) == {}


def test_repair_of_a_silenced_alert_is_not_the_route() -> None:
    its = hops(0.5, 3.0, 4.0, 5.0, None, None)
    its[4].fix = "run `amtool silence expire`"

    assert conclude(its, its[4], took_s=9.0, in_up={"webhook": "x"}).fix == "run `amtool silence expire`"


@pytest.mark.parametrize(
    ("unreachable_since_s", "since_s", "now_s", "over"),
    [(None, 10.0, 39.0, False), (None, 10.0, 40.0, True), (12.0, 10.0, 21.0, False), (12.0, 10.0, 22.0, True),
     (None, 90.0, 100.0, True)],
)  # fmt: skip
def test_wait_for_a_hop_ends(unreachable_since_s: float | None, since_s: float, now_s: float, over: bool) -> None:
    hop = Hop(name="webhook", unreachable_since_s=unreachable_since_s)

    assert is_over(hop, since_s=since_s, now_s=now_s, until_s=100.0) is over


def test_hop_before_one_that_passed_has_passed() -> None:
    its = hops(0.5, None, None, None, 4.0, None)

    drill._pass_earlier(its)

    assert [hop.passed for hop in its] == [True, True, True, True, True, False]
    assert its[1].says == "passed, not seen from here: said"


def test_unknown_host_is_an_error(cli: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("drill", "--host", "box9") == 1

    assert "no executor of box9 ever ran on this ledger" in capsys.readouterr().err


def test_skipped_parts_are_not_asked(cli: Callable[..., int], ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    skipped = [option for part in ("remediator", "prometheus", "alertmanager") for option in (f"--{part}", "none")]
    monkeypatch.setitem(drill.HOP_TIMEOUT_S, "webhook", 0.2)

    assert cli("drill", *skipped) == 1

    assert [each.broken for each in ledger.chain.last()] == ["webhook"]


def test_message_that_is_not_sent_says_why(ledger: Ledger) -> None:
    notices, now = ledger.notices, ledger.now()

    def says(at: float = now) -> str:
        return drill.unsent_says(notices.deliveries("drill 1"), now=at)

    assert says() == "no message was stored"
    notices.notify_administrators(key="drill 1", kind="drill", title="t", text="t", now=now)
    assert says() == "no `gpuwarden remediator serve` has administrators in its notify file"
    notices.expand(1, now=now)
    assert says() == "the server of administrator 1 did not accept the message yet"
    claimed = notices.claim("administrator 0", now=now)
    assert claimed is not None
    notices.mark_failed(claimed, "connection refused", now=now)
    assert says() == "administrator 1: connection refused"
    again = notices.claim("administrator 0", now=now + BACKOFF_S)
    assert again is not None
    notices.notify_administrators(key="drill 2", kind="drill", title="t", text="t", now=now)
    notices.expand(1, now=now)
    notices.mark_sent(again, now=now + BACKOFF_S)
    assert [each.state for each in notices.deliveries("drill 1")] == ["sent"]

    found = notices.deliveries("drill 2")
    assert drill.unsent_says(found, now=now + BACKOFF_S).startswith("administrator 1 gets its next message in 1 min,")
    notices.withdraw("drill 2", now=now)
    assert [each.state for each in notices.deliveries("drill 2")] == ["dropped"]
