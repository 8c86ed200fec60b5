"""Who may read the exporter's pages: TLS and passwords from a web configuration file, as Prometheus' exporters take it.

    tls_server_config:
      cert_file, key_file       certificate with those between it and its authority, and its key, in PEM
      client_ca_file            authorities one of which must have signed a caller's certificate, in PEM
      client_auth_type          NoClientCert (default), VerifyClientCertIfGiven or RequireAndVerifyClientCert
      min_version, max_version  TLS12 (default of the first) or TLS13 (of the second)
    basic_auth_users:
      NAME: HASH                a bcrypt hash, as `htpasswd -nBC 10 ""` prints it after the colon

Paths are relative to the file's own folder. The format is exporter-toolkit's (docs/web-configuration.md there). What it
has beyond this is refused by name and never passed over: a protection that somebody wrote down and does not have is
worse than none.

The file and those it names are looked at with every connection and request, and read where they changed. What cannot be
used then leaves in force what was, and is said once.
"""

import base64
import binascii
import hashlib
import re
import secrets
import socket
import ssl
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import bcrypt
import structlog
import yaml

from gpuwarden.errors import GpuwardenError

log: Final = structlog.get_logger("exporter")

FILE_MAX_BYTES: Final = 64 * 1024
"""The largest web configuration file, bytes."""

USERS_MAX: Final = 100

COST_MAX: Final = 16
"""The greatest bcrypt cost: each step doubles the work, and 16 takes some seconds."""

KNOWN_MAX: Final = 100
"""Passwords remembered as right, so that a scrape costs no bcrypt."""

CHECKED_MAX: Final = 8
"""Callers whose password is checked or waits for it; one more is refused at once, so that those who guess fill no
connections that others want."""

WAIT_S: Final = 5.0
"""How long a caller waits for the passwords of others to be checked, seconds: one is checked at a time, so that whoever
guesses has no more than one processor."""

_READS_MAX: Final = 5
"""How often a file is read anew because it names other files than it did a moment ago."""

_HASH: Final = re.compile(r"\$2[aby]\$([0-9]{2})\$[./A-Za-z0-9]{53}")

_VERSIONS: Final = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}

_CLIENTS: Final = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}

_TLS_KEYS: Final = ("cert_file", "key_file", "client_ca_file", "client_auth_type", "min_version", "max_version")

_Stamp = tuple[int, int, int]


class WebConfigError(GpuwardenError):
    """A web configuration file cannot be used, and why."""


class BusyError(GpuwardenError):
    """As many passwords are checked as may be, and this one was not looked at."""

    def __init__(self) -> None:
        super().__init__("too many passwords are being checked: ask again")


class _RepeatedError(GpuwardenError):
    """A key is written twice in one mapping, of which YAML's readers keep the last."""


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """What a file asks for. `tls` is `None` for plain HTTP; without users everybody is let in."""

    tls: ssl.SSLContext | None
    users: Mapping[str, bytes]
    files: tuple[Path, ...]


