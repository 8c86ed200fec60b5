"""Who may call the webhook: bearer tokens and passwords, in files that people change while it serves.

A file holds one secret a line: a token, or `user:password`. Any of them is accepted, so that a new one is written
beside the old one, Alertmanager is changed, and the old one is removed, without a call refused. Empty lines are
nothing. A file is looked at again with the calls, once a second at most, and read where it changed; what cannot be used
then leaves the secrets as they were.
"""

import base64
import binascii
import hashlib
import hmac
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import structlog

from gpuwarden.errors import GpuwardenError

log: Final = structlog.get_logger("remediator")

SECRET_MIN: Final = 16
"""The shortest token and the shortest password accepted, characters."""

SECRETS_MAX: Final = 100
"""Secrets accepted in one file: each call is compared with all of them."""

FILE_MAX_BYTES: Final = 64 * 1024
"""The largest file of secrets, bytes."""

LOOK_S: Final = 1.0
"""A file is looked at no more often, seconds."""

SAY_S: Final = 60.0
"""That a file cannot be used is said no more often, seconds."""

_Stamp = tuple[int, ...]


class Credentials:
    """What a call must show, one of each that is given. Safe to ask from several threads.

    Args:
        token_file: tokens, sent as `Authorization: Bearer TOKEN`.
        basic_auth_file: users and passwords, sent as HTTP basic authentication.

    Raises:
        GpuwardenError: a file cannot be used, and why.
    """

    def __init__(self, *, token_file: Path | None = None, basic_auth_file: Path | None = None) -> None:
        self._by_scheme: dict[str, _File] = {}
        if token_file is not None:
            self._by_scheme["bearer"] = _File(token_file, "the token file", _token)
        if basic_auth_file is not None:
            self._by_scheme["basic"] = _File(basic_auth_file, "the basic auth file", _user_and_password)

    @property
    def challenge(self) -> str:
        """What a refused caller is told to send: the value of WWW-Authenticate."""
        return ", ".join({"bearer": "Bearer", "basic": 'Basic realm="gpuwarden"'}[each] for each in self._by_scheme)

    def admit(self, authorization: str) -> bool:
        """Whether this value of the header Authorization lets a caller in."""
        scheme, _, given = authorization.partition(" ")
        file = self._by_scheme.get(scheme.lower())
        if file is None:
            return False
        if scheme.lower() == "bearer":
            return file.holds(given.strip().encode())
        try:
            return file.holds(base64.b64decode(given.strip(), validate=True))
        except (binascii.Error, ValueError):  # the second: it is not ASCII
            return False


class _File:
    """The secrets of one file, as digests: those of two texts tell by no comparison how much of them agrees."""

    def __init__(self, path: Path, what: str, read: Callable[[str], str | None]) -> None:
        self._path, self._what, self._wrong = path, what, read
        self._lock = threading.Lock()
        self._next_look_s = self._next_word_s = 0.0
        self._stamp, self._digests = self._read()

    def holds(self, secret: bytes) -> bool:
        """Whether it is one of them; takes as long whichever it is, or none."""
        digest = hashlib.sha256(secret).digest()
        same = [hmac.compare_digest(digest, each) for each in self._known()]  # all of them, whichever it is
        return any(same)

    def _known(self) -> Sequence[bytes]:
        with self._lock:
            now_s = time.monotonic()
            if now_s >= self._next_look_s:
                self._next_look_s = now_s + LOOK_S
                self._look_again(now_s)
            return self._digests

    def _look_again(self, now_s: float) -> None:
        try:
            if _stamp(os.stat(self._path)) == self._stamp:  # noqa: PTH116 - what fstat gives too
                return
            self._stamp, self._digests = self._read()
        except (OSError, GpuwardenError) as error:
            if now_s >= self._next_word_s:
                self._next_word_s = now_s + SAY_S
                log.warning("secrets kept as they were", because=_because(error), file=str(self._path))
        else:
            self._next_word_s = 0.0
            log.info("secrets read anew", file=str(self._path), count=len(self._digests))

    def _read(self) -> tuple[_Stamp, Sequence[bytes]]:
        """What it holds, and its state before: what is changed meanwhile is read again."""
        try:
            with self._path.open("rb") as file:
                stamp = _stamp(os.fstat(file.fileno()))
                found = file.read(FILE_MAX_BYTES + 1)
            lines = [line.strip() for line in found.decode().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise GpuwardenError(
                f"{self._what} {self._path} cannot be read ({_because(error)}): make one with `openssl rand -hex 24`, "
                "mode 0600"
            ) from None
        secrets = [(number, line) for number, line in enumerate(lines, start=1) if line]
        if not secrets:
            raise GpuwardenError(f"{self._what} {self._path} is empty; one secret a line is wanted")
        if len(found) > FILE_MAX_BYTES or len(secrets) > SECRETS_MAX:
            raise GpuwardenError(
                f"{self._what} {self._path} has {len(found)} bytes or more and {len(secrets)} lines; "
                f"{FILE_MAX_BYTES} and {SECRETS_MAX} are accepted"
            )
        for number, line in secrets:
            wrong = self._wrong(line)
            if wrong is not None:
                raise GpuwardenError(f"line {number} of {self._what} {self._path} {wrong}")
        return stamp, [hashlib.sha256(line.encode()).digest() for _, line in secrets]


def _token(line: str) -> str | None:
    """What is wrong with it; never the line itself."""
    if not line.isascii() or any(character.isspace() for character in line):
        return "is no token: ASCII without spaces is wanted"
    return _short(line)


def _user_and_password(line: str) -> str | None:
    user, colon, password = line.partition(":")
    if not user or not colon:
        return "is not user:password"
    return _short(password)


def _short(secret: str) -> str | None:
    return f"has {len(secret)} characters; {SECRET_MIN} or more are wanted" if len(secret) < SECRET_MIN else None


def _stamp(found: os.stat_result) -> _Stamp:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _because(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
