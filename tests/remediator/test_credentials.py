"""Who is let in: tokens and passwords in real files, changed as people and their tools change them."""

import base64
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpuwarden.errors import GpuwardenError
from remediator.webhook import auth
from remediator.webhook.auth import FILE_MAX_BYTES, SECRETS_MAX, Credentials

OLD, NEW = "old-0123456789abcdef", "new-0123456789abcdef"
PASSWORD = "p:ässword with spaces"


@pytest.fixture(autouse=True)
def looked_at_with_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "LOOK_S", 0.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secrets"
    path.write_text(f"{OLD}\n")
    return path


def bearer(token: str) -> str:
    return f"Bearer {token}"


def basic(user_and_password: str) -> str:
    return f"Basic {base64.b64encode(user_and_password.encode()).decode()}"


def renamed(file: Path, text: str) -> None:
    """As a person's tools and Kubernetes do it: another file in its place."""
    new = file.with_name("new")
    new.write_text(text)
    new.replace(file)


def in_place(file: Path, text: str) -> None:
    file.write_text(text)


@pytest.mark.parametrize("change", [renamed, in_place])
def test_a_token_is_changed_without_a_moment_at_which_neither_is_accepted(
    file: Path, change: Callable[[Path, str], None]
) -> None:
    door = Credentials(token_file=file)
    assert (door.admit(bearer(OLD)), door.admit(bearer(NEW))) == (True, False)

    renamed(file, f"{OLD}\n\n{NEW}\n")
    assert (door.admit(bearer(OLD)), door.admit(bearer(NEW))) == (True, True)

    change(file, f"{NEW}\n")
    assert (door.admit(bearer(OLD)), door.admit(bearer(NEW))) == (False, True)


def test_a_file_of_the_same_size_and_time_is_another_all_the_same(file: Path) -> None:
    door = Credentials(token_file=file)
    new, found = file.with_name("new"), file.stat()
    new.write_text(f"{NEW}\n")
    os.utime(new, ns=(found.st_atime_ns, found.st_mtime_ns))
    new.replace(file)
    assert file.stat().st_size == found.st_size

    assert (door.admit(bearer(OLD)), door.admit(bearer(NEW))) == (False, True)


def test_a_file_is_looked_at_no_more_than_once_in_a_while(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "LOOK_S", 60.0)
    door = Credentials(token_file=file)
    assert door.admit(bearer(OLD))

    renamed(file, NEW)

    assert (door.admit(bearer(OLD)), door.admit(bearer(NEW))) == (True, False)


def emptied(file: Path) -> None:
    file.write_text("\n \n")


def with_a_short_one(file: Path) -> None:
    file.write_text(f"{NEW}\nshort\n")


def not_text(file: Path) -> None:
    file.write_bytes(b"\xff" * 20)


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (Path.unlink, "No such file or directory"),
    "a folder": (a_folder, "Is a directory"),
    "empty": (emptied, "is empty; one secret a line is wanted"),
    "half written": (with_a_short_one, "has 5 characters; 16 or more are wanted"),
    "no text": (not_text, "cannot be read"),
}


