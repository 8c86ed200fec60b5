"""TLS, passwords and tokens, with real certificates and handshakes."""

import asyncio
import http.client
import os
import ssl
import subprocess
import threading
from base64 import b64encode
from collections.abc import Callable, Mapping
from pathlib import Path

import bcrypt
import httpx
import pytest
import structlog
from structlog.testing import LogCapture

import gpuwarden.http.web_config
from deploy.standalone import debian_packages
from gpuwarden.http.web_config import TOKENS_MAX, BusyError, WebConfig, WebConfigError
from tests.asking import PLAIN
from tests.certificates import Authority, authority, openssl
from tests.exporter import builders as build
from tests.exporter.http.test_server import live, served
from tests.remediator.prometheus import prometheus
from tests.served import Answer, get
from tests.waiting import eventually

PASSWORD = "correct horse"


def hashed(password: str) -> str:
    """A bcrypt hash of the lowest cost."""
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(4)).decode()


def admits(door: WebConfig, authorization: str = "") -> bool:
    return not asyncio.run(door.refusal(authorization))


def basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + b64encode(f"{user}:{password}".encode()).decode()}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("tls") / "another")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> LogCapture:
    """Captured log events."""
    capture = LogCapture()
    monkeypatch.setattr(gpuwarden.http.web_config, "log", structlog.wrap_logger(None, processors=[capture]))
    return capture


def write(path: Path, text: str) -> Path:
    """Replace a file by rename."""
    scratch = path.with_suffix(".new")
    scratch.write_text(text)
    scratch.replace(path)
    return path


def users(**passwords: str) -> str:
    return "basic_auth_users:\n" + "".join(f"  {name}: {hashed(its)}\n" for name, its in passwords.items())


def tls(ours: Authority, **more: str) -> str:
    fields = {"cert_file": ours.server.cert, "key_file": ours.server.key, **more}
    return "tls_server_config:\n" + "".join(f"  {name}: {value}\n" for name, value in fields.items())


