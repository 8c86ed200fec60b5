"""Probe labels, time without an answer, and what counts as an answer. Pure."""

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


# Probe labels


def test_container_without_the_label_is_not_probed() -> None:
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
def test_url_selects_port_and_path(url: str, port: int, target: str) -> None:
    assert parse_probe_labels(labels(url)) == Probe(kind="http", restart_after_s=120.0, port=port, target=target)


def test_docker_health_check_needs_only_its_name() -> None:
    assert parse_probe_labels(labels("docker", "60")) == Probe(kind="docker", restart_after_s=60.0)


@pytest.mark.parametrize(
    ("text", "restart_after_s"), [("10", 10.0), ("86400", 86400.0), ("12.5", 12.5), ("0600", 600.0)]
)
def test_timeout_label_sets_the_restart_time(text: str, restart_after_s: float) -> None:
    probe = parse_probe_labels(labels("docker", text))

    assert isinstance(probe, Probe)
    assert probe.restart_after_s == restart_after_s


@pytest.mark.parametrize("text", ["", "9.999", "86400.001", "-20", "1e3", "nan", "inf", "60s", " 60", "٦٠", "9999999"])
def test_invalid_timeout_is_reported(text: str) -> None:
    problem = parse_probe_labels(labels("docker", text))

    assert isinstance(problem, Unknown)
    assert problem.reason == "bad_timeout"
    assert "expected seconds, 10 to 86400" in problem.message
    assert problem.message.isprintable()


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
def test_other_host_is_rejected(url: str) -> None:
    problem = parse_probe_labels(labels(url))

    assert isinstance(problem, Unknown)
    assert problem.reason == "other_host"
    assert "its host must be localhost" in problem.message


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
        pytest.param(f"http://localhost/{'x' * 256}", id="too long"),
    ],
)
def test_invalid_probe_is_reported(text: str) -> None:
    problem = parse_probe_labels(labels(text))

    assert isinstance(problem, Unknown)
    assert problem.reason == "bad_probe"
    assert problem.message.isprintable()
    assert len(problem.message) < 200


@given(st.text(max_size=300), st.none() | st.text(max_size=12))
def test_any_label_probes_only_the_container_itself(probe: str, timeout: str | None) -> None:
    found = parse_probe_labels(labels(probe, timeout))

    assert isinstance(found, Probe | Unknown)
    if isinstance(found, Probe):
        assert 10 <= found.restart_after_s <= 86400
        assert found.kind == "docker" or (0 < found.port < 65536 and found.target.isprintable())
        assert not set(found.target) & set(" \r\n")


# Time without an answer


def asked(asking: ProbeState, at_s: float, *, answered: bool = False, took_s: float = 1.0) -> ProbeState:
    return asking.add_probe(
        answered, began_s=at_s, ended_s=at_s + took_s, gap_max_s=GAP_S, message="" if answered else "no"
    )


def test_unprobed_server_is_unknown() -> None:
    assert ProbeState().probe_failing_s(now_s=5.0, fresh_s=60.0) is None
    assert ProbeState().answered is False


def test_answering_server_has_zero_unanswered_time() -> None:
    asking = asked(ProbeState(), 100.0, answered=True)

    assert asking.answered
    assert asking.probe_failing_s(now_s=103.0, fresh_s=60.0) == 0.0


def test_unanswered_time_is_from_the_first_to_the_last_failed_probe() -> None:
    asking = asked(ProbeState(), 100.0, answered=True)
    silences = []
    for at_s in (105.0, 110.0, 115.0):
        asking = asked(asking, at_s)
        silences.append(asking.probe_failing_s(now_s=at_s + 4.9, fresh_s=60.0))

    assert silences == [1.0, 6.0, 11.0]
    assert asking.answered
    assert asking.message == "no"


def test_one_answer_resets_unanswered_time() -> None:
    asking = asked(asked(ProbeState(), 100.0), 105.0, answered=True)

    assert asking.probe_failing_s(now_s=106.0, fresh_s=60.0) == 0.0
    assert asked(asking, 110.0).probe_failing_s(now_s=111.0, fresh_s=60.0) == 1.0


def test_server_is_not_armed_before_its_first_answer() -> None:
    asking = asked(asked(ProbeState(), 100.0), 105.0)

    assert asking.probe_failing_s(now_s=106.0, fresh_s=60.0) == 6.0
    assert not asking.answered


def test_old_probe_is_unknown() -> None:
    assert asked(ProbeState(), 100.0).probe_failing_s(now_s=161.1, fresh_s=60.0) is None


def test_probe_that_ends_after_the_clock_was_read_counts() -> None:
    assert asked(ProbeState(), 100.0).probe_failing_s(now_s=100.9, fresh_s=60.0) == 1.0


