"""Servers, by values alone: what labels ask for, for how long nothing was answered, and what counts as an answer."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.evidence.server_health import (
    PROBE_LABEL,
    TIMEOUT_LABEL,
    HealthCheckTracker,
    ProbeState,
    check_status_line,
    parse_probe_labels,
)
from exporter.model.container import Probe
from exporter.model.unknown import Unknown
from tests.exporter import builders as build

pytestmark = pytest.mark.pure

GAP_S = 10.0


def labels(probe: str, timeout: str | None = None) -> dict[str, str]:
    return {PROBE_LABEL: probe} | ({} if timeout is None else {TIMEOUT_LABEL: timeout})


# --- what labels ask for


def test_a_container_without_the_label_asks_for_nothing() -> None:
    assert parse_probe_labels({"gpuwarden.managed": "true", TIMEOUT_LABEL: "60"}) is None


@pytest.mark.parametrize(
    ("url", "port", "target"),
    [
        ("http://localhost:8000/health", 8000, "/health"),
        ("http://localhost:8000", 8000, "/"),
        ("http://localhost/health", 80, "/health"),
        ("http://LOCALHOST:1/v1/models?limit=1&x=%20", 1, "/v1/models?limit=1&x=%20"),
        ("http://localhost:65535?deep=1", 65535, "/?deep=1"),
    ],
)
def test_a_url_says_where_in_the_container_itself_it_is_asked(url: str, port: int, target: str) -> None:
    assert parse_probe_labels(labels(url)) == Probe(kind="http", restart_after_s=120.0, port=port, target=target)


def test_its_own_health_check_needs_no_more_than_its_name() -> None:
    assert parse_probe_labels(labels("docker", "60")) == Probe(kind="docker", restart_after_s=60.0)


@pytest.mark.parametrize(
    ("text", "restart_after_s"), [("10", 10.0), ("86400", 86400.0), ("12.5", 12.5), ("0600", 600.0)]
)
def test_the_silence_allowed_is_the_owners(text: str, restart_after_s: float) -> None:
    probe = parse_probe_labels(labels("docker", text))

    assert isinstance(probe, Probe)
    assert probe.restart_after_s == restart_after_s


@pytest.mark.parametrize("text", ["", "9.999", "86400.001", "-20", "1e3", "nan", "inf", "60s", " 60", "٦٠", "9999999"])
def test_a_silence_that_is_none_is_told(text: str) -> None:
    problem = parse_probe_labels(labels("docker", text))

    assert isinstance(problem, Unknown)
    assert problem.reason == "bad_timeout"
    assert "expected seconds, 10 to 86400" in problem.because
    assert problem.because.isprintable()


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/health",
        "http://127.0.0.1:8000/",
        "http://[::1]:8000/",
        "http://localhost.example.com/",
        "http://169.254.169.254/latest/meta-data",
        "http://me@localhost:8000/",
        "http://localhost@example.com/",
        "http://me:secret@localhost/",
        "http:///health",
        "http://localhost\\@example.com/",
    ],
)
def test_no_other_place_is_called(url: str) -> None:
    problem = parse_probe_labels(labels(url))

    assert isinstance(problem, Unknown)
    assert problem.reason == "other_host"
    assert "its host must be localhost" in problem.because


@pytest.mark.parametrize(
    "text",
    [
        "",
        "yes",
        "Docker",
        "https://localhost/",
        "file:///etc/passwd",
        "//localhost/health",
        "http://localhost:0/",
        "http://localhost:65536/",
        "http://localhost:port/",
        "http://[localhost/",
        "http://localhost/#top",
        "http://localhost/a b",
        "http://localhost/\r\nX-Evil: 1",
        "http://localhost/é",
        f"http://localhost/{'x' * 256}",
    ],
)
def test_what_is_no_probe_is_told(text: str) -> None:
    problem = parse_probe_labels(labels(text))

    assert isinstance(problem, Unknown)
    assert problem.reason == "bad_probe"
    assert problem.because.isprintable()
    assert len(problem.because) < 200


@given(st.text(max_size=300), st.none() | st.text(max_size=12))
def test_whatever_the_labels_say_nobody_is_asked_but_the_container_itself(probe: str, timeout: str | None) -> None:
    found = parse_probe_labels(labels(probe, timeout))

    assert isinstance(found, Probe | Unknown)
    if isinstance(found, Probe):
        assert 10 <= found.restart_after_s <= 86400
        assert found.kind == "docker" or (0 < found.port < 65536 and found.target.isprintable())
        assert not set(found.target) & set(" \r\n")


# --- for how long nothing was answered


def asked(asking: ProbeState, at_s: float, *, answered: bool = False, took_s: float = 1.0) -> ProbeState:
    return asking.add_probe(
        answered, began_s=at_s, ended_s=at_s + took_s, gap_max_s=GAP_S, because="" if answered else "no"
    )


def test_a_server_that_nobody_asked_yet_is_unknown() -> None:
    assert ProbeState().unanswered_s(now_s=5.0, fresh_s=60.0) is None
    assert ProbeState().answered is False


def test_one_that_answers_has_been_unanswered_for_no_time() -> None:
    asking = asked(ProbeState(), 100.0, answered=True)

    assert asking.answered
    assert asking.unanswered_s(now_s=103.0, fresh_s=60.0) == 0.0


def test_a_silence_lasts_from_the_first_asking_to_the_end_of_the_newest_and_no_longer() -> None:
    asking = asked(ProbeState(), 100.0, answered=True)
    silences = []
    for at_s in (105.0, 110.0, 115.0):
        asking = asked(asking, at_s)
        silences.append(asking.unanswered_s(now_s=at_s + 4.9, fresh_s=60.0))

    assert silences == [1.0, 6.0, 11.0]
    assert asking.answered
    assert asking.because == "no"


def test_one_answer_ends_it() -> None:
    asking = asked(asked(ProbeState(), 100.0), 105.0, answered=True)

    assert asking.unanswered_s(now_s=106.0, fresh_s=60.0) == 0.0
    assert asked(asking, 110.0).unanswered_s(now_s=111.0, fresh_s=60.0) == 1.0


def test_before_the_first_answer_it_is_silent_and_not_armed() -> None:
    asking = asked(asked(ProbeState(), 100.0), 105.0)

    assert asking.unanswered_s(now_s=106.0, fresh_s=60.0) == 6.0
    assert not asking.answered


def test_what_was_not_asked_lately_is_unknown() -> None:
    assert asked(ProbeState(), 100.0).unanswered_s(now_s=161.1, fresh_s=60.0) is None


def test_an_asking_that_ended_after_the_look_at_the_clock_is_told_all_the_same() -> None:
    assert asked(ProbeState(), 100.0).unanswered_s(now_s=100.9, fresh_s=60.0) == 1.0


@pytest.mark.parametrize("at_s", [111.1, 100.5], ids=["a gap", "backwards"])
def test_after_a_gap_the_silence_starts_anew(at_s: float) -> None:
    asking = asked(asked(ProbeState(), 100.0), at_s)

    assert asking.unanswered_s(now_s=at_s + 1.0, fresh_s=60.0) == 1.0


def test_what_could_not_be_asked_for_a_while_is_unknown_and_armed_still() -> None:
    asking = asked(asked(ProbeState(), 100.0, answered=True), 105.0).reset()

    assert asking == ProbeState(answered=True)
    assert asking.unanswered_s(now_s=106.0, fresh_s=60.0) is None


# --- Docker's own health check


FAILING = build.health(passed=False, newest="2", failing_streak=1)


def test_what_is_there_at_the_first_look_tells_whether_it_is_healthy_and_no_more() -> None:
    healthy = HealthCheckTracker().observe(build.health(), paused=False, now_s=100.0)
    unhealthy = HealthCheckTracker().observe(
        build.health(status="unhealthy", passed=False, failing_streak=7), paused=False, now_s=100.0
    )

    assert healthy == ProbeState(answered=True)
    assert unhealthy == ProbeState()


def test_each_new_failure_lengthens_the_silence_by_the_time_between_our_own_looks() -> None:
    watch = HealthCheckTracker()
    watch.observe(build.health(), paused=False, now_s=100.0)
    found = []
    for number, now_s in ((1, 130.0), (1, 131.0), (2, 160.0), (3, 190.0)):
        status = "unhealthy" if number == 3 else "healthy"
        health = replace(FAILING, newest=str(1 + number), failing_streak=number, status=status)
        found.append(watch.observe(health, paused=False, now_s=now_s).unanswered_s(now_s=now_s, fresh_s=130.0))

    assert found == [0.0, 0.0, 30.0, 60.0]


def test_a_check_that_passes_ends_it() -> None:
    watch = HealthCheckTracker()
    for now_s, health in (
        (100.0, build.health()),
        (130.0, FAILING),
        (160.0, replace(FAILING, newest="3", failing_streak=2)),
        (190.0, build.health(newest="4")),
    ):
        asking = watch.observe(health, paused=False, now_s=now_s)

    assert asking == ProbeState(answered=True, last_probe_s=190.0)


def test_an_answer_between_two_looks_is_told_by_the_streak() -> None:
    watch = HealthCheckTracker()
    watch.observe(build.health(), paused=False, now_s=100.0)
    watch.observe(FAILING, paused=False, now_s=130.0)
    asking = watch.observe(replace(FAILING, newest="4"), paused=False, now_s=190.0)

    assert asking.unanswered_s(now_s=190.0, fresh_s=130.0) == 0.0


def test_failures_while_it_starts_are_of_one_that_never_answered() -> None:
    watch = HealthCheckTracker()
    for number in range(5):
        health = build.health(status="starting", newest=str(number), passed=False)
        asking = watch.observe(health, paused=False, now_s=100.0 + 30 * number)

    assert not asking.answered
    assert asking.unanswered_s(now_s=220.0, fresh_s=130.0) == 0.0


def test_a_check_that_fails_while_its_container_is_paused_is_no_silence() -> None:
    watch = HealthCheckTracker()
    watch.observe(build.health(), paused=False, now_s=100.0)
    for number in (1, 2, 3):
        health = replace(FAILING, newest=str(1 + number), failing_streak=number)
        asking = watch.observe(health, paused=True, now_s=100.0 + 30 * number)
    after = watch.observe(health, paused=False, now_s=191.0)

    assert asking == after == ProbeState(answered=True)


def test_an_engine_that_has_forgotten_its_results_has_told_none() -> None:
    watch = HealthCheckTracker()
    watch.observe(build.health(), paused=False, now_s=100.0)
    emptied = build.health(status="starting", newest="", passed=False)

    assert watch.observe(emptied, paused=False, now_s=101.0) == ProbeState(answered=True)
    asking = watch.observe(replace(emptied, newest="9"), paused=False, now_s=131.0)
    assert asking.unanswered_s(now_s=131.0, fresh_s=130.0) == 0.0


def test_a_check_that_is_overdue_is_unknown() -> None:
    watch = HealthCheckTracker()
    watch.observe(build.health(), paused=False, now_s=100.0)
    watch.observe(FAILING, paused=False, now_s=130.0)
    asking = watch.observe(FAILING, paused=False, now_s=300.0)

    assert asking.unanswered_s(now_s=300.0, fresh_s=FAILING.fresh_s) is None


# --- what counts as an answer


@pytest.mark.parametrize(
    ("line", "answers", "says"),
    [
        (b"HTTP/1.1 200 OK\r\n", True, ""),
        (b"HTTP/1.0 404 Not Found\r\n", True, ""),
        (b"HTTP/1.1 302 Found\r\n", True, ""),
        (b"HTTP/1.1 401\r\n", True, ""),
        (b"HTTP/1.1 499 x", True, ""),
        (b"HTTP/1.1 500 Internal Server Error\r\n", False, "HTTP status 500"),
        (b"HTTP/1.1 503\n", False, "HTTP status 503"),
        (b"", False, "the connection closed without a response"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", False, "not HTTP/1"),
        (b"HTTP/2 200\r\n", False, "not HTTP/1"),
        (b"HTTP/1.1 099 \r\n", False, "not HTTP/1"),
        (b"HTTP/1.1 20", False, "not HTTP/1"),
        (b"\x15\x03\x01\x00\x02", False, "not HTTP/1"),
    ],
)
def test_any_status_below_500_is_an_answer(line: bytes, answers: bool, says: str) -> None:
    answered, because = check_status_line(line)

    assert answered is answers
    assert says in because