class Doorkeeper:
    """Applies one web configuration file, `None` for none: plain HTTP for everybody. Safe to ask from several threads.

    Raises:
        WebConfigError: the file cannot be used.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._rules = _Rules(tls=None, users={}, files=())
        self._stamps: Mapping[Path, _Stamp | None] = {}
        self._refused = ""
        self._changing = threading.Lock()
        self._checking = threading.Lock()
        self._checked = threading.Semaphore(CHECKED_MAX)
        self._known: dict[bytes, None] = {}
        self._key = secrets.token_bytes(32)
        if path is not None:
            self._rules, self._stamps = _read(path)

    def describe(self) -> str:
        """In a few words, for a log line."""
        rules = self._rules
        return f"{'https' if rules.tls else 'http'}, {len(rules.users)} users"

    def look(self) -> str:
        """Read the file where it changed; why what it holds now is not in force, and nothing where it is."""
        path = self._path
        if path is None:
            return ""
        with self._changing:
            if _stamps((path, *self._rules.files)) == self._stamps:
                return self._refused
            try:
                self._rules, self._stamps = _read(path, self._rules.files)
            except WebConfigError as error:
                if str(error) != self._refused:
                    log.warning("the web configuration is not taken; the one before stays", because=str(error))
                self._refused = str(error)
                self._stamps = {}  # read again at the next look: a file that it names may be on its way
                return self._refused
            self._refused = ""
            log.info("the web configuration is read anew", file=str(path), now=self.describe())
            return ""

    def secure(self, connection: socket.socket) -> socket.socket:
        """The connection to talk over: the same, or TLS on it once the caller has shaken hands.

        Raises:
            OSError: the caller does not, or may not.
        """
        self.look()
        context = self._rules.tls
        return connection if context is None else context.wrap_socket(connection, server_side=True)

    def admits(self, authorization: str) -> bool:
        """Whether this value of the header Authorization lets a caller in.

        Raises:
            BusyError: it cannot be told now.
        """
        self.look()
        users = self._rules.users
        if not users:
            return True
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "basic":
            return False
        try:
            user, colon, password = base64.b64decode(given.strip(), validate=True).partition(b":")
            name = user.decode()
        except (binascii.Error, ValueError):  # the second: it is not ASCII, or what it encodes is not UTF-8
            return False
        # A name that is none costs as much as one that is, so that the time tells nobody which names there are.
        hashed = users.get(name, next(iter(users.values())))
        return self._matches(password, hashed) and bool(colon) and name in users

    def _matches(self, password: bytes, hashed: bytes) -> bool:
        known = hashlib.blake2b(hashed + password, key=self._key).digest()
        if known in self._known:
            return True
        if not self._checked.acquire(blocking=False):
            raise BusyError
        try:
            if not self._checks(password, hashed):
                return False
        finally:
            self._checked.release()
        if len(self._known) >= KNOWN_MAX:
            self._known = {}
        self._known[known] = None
        return True

    def _checks(self, password: bytes, hashed: bytes) -> bool:
        if not self._checking.acquire(timeout=WAIT_S):
            raise BusyError
        try:
            return bcrypt.checkpw(password, hashed)
        except ValueError:  # over 72 bytes, which bcrypt would pass over
            return False
        finally:
            self._checking.release()


def _stamps(paths: tuple[Path, ...]) -> dict[Path, _Stamp | None]:
    return {path: _stamp(path) for path in paths}


def _stamp(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_ino, found.st_size)


def _read(path: Path, files: tuple[Path, ...] = ()) -> tuple[_Rules, Mapping[Path, _Stamp | None]]:
    """What the file asks for, and the stamps that it and the files it names had right before they were read."""
    for _ in range(_READS_MAX):
        stamps = _stamps((path, *files))
        rules = _parse(path, _yaml(path))
        if rules.files == files:
            return rules, stamps
        files = rules.files
    raise WebConfigError(f"the web configuration file {path} changes faster than it can be read")


def _yaml(path: Path) -> Any:
    what = f"the web configuration file {path}"
    text = _bytes(what, path)
    if len(text) > FILE_MAX_BYTES:
        raise WebConfigError(f"{what} is over {FILE_MAX_BYTES} bytes: is it the right file?")
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - it is a SafeLoader
    except _RepeatedError as error:
        raise WebConfigError(f"{what}: {error}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        # Where a value is not of the kind that its tag says, PyYAML raises whatever it trips over.
        # Not the error's own text: it repeats a piece of the file.
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise WebConfigError(f"{what} is no YAML{where}") from None


class _Loader(yaml.SafeLoader):
    """One that takes a key once: of two sections the first would be a protection that somebody wrote down in vain."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        if isinstance(node, yaml.MappingNode):  # if not, the one below says so
            self.flatten_mapping(node)
            seen: set[Any] = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if not isinstance(key, Hashable):
                    break  # the one below says so
                if key in seen:
                    where = f"once more in line {key_node.start_mark.line + 1}"
                    raise _RepeatedError(f"{ascii(key)[:40]} is written twice, {where}: which one is meant?")
                seen.add(key)
        return super().construct_mapping(node, deep)


def _parse(path: Path, text: Any) -> _Rules:
    what = f"the web configuration file {path}"
    found = _mapping(what, text, ("tls_server_config", "basic_auth_users"))
    if not found:
        raise WebConfigError(f"{what} asks for nothing: wanted is tls_server_config, basic_auth_users or both")
    users = _users(what, found["basic_auth_users"]) if "basic_auth_users" in found else {}
    if "tls_server_config" not in found:
        return _Rules(tls=None, users=users, files=())
    tls = _mapping(f"tls_server_config in {what}", found["tls_server_config"], _TLS_KEYS)
    context, files = _context(what, tls, path.parent)
    return _Rules(tls=context, users=users, files=files)