# Passwords


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param(basic("prom", PASSWORD), 200, id="the right one"),
        pytest.param({}, 401, id="none"),
        pytest.param(basic("prom", "guess"), 401, id="a wrong one"),
        pytest.param(basic("stranger", PASSWORD), 401, id="unknown user"),
        pytest.param(basic("", PASSWORD), 401, id="no user"),
        pytest.param(basic("prom", ""), 401, id="an empty one"),
        pytest.param(basic("other", "x" * 72 + "y"), 401, id="truncated by bcrypt to the right one"),
        pytest.param(basic("prom", PASSWORD + "\0x"), 401, id="with a NUL byte"),
        pytest.param({"Authorization": f"Bearer {PASSWORD}"}, 401, id="another scheme"),
        pytest.param({"Authorization": "Basic !!!"}, 401, id="not base64"),
        pytest.param({"Authorization": "Basic " + b64encode(b"\xff:\xff").decode()}, 401, id="not UTF-8"),
        pytest.param({"Authorization": "Basic " + b64encode(b"prom").decode()}, 401, id="no colon"),
    ],
)
def test_caller_without_password_is_refused(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    config = write(tmp_path / "web.yml", users(prom=PASSWORD, other="x" * 72))

    with served(live(build.sighting()), web_config_file=config) as port:
        for path in ("/metrics", "/", "/evidence?worker=w0", "/nowhere"):
            found, text, answered = get(port, path, headers=headers)

            if status == 200:
                assert (path, found) == (path, 404 if path == "/nowhere" else 200)
            else:
                assert (path, found, answered["WWW-Authenticate"]) == (path, 401, 'Basic realm="gpuwarden"')
                assert "gpuwarden_worker" not in text


@pytest.mark.parametrize("path", ["/-/healthy", "/-/ready"])
def test_health_pages_need_no_password(tmp_path: Path, path: str) -> None:
    with served(live(), web_config_file=write(tmp_path / "web.yml", users(prom=PASSWORD))) as port:
        assert get(port, path)[:2] == (200, "ok\n")


def test_known_password_needs_no_bcrypt_until_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write(tmp_path / "web.yml", users(prom=PASSWORD))
    asked: list[bytes] = []
    check = bcrypt.checkpw

    def counted(given: bytes, wanted: bytes) -> bool:
        asked.append(given)
        return check(given, wanted)

    monkeypatch.setattr(bcrypt, "checkpw", counted)
    door, right = WebConfig(config), basic("prom", PASSWORD)["Authorization"]

    assert [admits(door, right) for _ in range(3)] == [True, True, True]
    assert len(asked) == 1
    assert [admits(door, basic("prom", "guess")["Authorization"]) for _ in range(2)] == [False, False]
    assert len(asked) == 3
    write(config, users(prom="another one"))
    assert not admits(door, right)
    assert len(asked) == 4


def test_guesses_do_not_delay_known_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    door, right = WebConfig(write(tmp_path / "web.yml", users(prom=PASSWORD))), basic("prom", PASSWORD)
    assert admits(door, right["Authorization"])
    held, go_on = threading.Event(), threading.Event()

    def slow(*_: bytes) -> bool:
        held.set()
        go_on.wait(20)
        return False

    monkeypatch.setattr(bcrypt, "checkpw", slow)
    monkeypatch.setattr(gpuwarden.http.web_config, "WAIT_S", 0.05)
    guessing = threading.Thread(
        target=admits,
        args=(
            door,
            basic("prom", "guess")["Authorization"],
        ),
    )
    guessing.start()
    assert held.wait(10)

    try:
        assert admits(door, right["Authorization"])
        with pytest.raises(BusyError):  # it waits too long
            admits(door, basic("prom", "another guess")["Authorization"])
    finally:
        go_on.set()
        guessing.join()


def test_concurrent_guesses_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpuwarden.http.web_config, "CHECKED_MAX", 1)
    held, go_on = threading.Event(), threading.Event()

    def slow(*_: bytes) -> bool:
        held.set()
        go_on.wait(20)
        return False

    monkeypatch.setattr(bcrypt, "checkpw", slow)
    statuses: list[int] = []
    with served(live(), web_config_file=write(tmp_path / "web.yml", users(prom=PASSWORD))) as port:

        def guess(password: str) -> Answer:
            return get(port, "/metrics", headers=basic("prom", password))

        guessing = threading.Thread(target=lambda: statuses.append(guess("guess")[0]))
        guessing.start()
        try:
            assert held.wait(10)
            status, text, headers = guess("another guess")
            still_held = not go_on.is_set() and guessing.is_alive()
        finally:
            go_on.set()
            guessing.join()
        again = guess("another guess")[0]

    assert (status, text, headers["Retry-After"]) == (503, "too many passwords are being checked: try again\n", "1")
    assert still_held
    assert (statuses, again) == ([401], 401)


def test_number_of_cached_passwords_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpuwarden.http.web_config, "KNOWN_MAX", 2)
    door = WebConfig(write(tmp_path / "web.yml", users(a="1", b="2", c="3")))

    for name, password in (("a", "1"), ("b", "2"), ("c", "3")):
        assert admits(door, basic(name, password)["Authorization"])

    assert len(door._known) <= 2


# Tokens

OLD, NEW = "old-0123456789abcdef", "new-0123456789abcdef"
TOKENS = "bearer_token_file: tokens\n"


def bearer(token: str) -> str:
    return f"Bearer {token}"


