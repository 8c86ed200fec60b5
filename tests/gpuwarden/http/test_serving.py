"""The HTTP server: timeouts, connection limits and addresses."""

import errno
import gc
import http.client
import re
import socket
import ssl
import struct
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gpuwarden.errors import GpuwardenError
from gpuwarden.http import serving
from gpuwarden.http.serving import bind, hint
from gpuwarden.http.web_config import WebConfig
from tests.asking import needs_ipv6
from tests.certificates import Authority, authority
from tests.served import get, served_app
from tests.waiting import eventually

HANGS_UP_AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER (socket(7)): a close resets the connection, as a crash does."""

PLAIN = WebConfig(None)


async def small(request: Request) -> Response:
    return PlainTextResponse(f"{request.client and request.client.host}\n")


async def large(_: Request) -> Response:
    return PlainTextResponse("x" * 2**25)  # more than the socket buffers


async def broken(_: Request) -> Response:
    raise RuntimeError("it is broken")


async def waiting(request: Request) -> Response:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    return PlainTextResponse("")


async def body(request: Request) -> Response:
    return PlainTextResponse(await request.body())


APP = Starlette(
    routes=[
        Route("/", small, methods=["GET", "POST"]),
        Route("/body", body, methods=["POST"]),
        Route("/large", large),
        Route("/waiting", waiting),
        Route("/broken", broken),
    ]
)


class Slow:
    """An application whose page `/slow` answers once `go_on` is set."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self.app = Starlette(routes=[Route("/slow", self.page), Route("/", small)])

    def page(self, _: Request) -> Response:
        self.began.set()
        self.go_on.wait(20)
        return PlainTextResponse("slow\n")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture
def encrypted(tmp_path: Path, ours: Authority) -> WebConfig:
    config = tmp_path / "web.yml"
    config.write_text(f"tls_server_config: {{cert_file: {ours.server.cert}, key_file: {ours.server.key}}}\n")
    return WebConfig(config)


def answered(port: int, trusts: Authority | None = None) -> bool:
    try:
        if trusts is None:
            return get(port, "/")[0] == 200
        with secured(socket.create_connection(("127.0.0.1", port), timeout=10), trusts) as caller:
            caller.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return caller.recv(1) == b"H"
    except (OSError, http.client.HTTPException):
        return False


def secured(caller: socket.socket, trusts: Authority) -> ssl.SSLSocket:
    return ssl.create_default_context(cafile=trusts.own.cert).wrap_socket(caller, server_hostname="127.0.0.1")


def in_request(port: int, address: str) -> socket.socket:
    """A connection whose request is not answered yet: its body is missing."""
    caller = socket.create_connection(("127.0.0.1", port), 10, source_address=(address, 0))
    caller.sendall(b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nExpect: 100-continue\r\n\r\n")
    assert caller.recv(1) == b"H"  # 100 Continue: the page waits for the body
    return caller


def hung_up(caller: socket.socket, sends: bytes = b"") -> bool:
    """Whether the server has closed the connection. With `slow` it sends a byte first."""
    caller.settimeout(0.05)
    try:
        caller.sendall(sends)
        return caller.recv(2**16) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


# Slow callers


def test_idle_caller_does_not_delay_others() -> None:
    with served_app(APP, PLAIN) as port, socket.create_connection(("127.0.0.1", port)):
        assert answered(port)


def test_caller_without_handshake_does_not_delay_others(encrypted: WebConfig, ours: Authority) -> None:
    with served_app(APP, encrypted) as port, socket.create_connection(("127.0.0.1", port)):
        assert answered(port, ours)


@pytest.mark.parametrize("beginning", [b"", b"GET / HTTP/1.1\r\n"], ids=["its first line", "a header"])
def test_slow_header_times_out(monkeypatch: pytest.MonkeyPatch, beginning: bytes) -> None:
    monkeypatch.setattr(serving, "REQUEST_TIMEOUT_S", 0.3)

    with served_app(APP, PLAIN) as port, socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(beginning)
        eventually(lambda: hung_up(slow, b"x"), "it is closed")
        assert answered(port)


def test_second_slow_header_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "REQUEST_TIMEOUT_S", 0.3)

    with served_app(APP, PLAIN) as port, socket.create_connection(("127.0.0.1", port)) as slow:
        for _ in range(2):
            slow.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = http.client.HTTPResponse(slow)
            answer.begin()
            assert (answer.status, answer.read()) == (200, b"127.0.0.1\n")
        slow.sendall(b"GET / HTTP/1.1\r\n")
        eventually(lambda: hung_up(slow, b"x"), "it is closed")