def _mapping(what: str, found: Any, wanted: tuple[str, ...]) -> dict[str, Any]:
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise WebConfigError(f"{what} is no mapping: wanted are {', '.join(wanted)}")
    for key in found:
        if key not in wanted:
            raise WebConfigError(f"{what}: {ascii(key)[:40]} is not done here; done are {', '.join(wanted)}")
    return found


def _users(what: str, found: Any) -> dict[str, bytes]:
    if not isinstance(found, dict) or not 1 <= len(found) <= USERS_MAX:
        raise WebConfigError(f"basic_auth_users in {what} wants 1 to {USERS_MAX} lines `NAME: HASH`")
    users: dict[str, bytes] = {}
    for number, (name, hashed) in enumerate(found.items(), start=1):
        which = f"user {number} of basic_auth_users in {what}"  # the hash is not repeated
        if not isinstance(name, str) or not name or ":" in name:
            raise WebConfigError(f"{which} has no name: text without a colon is wanted (put numbers in quotes)")
        form = _HASH.fullmatch(hashed) if isinstance(hashed, str) else None
        if form is None:
            raise WebConfigError(f'{which} has no bcrypt hash, as `htpasswd -nBC 10 ""` prints it after the colon')
        if not 4 <= int(form.group(1)) <= COST_MAX:
            raise WebConfigError(f"{which} has a hash of cost {form.group(1)}: 4 to {COST_MAX} are taken, 10 is usual")
        users[name] = form.group().encode()
    return users


def _context(what: str, tls: Mapping[str, Any], folder: Path) -> tuple[ssl.SSLContext, tuple[Path, ...]]:
    """The TLS that is asked for, and the files it comes from."""
    for key, value in tls.items():
        if not isinstance(value, str) or not value or not value.isprintable():
            raise WebConfigError(f"{key} in {what} wants text, of characters that can be printed")
    if "cert_file" not in tls or "key_file" not in tls:
        raise WebConfigError(f"tls_server_config in {what} wants cert_file and key_file")
    certificate, key = folder / tls["cert_file"], folder / tls["key_file"]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _choice(what, tls, "min_version", "TLS12", _VERSIONS)
    context.maximum_version = _choice(what, tls, "max_version", "TLS13", _VERSIONS)
    if context.minimum_version > context.maximum_version:
        raise WebConfigError(f"min_version in {what} is above max_version: no caller can shake hands")

    def encrypted() -> NoReturn:
        raise WebConfigError(f"the key {key} is encrypted: write it without a password (`openssl pkey`), mode 0600")

    for each in (certificate, key):
        _bytes(f"{each}, named in {what},", each)
    try:
        context.load_cert_chain(certificate, key, encrypted)
    except OSError as error:  # also that one of them is gone by now
        because = getattr(error, "reason", None) or error.strerror
        raise WebConfigError(
            f"{certificate} and {key} cannot be used ({because}): wanted are a certificate and its own key, in PEM"
        ) from None
    clients = _choice(what, tls, "client_auth_type", "NoClientCert", _CLIENTS)
    if "client_ca_file" not in tls:
        if clients is not ssl.CERT_NONE:
            raise WebConfigError(
                f"client_auth_type in {what} wants client_ca_file: who signs the callers' certificates"
            )
        return context, (certificate, key)
    if clients is ssl.CERT_NONE:
        raise WebConfigError(f"client_ca_file in {what} wants client_auth_type: RequireAndVerifyClientCert")
    authorities = folder / tls["client_ca_file"]
    _bytes(f"{authorities}, named in {what},", authorities)
    try:
        context.load_verify_locations(authorities)
    except OSError:
        raise WebConfigError(f"{authorities}, named in {what}, holds no certificate in PEM") from None
    context.verify_mode = clients
    return context, (certificate, key, authorities)


def _choice(what: str, tls: Mapping[str, Any], key: str, default: str, among: Mapping[str, Any]) -> Any:
    found = tls.get(key, default)
    if found not in among:
        raise WebConfigError(f"{key} in {what} is {ascii(found)[:40]}: done here are {', '.join(among)}")
    return among[found]


def _bytes(what: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(FILE_MAX_BYTES + 1)
    except OSError as error:
        raise WebConfigError(
            f"{what} cannot be read ({error.strerror}): is its path right, and may this account read it?"
        ) from None