@pytest.mark.parametrize("at_s", [111.1, 100.5], ids=["a gap", "backwards"])
def test_gap_restarts_unanswered_time(at_s: float) -> None:
    asking = asked(asked(ProbeState(), 100.0), at_s)

    assert asking.probe_failing_s(now_s=at_s + 1.0, fresh_s=60.0) == 1.0


def test_reset_makes_it_unknown_and_keeps_it_armed() -> None:
    asking = asked(asked(ProbeState(), 100.0, answered=True), 105.0).reset()

    assert asking == ProbeState(answered=True)
    assert asking.probe_failing_s(now_s=106.0, fresh_s=60.0) is None


# Docker health check


FAILING = build.health(passed=False, newest="2", failing_streak=1)


def test_first_sample_only_arms_a_healthy_server() -> None:
    healthy = HealthCheckTracker().observe(build.health(), paused=False, now_s=100.0)
    unhealthy = HealthCheckTracker().observe(
        build.health(status="unhealthy", passed=False, failing_streak=7), paused=False, now_s=100.0
    )

    assert healthy == ProbeState(answered=True)
    assert unhealthy == ProbeState()


def test_each_new_failure_adds_the_time_between_samples() -> None:
    watch = HealthCheckTracker()
    watch.observe(build.health(), paused=False, now_s=100.0)
    found = []
    for number, now_s in ((1, 130.0), (1, 131.0), (2, 160.0), (3, 190.0)):
        status = "unhealthy" if number == 3 else "healthy"
        health = replace(FAILING, newest=str(1 + number), failing_streak=number, status=status)
        found.append(watch.observe(health, paused=False, now_s=now_s).probe_failing_s(now_s=now_s, fresh_s=130.0))

    assert found == [0.0, 0.0, 30.0, 60.0]


def test_passed_check_resets_unanswered_time() -> None:
    watch = HealthCheckTracker()
    for now_s, health in (
        (100.0, build.health()),
        (130.0, FAILING),
        (160.0, replace(FAILING, newest="3", failing_streak=2)),
        (190.0, build.health(newest="4")),
    ):
        asking = watch.observe(health, paused=False, now_s=now_s)

    assert asking == ProbeState(answered=True, last_probe_s=190.0)


def test_streak_shows_an_answer_between_two_samples() -> None:
    watch = HealthCheckTracker()
    watch.observe(build.health(), paused=False, now_s=100.0)
    watch.observe(FAILING, paused=False, now_s=130.0)
    asking = watch.observe(replace(FAILING, newest="4"), paused=False, now_s=190.0)

    assert asking.probe_failing_s(now_s=190.0, fresh_s=130.0) == 0.0


def test_failures_during_start_do_not_arm() -> None:
    watch = HealthCheckTracker()
    for number in range(5):
        health = build.health(status="starting", newest=str(number), passed=False)
        asking = watch.observe(health, paused=False, now_s=100.0 + 30 * number)

    assert not asking.answered
    assert asking.probe_failing_s(now_s=220.0, fresh_s=130.0) == 0.0


def test_failure_of_a_paused_container_does_not_count() -> None:
    watch = HealthCheckTracker()
    watch.observe(build.health(), paused=False, now_s=100.0)
    for number in (1, 2, 3):
        health = replace(FAILING, newest=str(1 + number), failing_streak=number)
        asking = watch.observe(health, paused=True, now_s=100.0 + 30 * number)
    after = watch.observe(health, paused=False, now_s=191.0)

    assert asking == after == ProbeState(answered=True)


def test_lost_results_of_the_engine_are_no_answer_and_no_failure() -> None:
    watch = HealthCheckTracker()
    watch.observe(build.health(), paused=False, now_s=100.0)
    emptied = build.health(status="starting", newest="", passed=False)

    assert watch.observe(emptied, paused=False, now_s=101.0) == ProbeState(answered=True)
    asking = watch.observe(replace(emptied, newest="9"), paused=False, now_s=131.0)
    assert asking.probe_failing_s(now_s=131.0, fresh_s=130.0) == 0.0


def test_overdue_check_is_unknown() -> None:
    watch = HealthCheckTracker()
    watch.observe(build.health(), paused=False, now_s=100.0)
    watch.observe(FAILING, paused=False, now_s=130.0)
    asking = watch.observe(FAILING, paused=False, now_s=300.0)

    assert asking.probe_failing_s(now_s=300.0, fresh_s=FAILING.fresh_s) is None


# Status lines


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
def test_status_below_500_is_an_answer(line: bytes, answers: bool, says: str) -> None:
    answered, message = check_status_line(line)

    assert answered is answers
    assert says in message