def test_rest_of_an_unread_body_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "REQUEST_TIMEOUT_S", 0.3)

    with served_app(APP, PLAIN) as port, socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        eventually(lambda: hung_up(slow, b"x"), "it is closed")


def test_caller_that_sends_much_before_its_answer_is_closed() -> None:
    """The server would keep it until the answer."""
    with served_app(APP, PLAIN) as port, socket.create_connection(("127.0.0.1", port)) as caller:
        caller.sendall(b"GET /waiting HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 100)
        assert not hung_up(caller)
        caller.sendall(b"x" * 50_000)
        eventually(lambda: hung_up(caller), "it is closed")


def test_handshake_counts_towards_the_header_timeout(monkeypatch: pytest.MonkeyPatch, encrypted: WebConfig) -> None:
    monkeypatch.setattr(serving, "REQUEST_TIMEOUT_S", 0.3)
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # start of a ClientHello of 512 bytes

    with served_app(APP, encrypted) as port, socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(hello)
        eventually(lambda: hung_up(slow, b"x"), "it is closed")


@pytest.mark.parametrize(
    ("sends", "stays"),
    [
        pytest.param(b"GET /lar", False, id="hangs up within its request"),
        pytest.param(b"GET /large HTTP/1.0\r\n\r\n", False, id="hangs up before it has the answer"),
        pytest.param(b"GET /large HTTP/1.0\r\n\r\n", True, id="does not take the answer"),
        pytest.param(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n", True, id="does not take it and sends another request"),
        pytest.param(b"\x00\r\n\r\n", False, id="does not send HTTP"),
    ],
)
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "by TLS"])
def test_failed_caller_frees_its_place_without_an_error(
    request: pytest.FixtureRequest,
    ours: Authority,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    secure: bool,
    sends: bytes,
    stays: bool,
) -> None:
    monkeypatch.setattr(serving, "CONNECTIONS_MAX", 1)
    if stays:
        monkeypatch.setattr(serving, "REQUEST_TIMEOUT_S", 1.0)

    with served_app(APP, request.getfixturevalue("encrypted") if secure else PLAIN) as port:

        def free() -> bool:
            return answered(port, ours if secure else None)

        caller = socket.create_connection(("127.0.0.1", port))
        with secured(caller, ours) if secure else caller as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, HANGS_UP_AT_ONCE)
            caller.sendall(sends)
            if sends.endswith(b"\r\n\r\n"):
                assert caller.recv(1)
            if stays:
                eventually(free, "its place is free")
        eventually(free, "its place is free")

    assert capfd.readouterr().err == ""


# Many callers


def test_excess_connections_are_closed_until_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "CONNECTIONS_MAX", 2)

    with served_app(APP, PLAIN) as port:
        with ExitStack() as held:
            for _ in range(2):
                held.enter_context(in_request(port, "127.0.0.1"))
            assert not answered(port)
        eventually(lambda: answered(port), "two have hung up")


def test_one_address_cannot_use_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "ADDRESS_CONNECTIONS_MAX", 2)

    with served_app(APP, PLAIN) as port:
        held = [in_request(port, "127.0.0.2") for _ in range(2)]
        with socket.create_connection(("127.0.0.1", port), 10, source_address=("127.0.0.2", 0)) as third:
            assert third.recv(1) == b""
        assert answered(port)
        for each in held:
            each.close()


@pytest.mark.parametrize("limit", ["CONNECTIONS_MAX", "ADDRESS_CONNECTIONS_MAX"])
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "by TLS"])
def test_callers_without_a_header_give_way_to_new_ones_oldest_first(
    request: pytest.FixtureRequest, ours: Authority, monkeypatch: pytest.MonkeyPatch, secure: bool, limit: str
) -> None:
    monkeypatch.setattr(serving, limit, 3)

    with served_app(APP, request.getfixturevalue("encrypted") if secure else PLAIN) as port, ExitStack() as held:
        slow = [held.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(3)]
        for each in () if secure else slow:
            each.sendall(b"GET / HTTP/1.1\r\nHost:")

        assert answered(port, ours if secure else None)
        assert hung_up(slow[0])
        assert not hung_up(slow[1])


