"""The notify file: addresses and the mail server. TOML, all optional. It may contain passwords: use mode 0600.

    mail_server = "mailtos://USER:PASSWORD@smtp.example.com?from=gpuwarden@example.com"
    administrators = ["ops@example.com", "slack://TOKEN_A/TOKEN_B/TOKEN_C"]

    [submitters]                          # the address of a job without its own, by account
    alice = "alice@example.org"
    "*" = "{user}@example.com"            # every other account

`serve` reloads the file when it changes. If the file is invalid, `serve` logs an error and keeps the old content.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gpuwarden.errors import GpuwardenError
from gpuwarden.notify.address import AddressError, by_mail_server, check, is_mail

FILE_MAX_BYTES: Final = 256 * 1024
"""Maximum size of the file."""

OTHERS: Final = "*"
USER: Final = "{user}"


class NotifySettings(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)

    mail_server: str | None = None
    administrators: list[str] = Field(default_factory=list)
    submitters: dict[str, str] = Field(default_factory=dict)

    @field_validator("mail_server")
    @classmethod
    def _check_mail_server(cls, found: str | None) -> str | None:
        if found is not None:
            if not found.startswith(("mailto://", "mailtos://")):
                raise ValueError("use mailtos://USER:PASSWORD@HOST?from=ADDRESS")
            check(by_mail_server("someone@example.com", found))
        return found

    @field_validator("administrators")
    @classmethod
    def _check_administrators(cls, found: list[str]) -> list[str]:
        for number, each in enumerate(found, start=1):
            try:
                check(each)
            except AddressError as error:
                raise ValueError(f"number {number}: {error}") from None
        return found

    @field_validator("submitters")
    @classmethod
    def _check_submitters(cls, found: dict[str, str]) -> dict[str, str]:
        for account, each in found.items():
            try:
                check(each.replace(USER, "user") if account == OTHERS else each)
            except AddressError as error:
                raise ValueError(f"{account!r}: {error}") from None
        return found

    @model_validator(mode="after")
    def _check_mails(self) -> "NotifySettings":
        if self.mail_server is None and any(map(is_mail, (*self.administrators, *self.submitters.values()))):
            raise ValueError("a mail address needs mail_server = 'mailtos://USER:PASSWORD@HOST?from=ADDRESS'")
        return self

    def of_submitter(self, submitted_by: str | None) -> str | None:
        """The address of the account `user@host` that submitted a job."""
        if submitted_by is None:
            return None
        user = submitted_by.partition("@")[0]
        for account in (submitted_by, user):
            if account in self.submitters and account != OTHERS:
                return self.submitters[account]
        address = self.submitters.get(OTHERS, "").replace(USER, user)
        try:
            return check(address) if address else None
        except AddressError:
            return None

    def url(self, address: str) -> str:
        """The Apprise URL of an address.

        Raises:
            AddressError: it is a mail address, and the file has no mail server.
        """
        if not is_mail(address):
            return address
        if self.mail_server is None:
            raise AddressError("a mail address needs mail_server in the notify file of `gpuwarden remediator serve`")
        return by_mail_server(address, self.mail_server)


def read(path: Path) -> NotifySettings:
    """Read the file.

    Raises:
        GpuwardenError: it cannot be read or is invalid. The message repeats no address.
    """
    try:
        with path.open("rb") as file:
            found = file.read(FILE_MAX_BYTES + 1)
        if len(found) > FILE_MAX_BYTES:
            raise GpuwardenError(f"notify file {path} is larger than {FILE_MAX_BYTES} bytes")
        return NotifySettings.model_validate(tomllib.loads(found.decode()))
    except ValidationError as error:
        raise GpuwardenError(f"invalid notify file {path}: {'; '.join(_complaints(error))}") from None
    except tomllib.TOMLDecodeError as error:
        at = str(error).rpartition("(")[2].rstrip(")")  # the rest may repeat a password
        raise GpuwardenError(f"notify file {path} is not TOML: {at}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise GpuwardenError(f"notify file {path} cannot be read: {getattr(error, 'strerror', 'not UTF-8')}") from None


def _complaints(error: ValidationError) -> Iterator[str]:
    for each in error.errors(include_url=False, include_input=False):
        where: list[Any] = list(each["loc"])
        known = ", ".join(NotifySettings.model_fields)
        if each["type"] == "extra_forbidden":
            yield f"unknown name {ascii(where[0])[:80]}: use {known}"
        else:
            about = f"{where[0]}: " if where else ""
            yield f"{about}{each['msg'].removeprefix('Value error, ')}"