def in_place(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Write the token file next to `web.yml`."""
    write(tmp_path / "web.yml", TOKENS)
    return write(tmp_path / "tokens", f"{OLD}\n")


@pytest.mark.parametrize("change", [write, in_place])
def test_token_changes_without_a_gap(tokens: Path, change: Callable[[Path, str], object]) -> None:
    door = WebConfig(tokens.with_name("web.yml"))
    assert (admits(door, bearer(OLD)), admits(door, bearer(NEW))) == (True, False)

    write(tokens, f"{OLD}\n\n {NEW} \n")
    assert (admits(door, bearer(OLD)), admits(door, bearer(NEW))) == (True, True)

    change(tokens, f"{NEW}\n")
    assert (admits(door, bearer(OLD)), admits(door, bearer(NEW))) == (False, True)


def test_replaced_file_of_same_size_and_time_is_reloaded(tokens: Path) -> None:
    door = WebConfig(tokens.with_name("web.yml"))
    new, found = tokens.with_name("new"), tokens.stat()
    new.write_text(f"{NEW}\n")
    os.utime(new, ns=(found.st_atime_ns, found.st_mtime_ns))
    new.replace(tokens)
    assert tokens.stat().st_size == found.st_size

    assert (admits(door, bearer(OLD)), admits(door, bearer(NEW))) == (False, True)


@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", bearer(OLD[:-1]), bearer(f"{OLD}x"), bearer("t\xf6ken-0123456789abc"), OLD, f"Basic {OLD}",
     basic("", OLD)["Authorization"]],
    ids=["no header", "no token", "its beginning", "more than it", "not ASCII", "without a scheme", "another scheme",
         "as a password"],
)  # fmt: skip
def test_caller_without_token_is_refused(tokens: Path, authorization: str) -> None:
    door = WebConfig(tokens.with_name("web.yml"))

    assert not admits(door, authorization)
    assert (admits(door, f"bearer {OLD}"), door.challenge) == (True, "Bearer")


def test_tokens_and_users_are_both_accepted_and_both_offered(tokens: Path) -> None:
    config = write(tokens.with_name("web.yml"), TOKENS + users(ann=PASSWORD))

    with served(live(), web_config_file=config) as port:
        right = [basic("ann", PASSWORD), {"Authorization": bearer(OLD)}]
        assert [get(port, "/metrics", headers=each)[0] for each in right] == [200, 200]
        status, _, headers = get(port, "/metrics")

    assert (status, headers["WWW-Authenticate"]) == (401, 'Bearer, Basic realm="gpuwarden"')


def test_maximum_number_of_tokens_is_accepted(tokens: Path) -> None:
    write(tokens, "".join(f"token-{number:010}\n" for number in range(TOKENS_MAX)))
    door = WebConfig(tokens.with_name("web.yml"))

    numbers = (0, TOKENS_MAX - 1, TOKENS_MAX)
    assert [admits(door, bearer(f"token-{number:010}")) for number in numbers] == [True, True, False]


UNUSABLE_TOKENS: Mapping[str, tuple[bytes, str]] = {
    "empty": (b"\n \n", "has 0 lines: give 1 to 100 tokens"),
    "short": (b"0123456789abcde", "line 1 of the bearer token file .* has 15 characters: use 16 or more"),
    "with a space": (f"{OLD}\n{NEW} {NEW}".encode(), "line 2 of .* is not a token: use ASCII without spaces"),
    "not ASCII": ("t\xf6ken-0123456789abc".encode(), "is not a token"),
    "not text": (b"\xff" * 20, "is not UTF-8 text"),
    "too many": (f"{OLD}\n".encode() * (TOKENS_MAX + 1), "has 101 lines"),
    "too large": (b"x" * 70_000, "is over 65536 bytes"),
}


@pytest.mark.parametrize(("content", "says"), UNUSABLE_TOKENS.values(), ids=UNUSABLE_TOKENS)
def test_invalid_tokens_leave_the_earlier_ones_in_use(tokens: Path, content: bytes, says: str) -> None:
    door = WebConfig(tokens.with_name("web.yml"))
    tokens.write_bytes(content)

    with pytest.raises(WebConfigError, match=says) as refused:
        WebConfig(tokens.with_name("web.yml"))

    assert OLD not in str(refused.value)
    assert admits(door, bearer(OLD))
    assert door.look() == str(refused.value)


def test_unreadable_token_file_is_named(tokens: Path) -> None:
    tokens.unlink()
    with pytest.raises(WebConfigError, match=r"tokens cannot be read \(No such file"):
        WebConfig(tokens.with_name("web.yml"))
    tokens.mkdir()
    with pytest.raises(WebConfigError, match=r"tokens cannot be read \(Is a directory"):
        WebConfig(tokens.with_name("web.yml"))


# Required credentials


def test_required_credentials_are_checked_at_each_reload(tmp_path: Path, ours: Authority) -> None:
    wants = tls(ours, client_auth_type="RequireAndVerifyClientCert", client_ca_file=str(ours.own.cert))
    config = write(tmp_path / "web.yml", wants)
    with pytest.raises(WebConfigError, match="lets every caller in"):
        WebConfig(config, credentials_required=True)

    door = WebConfig(write(config, wants + users(ann=PASSWORD)), credentials_required=True)
    write(config, wants)

    assert "lets every caller in" in door.look()
    assert (admits(door), admits(door, basic("ann", PASSWORD)["Authorization"])) == (False, True)


# TLS


def ask(
    port: int, trusts: Authority, path: str = "/metrics", *, shows: Authority | None = None, newest: str = "TLSv1_3"
) -> int:
    """Status of an answer by TLS."""
    context = ssl.create_default_context(cafile=trusts.own.cert)
    context.maximum_version = ssl.TLSVersion[newest]
    if shows is not None:
        context.load_cert_chain(shows.client.cert, shows.client.key)
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def refused(port: int, trusts: Authority, *, shows: Authority | None = None, newest: str = "TLSv1_3") -> bool:
    """Whether the connection is refused."""
    try:
        ask(port, trusts, shows=shows, newest=newest)
    except OSError:
        return True
    return False


def test_pages_are_served_by_tls_only(tmp_path: Path, ours: Authority, another: Authority) -> None:
    with served(live(), web_config_file=write(tmp_path / "web.yml", tls(ours))) as port:
        assert ask(port, ours) == 200
        assert refused(port, another)
        with pytest.raises((OSError, http.client.HTTPException)):
            get(port, "/metrics")
        assert ask(port, ours) == 200


@pytest.mark.parametrize(
    ("kind", "without", "with_ours", "with_anothers"),
    [
        pytest.param("RequireAndVerifyClientCert", False, True, False, id="required"),
        pytest.param("VerifyClientCertIfGiven", True, True, False, id="verified if given"),
    ],
)
def test_client_certificate(
    tmp_path: Path, ours: Authority, another: Authority, kind: str, without: bool, with_ours: bool, with_anothers: bool
) -> None:
    wants = tls(ours, client_auth_type=kind, client_ca_file=str(ours.own.cert))

    with served(live(), web_config_file=write(tmp_path / "web.yml", wants)) as port:
        assert [not refused(port, ours, shows=each) for each in (None, ours, another)] == [
            without,
            with_ours,
            with_anothers,
        ]


def test_old_tls_version_is_refused(tmp_path: Path, ours: Authority) -> None:
    config = write(tmp_path / "web.yml", tls(ours, min_version="TLS13"))

    with served(live(), web_config_file=config) as port:
        assert refused(port, ours, newest="TLSv1_2")
        assert not refused(port, ours)
        write(config, tls(ours))
        assert not refused(port, ours, newest="TLSv1_2")


def test_paths_are_relative_to_the_file(tmp_path: Path, ours: Authority) -> None:
    for name, its in (("cert.pem", ours.server.cert), ("key.pem", ours.server.key)):
        (tmp_path / name).write_bytes(its.read_bytes())
    config = write(tmp_path / "web.yml", "tls_server_config: {cert_file: cert.pem, key_file: key.pem}\n")

    assert WebConfig(config).describe() == "https, 0 users, 0 tokens"


def test_renewed_certificate_is_used(tmp_path: Path, ours: Authority, another: Authority, said: LogCapture) -> None:
    for name, its in (("cert.pem", ours.server.cert), ("key.pem", ours.server.key)):
        (tmp_path / name).write_bytes(its.read_bytes())
    config = write(tmp_path / "web.yml", "tls_server_config: {cert_file: cert.pem, key_file: key.pem}\n")

    with served(live(), web_config_file=config) as port:
        assert ask(port, ours) == 200
        write(tmp_path / "cert.pem", another.server.cert.read_text())
        assert ask(port, ours) == 200  # only one file is new: the old pair stays
        write(tmp_path / "key.pem", another.server.key.read_text())
        assert ask(port, another) == 200
        assert refused(port, ours)

    assert [each["event"] for each in said.entries] == [
        "web configuration invalid, old one in use",
        "web configuration read",
    ]


# Changed and invalid files


def test_invalid_file_leaves_the_old_one_in_use_and_is_logged_once(tmp_path: Path, said: LogCapture) -> None:
    config = write(tmp_path / "web.yml", users(prom=PASSWORD))
    door, right = WebConfig(config), basic("prom", PASSWORD)["Authorization"]

    for broken in ("", "basic_auth_users: {prom: plain}\n", "basic_auth_users: {}\n", "!!bool foo\n"):
        write(config, broken)
        assert (admits(door, right), admits(door)) == (True, False)
        assert door.look() != ""
    config.unlink()
    assert (admits(door, right), admits(door)) == (True, False)
    write(config, users(prom="another one"))

    assert door.look() == ""
    assert not admits(door, right)
    assert [each["event"] for each in said.entries] == [
        *["web configuration invalid, old one in use"] * 5,
        "web configuration read",
    ]
    assert "prom" not in str(said.entries[1]["reason"]).replace(str(config), "")


def test_restored_file_is_valid_again(tmp_path: Path) -> None:
    config = write(tmp_path / "web.yml", users(prom=PASSWORD))
    door = WebConfig(config)
    config.rename(tmp_path / "away")
    gone = door.look()
    (tmp_path / "away").rename(config)

    assert "cannot be read" in gone
    assert door.look() == ""


def test_unchanged_web_config_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    door = WebConfig(write(tmp_path / "web.yml", users(prom=PASSWORD)))
    monkeypatch.setattr(gpuwarden.http.web_config, "_yaml", lambda *_: pytest.fail("it is read again"))

    assert door.look() == ""


def test_without_a_file_every_caller_is_admitted() -> None:
    door = WebConfig(None)

    assert (door.look(), admits(door), door.describe()) == ("", True, "http, 0 users, 0 tokens")


GOOD = hashed("x")

UNUSABLE: Mapping[str, tuple[str, str]] = {
    "nothing": ("", "it is empty: add one of tls_server_config"),
    "not YAML": ("{", "is not valid YAML in line"),
    "a list": ("- 1\n", "must be a mapping of tls_server_config"),
    "not text": ("\x00", "is not valid YAML"),
    "an unsupported section": ("rate_limit: {interval: 1s}\n", "rate_limit is not supported"),
    "an unsupported key of Prometheus": (
        "tls_server_config: {cipher_suites: [x]}\n",
        "tls_server_config.cipher_suites is not supported",
    ),
    "no users": ("basic_auth_users:\n", "basic_auth_users is empty"),
    "no user": ("basic_auth_users: {}\n", "wants 1 to 100 lines"),
    "a user without a hash": ("basic_auth_users: {a: secret-word}\n", "basic_auth_users: user 1 has no bcrypt"),
    "a hash of another kind": (f"basic_auth_users: {{a: '{GOOD.replace('$2b$', '$6$')}'}}\n", "has no bcrypt hash"),
    "a hash that takes years": (f"basic_auth_users: {{a: '{GOOD.replace('$04$', '$31$')}'}}\n", "of cost 31"),
    "a user whose name is a number": (f"basic_auth_users: {{1: '{GOOD}'}}\n", "user 1 has no name"),
    "a user with a colon": (f"basic_auth_users: {{'a:b': '{GOOD}'}}\n", "has no name"),
    "a key without a certificate": (
        "tls_server_config: {key_file: x}\n",
        "cert_file: Field required",
    ),
    "a missing file": ("tls_server_config: {cert_file: none.pem, key_file: x}\n", "cannot be read .No such file"),
    "a number": ("tls_server_config: {cert_file: 1, key_file: x}\n", "cert_file: Input should be a valid string"),
    "a tag that does not fit its value": ("!!bool foo\n", "is not valid YAML"),
    "an invalid time": ("!!timestamp foo\n", "is not valid YAML"),
    "a number without digits": ("!!int ''\n", "is not valid YAML"),
    "a key that is a list": ("[a]: b\n", "is not valid YAML"),
    "a section twice": (
        f"basic_auth_users: {{a: '{GOOD}'}}\nbasic_auth_users: {{b: '{GOOD}'}}\n",
        "'basic_auth_users' is written twice, once more in line 2",
    ),
    "an empty file name": ("bearer_token_file:\n", "bearer_token_file is empty"),
    "no TLS": ("tls_server_config:\n", "tls_server_config is empty"),
    "a token in place of its file": ("bearer_token_file: {token: secret-word}\n", "Input should be a valid string"),
    "a user twice": (
        f"basic_auth_users:\n  a: '{GOOD}'\n  \"a\": '{GOOD}'\n",
        "'a' is written twice, once more in line 3",
    ),
    "a setting twice": (
        "tls_server_config: {cert_file: a, key_file: b, cert_file: c}\n",
        "'cert_file' is written twice",
    ),
    "a path with a byte that ends it": (
        'tls_server_config: {cert_file: "a\\0b", key_file: b}\n',
        "wants text",
    ),
    "a path that is half a character": (
        'tls_server_config: {cert_file: "\\ud800", key_file: b}\n',
        "cert_file: Input should be a valid string",
    ),
    "an old version": (
        "tls_server_config: {cert_file: a, key_file: b, min_version: TLS10}\n",
        "min_version: Input should be 'TLS12' or 'TLS13'",
    ),
    "versions the wrong way round": (
        "tls_server_config: {cert_file: a, key_file: b, min_version: TLS13, max_version: TLS12}\n",
        "above max_version",
    ),
}


@pytest.mark.parametrize(("text", "says"), UNUSABLE.values(), ids=UNUSABLE)
def test_invalid_web_config_is_refused_with_a_hint(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(WebConfigError, match=says) as raised:
        WebConfig(write(tmp_path / "web.yml", text))

    assert str(tmp_path / "web.yml") in str(raised.value)
    assert "secret-word" not in str(raised.value)


def test_unreadable_web_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(WebConfigError, match=r"web\.yml cannot be read \(No such file"):
        WebConfig(tmp_path / "web.yml")


def test_oversized_web_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WebConfigError, match="is over 65536 bytes"):
        WebConfig(write(tmp_path / "web.yml", "#" * 70_000))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        pytest.param({"client_auth_type": "RequireAndVerifyClientCert"}, "wants client_ca_file", id="without a CA"),
        pytest.param({"client_ca_file": "{ca}"}, "wants client_auth_type", id="a CA without client_auth_type"),
        pytest.param(
            {"client_auth_type": "RequireAnyClientCert"},
            "should be 'NoClientCert'",
            id="not supported",
        ),
        pytest.param(
            {"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": "{key}"},
            "holds no certificate in PEM",
            id="a CA that is a key",
        ),
        pytest.param({"key_file": "{ca_key}"}, "cannot be used .KEY_VALUES_MISMATCH", id="another's key"),
        pytest.param({"key_file": "{encrypted}"}, "is encrypted", id="an encrypted key"),
        pytest.param({"key_file": "."}, "cannot be read .Is a directory", id="a folder as key"),
        pytest.param({"cert_file": "{key}"}, "cannot be used", id="a key as certificate"),
        pytest.param({"key_file": "{ca}"}, "cannot be used", id="a certificate as key"),
    ],
)
def test_invalid_tls_settings_are_refused(tmp_path: Path, ours: Authority, more: dict[str, str], says: str) -> None:
    encrypted = tmp_path / "encrypted"
    openssl("pkey", "-in", ours.server.key, "-aes256", "-passout", "pass:secret", "-out", encrypted)
    paths = {"ca": ours.own.cert, "key": ours.server.key, "ca_key": ours.own.key, "encrypted": encrypted}
    fields = {name: value.format(**paths) for name, value in more.items()}

    with pytest.raises(WebConfigError, match=says):
        WebConfig(write(tmp_path / "web.yml", tls(ours, **fields)))


@pytest.mark.parametrize("goes", ["server.key", "ca.pem"])
def test_removed_web_config_is_named(
    tmp_path: Path, ours: Authority, monkeypatch: pytest.MonkeyPatch, goes: str
) -> None:
    for its in (ours.server.cert, ours.server.key, ours.own.cert):
        (tmp_path / its.name).write_bytes(its.read_bytes())
    read = gpuwarden.http.web_config._bytes

    def read_and_gone(what: str, path: Path) -> bytes:
        found = read(what, path)
        if path.name == goes:
            path.unlink()
        return found

    monkeypatch.setattr(gpuwarden.http.web_config, "_bytes", read_and_gone)
    names = {"cert_file": "server.pem", "key_file": "server.key", "client_ca_file": "ca.pem"}
    kind = {"client_auth_type": "RequireAndVerifyClientCert"}

    with pytest.raises(WebConfigError, match=rf"{goes}.*(cannot be used|holds no certificate)"):
        WebConfig(write(tmp_path / "web.yml", tls(ours, **names, **kind)))


@pytest.mark.needs_parts
def test_accepted_web_config_is_accepted_by_promtool(tmp_path: Path, ours: Authority) -> None:
    ca = str(ours.own.cert)
    whole = tls(ours, client_auth_type="RequireAndVerifyClientCert", client_ca_file=ca, min_version="TLS13")
    config = write(tmp_path / "web.yml", whole + users(prom=PASSWORD))

    assert WebConfig(config).describe() == "https, 1 users, 0 tokens"
    done = subprocess.run(
        [debian_packages.find("promtool"), "check", "web-config", config],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.needs_parts
def test_prometheus_scrapes_by_tls_and_password(tmp_path: Path, ours: Authority) -> None:
    wants = tls(ours, client_auth_type="RequireAndVerifyClientCert", client_ca_file=str(ours.own.cert))
    config = write(tmp_path / "web.yml", wants + users(prometheus=PASSWORD))
    certificates = {
        "ca_file": str(ours.own.cert), "cert_file": str(ours.client.cert), "key_file": str(ours.client.key)
    }  # fmt: skip
    with (
        served(live(build.sighting()), web_config_file=config) as port,
        prometheus(
            tmp_path / "prometheus",
            f"127.0.0.1:{port}",
            scheme="https",
            tls_config=certificates,
            basic_auth={"username": "prometheus", "password": PASSWORD},
        ) as url,
    ):

        def seen() -> list[str]:
            answer = httpx.get(
                f"{url}/api/v1/query", params={"query": "gpuwarden_worker_alive"}, trust_env=False, verify=PLAIN
            )
            return [each["metric"]["worker"] for each in answer.json()["data"]["result"]]

        assert eventually(seen, "its series are there") == ["w0"]
        write(config, wants + users(prometheus="another one"))
        eventually(lambda: not seen(), "another password is in force")
