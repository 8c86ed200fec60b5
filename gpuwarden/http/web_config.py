"""TLS, client certificates, passwords and tokens from a Prometheus web configuration file.

    tls_server_config:
      cert_file, key_file       certificate chain of the server and its key, in PEM
      client_ca_file            authorities that sign the callers' certificates, in PEM
      client_auth_type          NoClientCert (default), VerifyClientCertIfGiven or RequireAndVerifyClientCert
      min_version, max_version  TLS12 (default of the first) or TLS13 (of the second)
    basic_auth_users:
      NAME: HASH                a bcrypt hash, from `htpasswd -nBC 10 ""`
    bearer_token_file           file with one bearer token per line

The format is exporter-toolkit's, plus `bearer_token_file`. Paths are relative to the file. An unknown key is an error.

Changed files are reloaded at the next connection or request. An invalid configuration is logged once, and the old one
stays in use.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import re
import secrets
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn, Self

import structlog
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from gpuwarden.errors import GpuwardenError
from gpuwarden.files import ReloadingFile

log: Final = structlog.get_logger("gpuwarden")

FILE_MAX_BYTES: Final = 64 * 1024
"""Largest file, bytes."""

USERS_MAX: Final = 100

TOKENS_MAX: Final = 100

TOKEN_MIN: Final = 16
"""Shortest bearer token, characters."""

COST_MAX: Final = 16
"""Highest bcrypt cost: each step doubles the work, and 16 takes seconds."""

KNOWN_MAX: Final = 100
"""Correct passwords that are cached, so that a scrape needs no bcrypt."""

CHECKED_MAX: Final = 8
"""Password checks that run or wait. Further ones are refused."""

WAIT_S: Final = 5.0
"""Longest wait for a password check, seconds. One runs at a time."""

_HASH: Final = re.compile(r"\$2[aby]\$([0-9]{2})\$[./A-Za-z0-9]{53}")

_VERSIONS: Final = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}

_CLIENTS: Final = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}


class WebConfigError(GpuwardenError):
    """A web configuration file is invalid."""


class BusyError(GpuwardenError):
    """Too many password checks."""

    def __init__(self) -> None:
        super().__init__("too many passwords are being checked: try again")


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("wants text of printable characters")
    return text


def _users(found: Any) -> dict[str, bytes]:
    """The hash of each user. Messages contain no name and no hash, since a file may swap the two."""
    if not isinstance(found, dict) or not 1 <= len(found) <= USERS_MAX:
        raise ValueError(f"wants 1 to {USERS_MAX} lines `NAME: HASH`")
    users: dict[str, bytes] = {}
    for number, (name, hashed) in enumerate(found.items(), start=1):
        if not isinstance(name, str) or not name or ":" in name:
            raise ValueError(f"user {number} has no name: use text without a colon, numbers in quotes")
        form = _HASH.fullmatch(hashed) if isinstance(hashed, str) else None
        if form is None:
            raise ValueError(f'user {number} has no bcrypt hash, as `htpasswd -nBC 10 ""` prints it after the colon')
        if not 4 <= int(form.group(1)) <= COST_MAX:
            raise ValueError(
                f"user {number} has a hash of cost {form.group(1)}: 4 to {COST_MAX} are taken, 10 is usual"
            )
        users[name] = form.group().encode()
    return users


_FileName = Annotated[str, Field(min_length=1), AfterValidator(_printable)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    @model_validator(mode="after")
    def _nothing_is_empty(self) -> Self:
        """Refuse a key without a value, which protects nothing."""
        for name in self.model_fields_set:
            if getattr(self, name) is None:
                raise ValueError(f"{name} is empty")
        return self


class _Tls(_Section):
    cert_file: _FileName
    key_file: _FileName
    client_ca_file: _FileName | None = None
    client_auth_type: Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"] = "NoClientCert"
    min_version: Literal["TLS12", "TLS13"] = "TLS12"
    max_version: Literal["TLS12", "TLS13"] = "TLS13"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.min_version > self.max_version:
            raise ValueError("min_version is above max_version: no caller can connect")
        if self.client_ca_file is None and self.client_auth_type != "NoClientCert":
            raise ValueError("client_auth_type wants client_ca_file: who signs the callers' certificates")
        if self.client_ca_file is not None and self.client_auth_type == "NoClientCert":
            raise ValueError("client_ca_file wants client_auth_type: RequireAndVerifyClientCert")
        return self


class _Document(_Section):
    tls_server_config: _Tls | None = None
    basic_auth_users: Annotated[dict[str, bytes], PlainValidator(_users)] | None = None
    bearer_token_file: _FileName | None = None

    @model_validator(mode="after")
    def _protects_something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError(f"it is empty: add one of {', '.join(_Document.model_fields)}")
        return self


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """The content of a file. `tls` is `None` for plain HTTP."""

    tls: ssl.SSLContext | None = None
    users: Mapping[str, bytes] = field(default_factory=dict)
    tokens: tuple[bytes, ...] = ()
    files: tuple[Path, ...] = ()


class WebConfig:
    """Applies one web configuration file. Only `describe` is thread-safe.

    Args:
        path: the file; `None` means plain HTTP for every caller.
        credentials_required: refuse a file without users and tokens.

    Raises:
        WebConfigError: the file is invalid.
    """

    def __init__(self, path: Path | None, *, credentials_required: bool = False) -> None:
        self._file: ReloadingFile[_Rules] | None = None
        if path is not None:
            read = partial(_read, path, credentials_required=credentials_required)
            self._file = ReloadingFile([path], read, named=lambda rules: rules.files)
        self._refused = ""
        self._checking = asyncio.Lock()
        self._checked = 0
        self._known: dict[bytes, None] = {}
        self._key = secrets.token_bytes(32)

    def describe(self) -> str:
        """A short text for logs."""
        rules = self._rules
        return f"{'https' if rules.tls else 'http'}, {len(rules.users)} users, {len(rules.tokens)} tokens"

    def look(self) -> str:
        """Reload a changed file. Returns why its content is not in use, or nothing."""
        if self._file is None:
            return ""
        try:
            changed = self._file.reload()
        except GpuwardenError as error:
            if str(error) != self._refused:
                log.warning("web configuration invalid, old one in use", reason=str(error))
            self._refused = str(error)
            return self._refused
        self._refused = ""
        if changed:
            log.info("web configuration read", now=self.describe())
        return ""

    def tls(self) -> ssl.SSLContext | None:
        """TLS for the next connection; `None` for plain HTTP."""
        self.look()
        return self._rules.tls

    @property
    def challenge(self) -> str:
        """The value of WWW-Authenticate."""
        basic, bearer = 'Basic realm="gpuwarden"', "Bearer"
        return ", ".join([bearer] * bool(self._rules.tokens) + [basic] * bool(self._rules.users))

    async def refusal(self, authorization: str) -> str:
        """Why this Authorization header is refused; empty if it is valid.

        Raises:
            BusyError: too many password checks.
        """
        if await self._admits(authorization):
            return ""
        return (
            "this token or password is wrong" if authorization else "no Authorization header: send a token or password"
        )

    async def _admits(self, authorization: str) -> bool:
        self.look()
        rules = self._rules
        if not rules.users and not rules.tokens:
            return True
        scheme, _, given = authorization.partition(" ")
        match scheme.lower():
            case "bearer":
                digest = hashlib.sha256(given.strip().encode()).digest()
                same = [
                    hmac.compare_digest(digest, each) for each in rules.tokens
                ]  # the time must not depend on the token
                return any(same)
            case "basic" if rules.users:
                return await self._has_password(rules.users, given.strip())
        return False

    async def _has_password(self, users: Mapping[str, bytes], given: str) -> bool:
        try:
            user, colon, password = base64.b64decode(given, validate=True).partition(b":")
            name = user.decode()
        except (binascii.Error, ValueError):  # ValueError: not ASCII or not UTF-8
            return False
        # Hash for unknown users too, so that response time does not reveal user names.
        hashed = users.get(name, next(iter(users.values())))
        return await self._matches(password, hashed) and bool(colon) and name in users

    async def _matches(self, password: bytes, hashed: bytes) -> bool:
        known = hashlib.blake2b(hashed + password, key=self._key).digest()
        if known in self._known:
            return True
        if self._checked >= CHECKED_MAX:
            raise BusyError
        self._checked += 1
        try:
            async with asyncio.timeout(WAIT_S):
                await self._checking.acquire()
            try:
                right = await asyncio.to_thread(_is_password, password, hashed)
            finally:
                self._checking.release()
        except TimeoutError:
            raise BusyError from None
        finally:
            self._checked -= 1
        if right:
            if len(self._known) >= KNOWN_MAX:
                self._known = {}
            self._known[known] = None
        return right

    @property
    def _rules(self) -> _Rules:
        return _Rules() if self._file is None else self._file.value


def _is_password(password: bytes, hashed: bytes) -> bool:
    import bcrypt  # noqa: PLC0415 - as strict_yaml

    try:
        return bcrypt.checkpw(password, hashed)
    except ValueError:  # over 72 bytes: bcrypt would ignore the rest
        return False


def _read(path: Path, *, credentials_required: bool) -> _Rules:
    what = f"the web configuration file {path}"
    document = _document(what, path)
    context, files = None, list[Path]()
    if document.tls_server_config is not None:
        context, files = _context(what, document.tls_server_config, path.parent)
    tokens: tuple[bytes, ...] = ()
    if document.bearer_token_file is not None:
        files.append(path.parent / document.bearer_token_file)
        tokens = _tokens(files[-1])
    rules = _Rules(tls=context, users=document.basic_auth_users or {}, tokens=tokens, files=tuple(files))
    if credentials_required and not rules.users and not rules.tokens:
        raise WebConfigError(f"{what} lets every caller in: add bearer_token_file or basic_auth_users")
    return rules


def _document(what: str, path: Path) -> _Document:
    found = _yaml(what, path)
    if not isinstance(found, dict | None):
        raise WebConfigError(f"{what} must be a mapping of {', '.join(_Document.model_fields)}")
    try:
        return _Document.model_validate(found or {})
    except ValidationError as error:
        raise WebConfigError(f"{what}: {'; '.join(map(_complaint, error.errors(include_input=False)))}") from None


def _complaint(error: Any) -> str:
    """The key and the problem, never the value, which may be secret."""
    where = ".".join(ascii(each).strip("'")[:40] for each in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{where} is not supported"
    says = error["msg"].removeprefix("Value error, ")
    return f"{where}: {says}" if where else says


def _yaml(what: str, path: Path) -> Any:
    from gpuwarden.http import strict_yaml  # noqa: PLC0415 - a program without such a file saves 1 MiB

    try:
        return strict_yaml.parse(_bytes(what, path))
    except strict_yaml.RepeatedError as error:
        raise WebConfigError(f"{what}: {error}") from None
    except strict_yaml.NotYamlError as error:
        raise WebConfigError(f"{what} is {error}") from None


def _context(what: str, tls: _Tls, folder: Path) -> tuple[ssl.SSLContext, list[Path]]:
    """The TLS context and its files."""
    certificate, key = folder / tls.cert_file, folder / tls.key_file
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.maximum_version = _VERSIONS[tls.min_version], _VERSIONS[tls.max_version]

    def encrypted() -> NoReturn:
        raise WebConfigError(f"the key {key} is encrypted: write it without a password (`openssl pkey`), mode 0600")

    for each in (certificate, key):
        _bytes(f"{each}, named in {what},", each)
    try:
        context.load_cert_chain(certificate, key, encrypted)
    except OSError as error:  # also if one is gone by now
        reason = getattr(error, "reason", None) or error.strerror
        raise WebConfigError(
            f"{certificate} and {key} cannot be used ({reason}): give a certificate and its key, in PEM"
        ) from None
    if tls.client_ca_file is None:
        return context, [certificate, key]
    authorities = folder / tls.client_ca_file
    _bytes(f"{authorities}, named in {what},", authorities)
    try:
        context.load_verify_locations(authorities)
    except OSError:
        raise WebConfigError(f"{authorities}, named in {what}, holds no certificate in PEM") from None
    context.verify_mode = _CLIENTS[tls.client_auth_type]
    return context, [certificate, key, authorities]


def _tokens(path: Path) -> tuple[bytes, ...]:
    """Digests of the tokens: comparing digests does not reveal how much of a token matches."""
    what = f"the bearer token file {path}"
    try:
        lines = [line.strip() for line in _bytes(what, path).decode().splitlines()]
    except UnicodeDecodeError:
        raise WebConfigError(f"{what} is not UTF-8 text") from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line]
    if not 1 <= len(numbered) <= TOKENS_MAX:
        raise WebConfigError(
            f"{what} has {len(numbered)} lines: give 1 to {TOKENS_MAX} tokens, one a line "
            "(`openssl rand -hex 24` makes one)"
        )
    for number, token in numbered:
        if not token.isascii() or any(character.isspace() for character in token):
            raise WebConfigError(f"line {number} of {what} is not a token: use ASCII without spaces")
        if len(token) < TOKEN_MIN:
            raise WebConfigError(f"line {number} of {what} has {len(token)} characters: use {TOKEN_MIN} or more")
    return tuple(hashlib.sha256(token.encode()).digest() for _, token in numbered)


def _bytes(what: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            found = file.read(FILE_MAX_BYTES + 1)
    except OSError as error:
        raise WebConfigError(f"{what} cannot be read ({error.strerror}): check its path and permissions") from None
    if len(found) > FILE_MAX_BYTES:
        raise WebConfigError(f"{what} is over {FILE_MAX_BYTES} bytes: check its path")
    return found