def test_idle_caller_gives_way_to_a_new_one_and_not_in_its_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "CONNECTIONS_MAX", 1)
    slow = Slow()

    with served_app(slow.app, PLAIN) as port:
        caller = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        caller.request("GET", "/")
        assert caller.getresponse().read() == b"127.0.0.1\n"
        caller.request("GET", "/slow")
        assert slow.began.wait(10)
        assert not answered(port)
        slow.go_on.set()
        assert caller.getresponse().read() == b"slow\n"

        assert answered(port)
        assert hung_up(caller.sock)
        caller.close()


def test_closed_connection_is_freed_without_a_garbage_collection() -> None:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with served_app(APP, PLAIN) as port:
            assert answered(port)
            eventually(lambda: not any(isinstance(each, serving._Connection) for each in gc.get_objects()), "none")
    finally:
        if was_enabled:
            gc.enable()


def test_callers_without_a_header_give_way_only_at_their_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "ADDRESS_CONNECTIONS_MAX", 1)

    with served_app(APP, PLAIN) as port, socket.create_connection(("127.0.0.1", port)) as other:
        for _ in range(3):
            socket.create_connection(("127.0.0.1", port), 10, source_address=("127.0.0.2", 0)).close()
        assert not hung_up(other)


def test_caller_that_hangs_up_keeps_its_place_until_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "CONNECTIONS_MAX", 1)
    slow = Slow()

    with served_app(slow.app, PLAIN) as port:
        with socket.create_connection(("127.0.0.1", port)) as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, HANGS_UP_AT_ONCE)
            caller.sendall(b"GET /slow HTTP/1.0\r\n\r\n")
            assert slow.began.wait(10)
        assert not any(answered(port) for _ in range(3))
        slow.go_on.set()
        eventually(lambda: answered(port), "its place is free")


def test_full_number_of_callers_can_connect_at_once() -> None:
    with bind("127.0.0.1", 0) as listener, ExitStack() as held:

        def comes() -> bool:  # not accepted yet; a refused SYN is retried after 1 s
            try:
                held.enter_context(socket.create_connection(listener.getsockname(), timeout=0.5))
            except TimeoutError:
                return False
            return True

        assert all(comes() for _ in range(serving.CONNECTIONS_MAX))


# Errors


def test_page_error_is_a_500_and_one_log_line(capfd: pytest.CaptureFixture[str]) -> None:
    with served_app(APP, PLAIN) as port:
        assert get(port, "/broken")[0] == 500
        assert answered(port)

    assert "it is broken" in "".join(capfd.readouterr())


# Addresses


def test_port_in_use_is_named() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(GpuwardenError, match=rf"127\.0\.0\.1:{port} \(Address already in use\): .*--port"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize(
    ("address", "reason"), [("192.0.2.1", "Cannot assign requested address"), ("1.2.3.4.5", ".*(?i:name).*")]
)
def test_address_of_another_host_is_named_with_a_hint(address: str, reason: str) -> None:
    says = "give --listen an address of this host, or 0.0.0.0 for all of them"

    with pytest.raises(GpuwardenError, match=rf"^cannot listen on {address}:0 \({reason}\): {says}$"):
        bind(address, 0)


@needs_ipv6
def test_ipv6_address_is_shown_in_brackets() -> None:
    with pytest.raises(GpuwardenError, match=re.escape("cannot listen on [2001:db8::1]:0")):
        bind("2001:db8::1", 0)


@needs_ipv6
def test_ipv6_wildcard_serves_ipv4_with_ipv4_caller_addresses() -> None:
    with served_app(APP, PLAIN, listen="::") as port:
        assert [get(port, "/", host=host)[1] for host in ("::1", "127.0.0.1")] == ["::1\n", "127.0.0.1\n"]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.EADDRINUSE, ""), "another --port"),
        (OSError(errno.EADDRNOTAVAIL, ""), "an address of this host"),
        (socket.gaierror(socket.EAI_NONAME, ""), "an address of this host"),
        (OSError(errno.EAFNOSUPPORT, ""), "this host has no IPv6"),
        (OSError(errno.EACCES, ""), "1024 or more"),
    ],
)
def test_bind_error_has_a_hint(error: OSError, says: str) -> None:
    assert says in (hint(error) or "")


def test_unknown_bind_error_has_no_hint() -> None:
    assert hint(OSError(errno.ENOMEM, "")) is None