@pytest.mark.parametrize(("broken", "says"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_file_that_cannot_be_used_keeps_the_tokens_it_had_and_says_so_once_in_a_while(
    file: Path, broken: Callable[[Path], object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = Credentials(token_file=file)
    broken(file)

    with capture_logs() as logged:
        assert [door.admit(bearer(OLD)) for _ in range(3)] == [True] * 3
        assert not door.admit(bearer(NEW))

    assert [line["event"] for line in logged] == ["secrets kept as they were"]
    assert says in logged[0]["because"]
    with capture_logs() as again, monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", later(60.1))
        door.admit(bearer(OLD))
    assert [line["event"] for line in again] == ["secrets kept as they were"]


def later(by_s: float) -> Callable[[], float]:
    now_s = time.monotonic()
    return lambda: now_s + by_s


def test_once_it_can_be_used_again_it_is(file: Path) -> None:
    door = Credentials(token_file=file)
    file.unlink()
    assert door.admit(bearer(OLD))

    with capture_logs() as logged:
        renamed(file, NEW)
        assert (door.admit(bearer(OLD)), door.admit(bearer(NEW))) == (False, True)

    assert [(line["event"], line["count"]) for line in logged] == [("secrets read anew", 1)]


WRONG_FROM_THE_START = {
    "empty": ("", "is empty; one secret a line is wanted"),
    "short": ("0123456789abcde", "line 1 of the token file"),
    "with a space": (f"{OLD}\n{NEW} {NEW}", "line 2 of the token file"),
    "not ASCII": ("tökén-0123456789abc", "is no token: ASCII without spaces is wanted"),
    "too many": (f"{OLD}\n" * (SECRETS_MAX + 1), f"{SECRETS_MAX + 1} lines"),
    "too large": ("x" * (FILE_MAX_BYTES + 1), f"{FILE_MAX_BYTES} and {SECRETS_MAX} are accepted"),
}


@pytest.mark.parametrize(("text", "says"), WRONG_FROM_THE_START.values(), ids=WRONG_FROM_THE_START)
def test_a_file_that_cannot_be_used_from_the_start_is_an_error_that_shows_no_token(
    file: Path, text: str, says: str
) -> None:
    file.write_text(text)

    with pytest.raises(GpuwardenError) as refused:
        Credentials(token_file=file)

    assert says in str(refused.value)
    assert OLD not in str(refused.value)
    assert NEW not in str(refused.value)


def test_as_many_tokens_as_are_accepted_are(file: Path) -> None:
    file.write_text("".join(f"token-{number:010}\n" for number in range(SECRETS_MAX)))
    door = Credentials(token_file=file)

    assert door.admit(bearer("token-0000000000"))
    assert door.admit(bearer(f"token-{SECRETS_MAX - 1:010}"))
    assert not door.admit(bearer(f"token-{SECRETS_MAX:010}"))


# --- passwords


@pytest.fixture
def door(file: Path) -> Credentials:
    """Opened by passwords alone."""
    file.write_text(f"alertmanager:{PASSWORD}\nann:0123456789abcdef\n")
    return Credentials(basic_auth_file=file)


def test_a_user_with_the_password_is_let_in(door: Credentials) -> None:
    assert door.admit(basic(f"alertmanager:{PASSWORD}"))
    assert door.admit(basic("ann:0123456789abcdef"))


@pytest.mark.parametrize(
    "authorization",
    [
        basic("ann:0123456789abcdeg"),
        basic(f"ann:{PASSWORD}"),
        basic("ann"),
        basic(""),
        "Basic",
        "Basic ann:0123456789abcdef",
        "Basic ä",
        bearer("ann:0123456789abcdef"),
        "",
    ],
    ids=[
        "a wrong password", "another's password", "no password", "nothing", "no credentials", "not in base64",
        "not ASCII", "as a token", "no header",
    ],
)  # fmt: skip
def test_without_user_and_password_nobody_is_let_in(door: Credentials, authorization: str) -> None:
    assert not door.admit(authorization)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ann", "line 1 of the basic auth file"),
        (f":{PASSWORD}", "is not user:password"),
        ("ann:short", "has 5 characters; 16 or more are wanted"),
    ],
    ids=["no password", "no user", "a short password"],
)
def test_a_line_that_is_no_user_and_password_is_an_error(file: Path, text: str, says: str) -> None:
    file.write_text(text)

    with pytest.raises(GpuwardenError, match=says):
        Credentials(basic_auth_file=file)


def test_with_both_files_either_is_accepted_and_a_refused_caller_is_told_of_both(tmp_path: Path, file: Path) -> None:
    passwords = tmp_path / "passwords"
    passwords.write_text(f"ann:{PASSWORD}")
    both = Credentials(token_file=file, basic_auth_file=passwords)

    assert (both.admit(bearer(OLD)), both.admit(basic(f"ann:{PASSWORD}"))) == (True, True)
    assert both.challenge == 'Bearer, Basic realm="gpuwarden"'
    assert Credentials(token_file=file).challenge == "Bearer"
    assert not Credentials(token_file=file).admit(basic(f"ann:{PASSWORD}"))
