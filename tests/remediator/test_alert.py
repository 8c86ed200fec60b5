"""Parsing of Alertmanager payloads, and which alerts are admitted."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remediator.alert import DRILL, WATCHDOG, Refusal, admit, drill_number, is_watchdog, subject
from remediator.payload import (
    ALERTS_MAX,
    LABELS_MAX,
    TEXT_MAX,
    TRUNCATED_MAX,
    PayloadError,
    TooManyAlertsError,
    listed,
    parse,
    receiver,
    truncated,
)
from remediator.plan import Subject
from remediator.reasons import Reason
from remediator.remedies import REMEDIES
from tests.remediator.builders import (
    HOST,
    LABELS,
    alert,
    demand_alert,
    gpu_alert,
    host_alert,
    payload,
    run_alert,
    sent,
    server_alert,
    tenant_alert,
)

pytestmark = pytest.mark.pure

ONE = {"restart_worker": REMEDIES["restart_worker"]}
HOSTILE = {
    "shell substitution": "$(touch /tmp/owned) `id` ; rm -rf /",
    "newlines": 'w1\n{"event": "forged"}\r\n',
    "SQL": "w1'; DROP TABLE alerts; --",
    "unicode": "wörker-工-🙈-\u202e",
    "escapes": "w1\x07\x1b[2J",
    "template": "{{ .Labels.secret }} ${HOME} %s",
    "path": "../../etc/passwd",
}


def test_payload_of_alertmanager_0_25_is_read() -> None:
    alerts, refusals = parse(payload(sent("a1b2")))

    assert refusals == []
    assert (alerts[0].fingerprint, alerts[0].firing, alerts[0].labels) == ("a1b2", True, LABELS)
    assert alerts[0].annotations["summary"] == "stalled"
    assert alerts[0].starts_at == "2026-01-01T00:02:10.123Z"


def test_unknown_fields_of_a_later_alertmanager_are_ignored() -> None:
    newer = {**sent(), "silenceURL": "http://…", "extra": {"deep": [1, None]}}

    alerts, refusals = parse(payload(newer, notification_reason="repeat", version="5", status=None))

    assert len(alerts) == 1
    assert refusals == []


def test_each_alert_of_a_mixed_group_keeps_its_own_status() -> None:
    alerts, _ = parse(payload(sent("a", status="resolved"), sent("b"), status="firing"))

    assert [(each.fingerprint, each.firing) for each in alerts] == [("a", False), ("b", True)]


def test_firing_alert_with_an_end_in_year_one_fires() -> None:
    found = sent()
    assert found["endsAt"] == "0001-01-01T00:00:00Z"

    assert parse(payload(found))[0][0].firing


def test_annotations_may_be_left_out() -> None:
    found = sent()
    del found["annotations"]

    assert parse(payload(found))[0][0].annotations == {}


@pytest.mark.parametrize("body", [None, 3, "alerts", [], [sent()], {}, {"alerts": None}, {"alerts": {"0": sent()}}])
def test_body_that_is_not_a_payload_is_refused(body: Any) -> None:
    with pytest.raises(PayloadError, match="a JSON object with a list `alerts`"):
        parse(body)


BAD = {
    "not an object": (5, "it"),
    "no status": ({**sent(), "status": None}, "status"),
    "another status": ({**sent(), "status": "suppressed"}, "status"),
    "status as a list": ({**sent(), "status": [["firing"]]}, "status"),
    "no labels": ({**sent(), "labels": None}, "labels"),
    "labels as a list": ({**sent(), "labels": ["a"]}, "labels"),
    "label as a number": ({**sent(), "labels": {"job_id": 7}}, "labels.job_id"),
    "too many labels": ({**sent(), "labels": {str(n): "" for n in range(LABELS_MAX + 1)}}, "labels"),
    "a long label": ({**sent(), "labels": {"l": "x" * (TEXT_MAX + 1)}}, "labels.l"),
    "a long label name": ({**sent(), "labels": {"x" * (TEXT_MAX + 1): ""}}, f"labels.{'x' * 80}.[key]"),
    "half a surrogate in a label": ({**sent(), "labels": {"worker": "w\ud800"}}, "labels.worker"),
    "half a surrogate in a label name": ({**sent(), "labels": {"\udfff": "w"}}, r"labels.\ufffd\ufffd\ufffd.[key]"),
    "half a surrogate in an annotation": ({**sent(), "annotations": {"summary": "\ud800"}}, "annotations.summary"),
    "a NUL in a label": ({**sent(), "labels": {"worker": "w\x00"}}, "labels.worker"),
    "a NUL in a label name": ({**sent(), "labels": {"w\x00": ""}}, "labels.w\\x00.[key]"),
    "a NUL in an annotation": ({**sent(), "annotations": {"summary": "\x00"}}, "annotations.summary"),
    "a NUL at the end of a line": ({**sent(), "annotations": {"summary": "a\n\x00"}}, "annotations.summary"),
    "a NUL in the fingerprint": ({**sent(), "fingerprint": "f\x00"}, "fingerprint"),
    "annotations as text": ({**sent(), "annotations": "stalled"}, "annotations"),
    "no fingerprint": ({**sent(), "fingerprint": None}, "fingerprint"),
    "an empty fingerprint": ({**sent(), "fingerprint": ""}, "fingerprint"),
    "a long fingerprint": ({**sent(), "fingerprint": "f" * 65}, "fingerprint"),
    "half a surrogate as fingerprint": ({**sent(), "fingerprint": "\ud800"}, "fingerprint"),
    "no startsAt": ({**sent(), "startsAt": None}, "startsAt"),
    "a long startsAt": ({**sent(), "startsAt": "2" * 65}, "startsAt"),
    "half a surrogate as startsAt": ({**sent(), "startsAt": "\ud800"}, "startsAt"),
}


@pytest.mark.parametrize(("bad", "where"), BAD.values(), ids=BAD)
def test_bad_alert_does_not_affect_the_others(bad: Any, where: str) -> None:
    alerts, refusals = parse(payload(sent("a"), bad, sent("c")))

    assert [each.fingerprint for each in alerts] == ["a", "c"]
    assert len(refusals) == 1
    assert refusals[0].reason is Reason.MALFORMED
    assert refusals[0].message.startswith(f"alert 1: {where}: ")
    refusals[0].message.encode()


def test_payload_at_every_limit_is_accepted() -> None:
    full = {str(number): "x" * TEXT_MAX for number in range(LABELS_MAX)}

    alerts, refusals = parse(payload(*[{**sent(), "labels": full, "fingerprint": "f" * 64}] * ALERTS_MAX))

    assert len(alerts) == ALERTS_MAX
    assert refusals == []


@pytest.mark.parametrize("more", [sent(), None], ids=["valid", "invalid"])
def test_payload_with_too_many_alerts_is_refused(more: Any) -> None:
    body = payload(*[sent()] * 3)
    assert len(parse(body, alerts_max=3)[0]) == 3

    with pytest.raises(TooManyAlertsError, match="4 alerts in one payload, maximum 3: set max_alerts"):
        parse(payload(*body["alerts"], more), alerts_max=3)


@pytest.mark.parametrize(
    ("said", "count"),
    [
        ({}, 0),
        ({"truncatedAlerts": 0}, 0),
        ({"truncatedAlerts": 7}, 7),
        ({"truncatedAlerts": -7}, 0),
        ({"truncatedAlerts": True}, 0),
        ({"truncatedAlerts": "7"}, 0),
        ({"truncatedAlerts": 7.0}, 0),
        ({"truncatedAlerts": 10**400}, TRUNCATED_MAX),
    ],
    ids=["before 0.21", "zero", "seven", "negative", "boolean", "text", "fraction", "too large"],
)
def test_truncated_alerts_are_counted(said: dict[str, Any], count: int) -> None:
    assert truncated(said) == count


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"receiver": "gpuwarden (its own)"}, "gpuwarden (its own)"),
        ({}, ""),
        ({"receiver": ["gpuwarden"]}, ""),
        ({"receiver": "r" * (TEXT_MAX + 1)}, ""),
        ({"receiver": "\ud800"}, ""),
    ],
    ids=["name", "missing", "list", "too long", "half a surrogate pair"],
)
def test_receiver_is_its_name_or_empty(said: dict[str, Any], name: str) -> None:
    assert receiver(said) == name


@pytest.mark.parametrize(
    ("labels", "beats"),
    [
        ({"alertname": WATCHDOG, "severity": "none"}, True),
        ({"alertname": WATCHDOG, "remedy": "restart_worker"}, False),
        ({"alertname": "GpuwardenJobStalled"}, False),
        ({}, False),
    ],
    ids=["watchdog", "watchdog with a remedy", "another alert", "no name"],
)
def test_only_the_watchdog_alert_is_a_heartbeat(labels: dict[str, str], beats: bool) -> None:
    (found,), _ = parse(payload({**sent(), "labels": labels}))

    assert is_watchdog(found) is beats


def test_listed_alerts_are_read_as_payloads() -> None:
    one = {**sent("a"), "status": {"state": "active", "silencedBy": [], "inhibitedBy": []}, "receivers": []}

    payloads = list(listed([one, 5, {**one, "fingerprint": "c"}], alerts_max=2))

    read = [parse(each, alerts_max=2) for each in payloads]
    assert [[(each.fingerprint, each.firing) for each in alerts] for alerts, _ in read] == [
        [("a", True)],
        [("c", True)],
    ]
    assert [[each.message.split(": ")[:2] for each in refusals] for _, refusals in read] == [[["alert 1", "it"]], []]
    assert list(listed([])) == []


@pytest.mark.parametrize("answer", [None, {}, {"alerts": []}, "alerts"])
def test_answer_that_is_not_a_list_is_refused(answer: Any) -> None:
    with pytest.raises(PayloadError, match="a JSON list"):
        listed(answer)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_kept_unchanged(text: str) -> None:
    alerts, refusals = parse(json.loads(json.dumps(payload(sent(worker=text)))))

    assert refusals == []
    assert alerts[0].labels["worker"] == text


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("label", ["host", "remedy", "condition"])
def test_refusal_of_hostile_text_is_one_short_printable_line(label: str, text: str) -> None:
    labels: dict[str, Any] = {label: text * 100}

    refusal = admit(alert(**labels), hosts={HOST}, remedies=ONE)

    assert refusal is not None
    assert refusal.message.isprintable()
    assert len(refusal.message) < 250


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(st.lists(st.fixed_dictionaries(dict.fromkeys(sent(), JSON)) | JSON, max_size=5))
def test_any_json_is_read_or_refused_and_storable(alerts: list[Any]) -> None:
    found, refusals = parse(payload(*alerts))

    assert len(found) + len(refusals) == len(alerts)
    for each in found:
        kept = "".join([each.fingerprint, each.starts_at, *each.labels, *each.labels.values()])
        kept.encode()
        assert "\0" not in kept
    for refusal in refusals:
        refusal.message.encode()


ADMIT = {
    "complete": (alert(), None),
    "resolved: it may end a wait": (alert(firing=False), None),
    "another severity": (alert(severity="info"), None),
    "no job: an idle worker may hang too": (alert(job_id=None, attempt=None, incarnation=None), None),
    "no host": (alert(host=None), Reason.NO_HOST),
    "empty host": (alert(host=""), Reason.NO_HOST),
    "another host": (alert(host="box2"), Reason.OTHER_HOST),
    "a host with our name as prefix": (alert(host="box10"), Reason.OTHER_HOST),
    "no remedy": (alert(remedy=None), Reason.UNKNOWN_REMEDY),
    "unknown remedy": (alert(remedy="reboot_host"), Reason.UNKNOWN_REMEDY),
    "no condition": (alert(condition=None), Reason.UNKNOWN_CONDITION),
    "unknown condition": (alert(condition="boredom"), Reason.UNKNOWN_CONDITION),
    "no worker": (alert(worker=None), Reason.NO_WORKER),
    "empty worker": (alert(worker=""), Reason.NO_WORKER),
    "invalid worker name": (alert(worker="w1\n"), Reason.NO_WORKER),
    "longest worker name": (alert(worker="w" * 256), None),
    "worker name too long": (alert(worker="w" * 257), Reason.NO_WORKER),
    "several faults: the host counts first": (
        alert(host="box2", remedy="x", condition="y", worker=None),
        Reason.OTHER_HOST,
    ),
}


@pytest.mark.parametrize(("found", "reason"), ADMIT.values(), ids=ADMIT)
def test_worker_alert_is_admitted_or_refused(found: Any, reason: str | None) -> None:
    refusal = admit(found, hosts={HOST}, remedies=ONE)

    assert (refusal.reason if refusal else None) == reason


ADMIT_SERVER = {
    "complete": (server_alert(), None),
    "a worker": (server_alert(worker="w1"), Reason.NO_SERVER),
    "empty worker": (server_alert(worker=""), None),
    "no container": (server_alert(container=None), Reason.NO_CONTAINER),
    "invalid container name": (server_alert(container="c1\n"), Reason.NO_CONTAINER),
    "no incarnation": (server_alert(incarnation=None), Reason.NO_CONTAINER),
    "condition of a worker": (server_alert(condition="stall"), Reason.UNKNOWN_CONDITION),
    "remedy of a worker without a worker": (server_alert(remedy="restart_worker", condition="stall"), Reason.NO_WORKER),
    "remedy of a worker for the condition of a server": (alert(condition="server"), Reason.UNKNOWN_CONDITION),
    "another host": (server_alert(host="box2"), Reason.OTHER_HOST),
    "VRAM: complete": (tenant_alert(), None),
    "VRAM: no incarnation": (tenant_alert(incarnation=None), Reason.NO_CONTAINER),
    "VRAM: a worker": (tenant_alert(worker="w1"), Reason.NO_SERVER),
    "VRAM: condition of a server": (tenant_alert(condition="server"), Reason.UNKNOWN_CONDITION),
}


ADMIT_HOST: dict[str, tuple[Any, str | None]] = {
    "complete": (host_alert(), None),
    "another host": (host_alert(host="box2"), Reason.OTHER_HOST),
    "no label `host`": (host_alert(host=None), Reason.NO_HOST),
    "a worker": (host_alert(worker="w1"), Reason.NO_HOST_ALONE),
    "a container": (host_alert(container="c1"), Reason.NO_HOST_ALONE),
    "condition of another remedy": (host_alert(condition="stall"), Reason.UNKNOWN_CONDITION),
    "its condition for a worker": (alert(condition="host_lost"), Reason.UNKNOWN_CONDITION),
}


ADMIT_RUN: dict[str, tuple[Any, str | None]] = {
    "complete": (run_alert(), None),
    "another host": (run_alert(host="box2"), Reason.OTHER_HOST),
    "no label `host`": (run_alert(host=None), Reason.NO_HOST),
    "no run": (run_alert(run=None), Reason.NO_RUN),
    "invalid run name": (run_alert(run="r1\n"), Reason.NO_RUN),
    "no worker": (run_alert(worker=None), Reason.NO_RUN),
    "condition of another remedy": (run_alert(condition="stall"), Reason.UNKNOWN_CONDITION),
    "its condition for a remedy of workers": (run_alert(remedy="restart_worker"), Reason.UNKNOWN_CONDITION),
}


ADMIT_GPU: dict[str, tuple[Any, str | None]] = {
    "complete": (gpu_alert(), None),
    "no GPU": (gpu_alert(gpu=None), Reason.NO_GPU),
    "invalid GPU": (gpu_alert(gpu="GPU-0\n"), Reason.NO_GPU),
    "another host": (gpu_alert(host="box2"), Reason.OTHER_HOST),
    "condition of another remedy": (gpu_alert(condition="stall"), Reason.UNKNOWN_CONDITION),
}


ADMIT_ON_DEMAND: dict[str, tuple[Any, str | None]] = {
    "up": (demand_alert(), None),
    "down": (demand_alert(condition="demand_down"), None),
    "no tenant": (demand_alert(tenant=None), Reason.NO_TENANT),
    "invalid tenant": (demand_alert(tenant="c1\n"), Reason.NO_TENANT),
    "another host": (demand_alert(host="box2"), Reason.OTHER_HOST),
    "condition of another remedy": (demand_alert(condition="vram"), Reason.UNKNOWN_CONDITION),
}


ADMIT_DRILL: dict[str, tuple[Any, str | None]] = {
    "complete": (alert(remedy=DRILL, drill="7", worker=None), None),
    "another host": (alert(remedy=DRILL, drill="7", host="box2"), Reason.OTHER_HOST),
}


@pytest.mark.parametrize(
    ("labels", "number"),
    [
        ({"remedy": DRILL, "drill": "7"}, 7),
        ({"remedy": DRILL}, None),
        ({"remedy": DRILL, "drill": "-7"}, None),
        ({"remedy": DRILL, "drill": "²"}, None),
        ({"remedy": DRILL, "drill": "9" * 19}, None),
        ({"remedy": "restart_worker", "drill": "7"}, None),
    ],
)
def test_number_of_a_drill_is_a_small_integer_of_its_own_alert(labels: dict[str, str], number: int | None) -> None:
    assert drill_number(labels) == number


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        pytest.param(*case, id=f"{subject}, {name}")
        for subject, cases in (
            ("server", ADMIT_SERVER),
            ("host", ADMIT_HOST),
            ("run", ADMIT_RUN),
            ("GPU", ADMIT_GPU),
            ("on demand", ADMIT_ON_DEMAND),
            ("drill", ADMIT_DRILL),
        )
        for name, case in cases.items()
    ],
)
def test_alert_of_another_subject_is_admitted_or_refused(found: Any, reason: str | None) -> None:
    refusal = admit(found, hosts={HOST}, remedies=REMEDIES)

    assert (refusal.reason if refusal else None) == reason
    assert refusal is None or refusal.message.isprintable()


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        pytest.param(host_alert(host="box2"), None, id="about a whole host"),
        pytest.param(
            host_alert(host="box2", worker="w1"), Reason.NO_HOST_ALONE, id="about a whole host, names a worker"
        ),
        pytest.param(host_alert(host="box2", remedy="reboot"), Reason.OTHER_HOST, id="unknown remedy"),
        pytest.param(alert(host="box2"), Reason.OTHER_HOST, id="about a worker"),
        pytest.param(host_alert(host=None), Reason.NO_HOST, id="no host"),
    ],
)
def test_shared_ledger_admits_a_lost_host_without_an_executor(found: Any, reason: str | None) -> None:
    refusal = admit(found, hosts={HOST}, remedies=REMEDIES, shared=True)

    assert (refusal.reason if refusal else None) == reason


def test_subject_of_an_alert() -> None:
    assert subject(alert(worker="w1", container="c1").labels) == (Subject.WORKER, "w1")
    assert subject(server_alert(container="c1").labels) == (Subject.SERVER, "c1")
    assert subject(tenant_alert(container="c1").labels) == (Subject.TENANT, "c1")
    assert subject(host_alert().labels) == (Subject.HOST, HOST)
    assert subject(run_alert(run="r1", worker="w1").labels) == (Subject.RUN, "r1")
    assert subject(gpu_alert().labels) == (Subject.GPU, "GPU-0")
    assert subject(demand_alert().labels) == (Subject.ON_DEMAND, "c1")
    assert subject(demand_alert(condition="demand_down").labels) == (Subject.ON_DEMAND, "c1")
    assert subject(alert(run="r1", worker="w1").labels) == (Subject.WORKER, "w1"), (
        "the run label does not count for another remedy"
    )
    assert subject({}) == (Subject.HOST, "")


def test_refusal_names_the_found_and_the_known_values() -> None:
    refusal = admit(alert(remedy="reboot_host"), hosts={HOST}, remedies=ONE)

    assert isinstance(refusal, Refusal)
    assert [each for each in ("'reboot_host'", "restart_worker") if each not in refusal.message] == []
    assert (refusal.fingerprint, refusal.labels["worker"]) == ("f1", "w1")


def test_alerts_of_every_host_of_a_shared_ledger_are_admitted() -> None:
    hosts = {HOST, "box2"}

    assert admit(alert(host="box2"), hosts=hosts, remedies=ONE) is None
    refusal = admit(alert(host="box3"), hosts=hosts, remedies=ONE)
    assert refusal is not None
    assert refusal.reason is Reason.OTHER_HOST
    assert [each for each in ("'box3'", "box1", "box2") if each not in refusal.message] == []
