"""Common parts of all settings: errors, help, and the reference pages."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource

from gpuwarden.docs_pages import marked
from gpuwarden.format import Help, Parser, show
from gpuwarden.kube import pods

DEFAULT_FACTORY_SHOWN = "`/run/gpuwarden`"
"""How help shows a default that depends on the environment."""


METAVARS: Final[Mapping[str, str]] = {
    "Path": "PATH", "str": "TEXT", "int": "N", "float": "N",
    "tuple[str,...]": "TEXT,...", "tuple[Path,...]": "PATH,...", "tuple[int,...]": "N,...",
}  # fmt: skip
"""Value names in `--help` by Python type."""


class _Help(Help):
    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        shown = super()._metavar_formatter(action, default_metavar)
        return lambda size: tuple(METAVARS.get(each, each) for each in shown(size))

    def _expand_help(self, action: argparse.Action) -> str:
        text = _FACTORY.sub(f"(default: {DEFAULT_FACTORY_SHOWN.strip('`')})", super()._expand_help(action))
        return _SEVERAL.sub(r"(default: \1)", text)


_FACTORY: Final = re.compile(r"\(default factory: \w+\)$")
_SEVERAL: Final = re.compile(r"\(default: \(([^()]+)\)\)$")
"""A default with several values."""

T = TypeVar("T", bound=BaseSettings)


def read_settings(settings: type[T], argv: list[str]) -> T:
    """Settings from options and the environment.

    Raises:
        ValidationError: a value is invalid: see `complaints`.
    """
    _leave_service_link(settings)
    parser = Parser(
        prog=settings.model_config.get("cli_prog_name"), description=settings.__doc__, formatter_class=_Help
    )
    source: CliSettingsSource[Any] = CliSettingsSource(settings, root_parser=parser)
    return CliApp.run(settings, cli_args=argv, cli_settings_source=source)


def _leave_service_link(settings: type[BaseSettings]) -> None:
    """Ignore the variable that Kubernetes sets for a Service named like the program.

    For a Service `gpuwarden-exporter` it is GPUWARDEN_EXPORTER_PORT. Reference:
    https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
    """
    name = f"{settings.model_config.get('env_prefix', '')}PORT"
    if _SERVICE_LINK.fullmatch(os.environ.get(name, "")):
        del os.environ[name]


_SERVICE_LINK: Final = re.compile(r"(tcp|udp|sctp)://\S+:[0-9]+")


_EXPECTED: Final[Mapping[str, str]] = {
    "bool_parsing": "use true or false",
    "float_parsing": "use a number",
    "int_parsing": "use a whole number",
    "int_from_float": "use a whole number",
    "finite_number": "use a finite number",
    "greater_than": "use more than {gt:g}",
    "greater_than_equal": "use {ge:g} or more",
    "less_than": "use less than {lt:g}",
    "less_than_equal": "use {le:g} or less",
    "literal_error": "use {expected}",
    "enum": "use {expected}",
}
"""What a setting expects, by pydantic's type of error."""


def complaints(error: ValidationError, settings: type[BaseSettings]) -> Iterator[str]:
    """One line per invalid setting: option, variable and problem."""
    for found in error.errors():
        expected = _EXPECTED.get(found["type"])
        # "Value error, " is pydantic's prefix for our own messages.
        says = expected.format_map(found.get("ctx", {})) if expected else found["msg"].removeprefix("Value error, ")
        if not found["loc"]:
            yield says
            continue
        name = str(found["loc"][0])
        option = f"--{name.replace('_', '-')} (or {settings.model_config.get('env_prefix', '')}{name.upper()})"
        if found["type"] == "missing":
            yield f"missing {option}: {settings.model_fields[name].description}"
        else:
            yield f"{found['input']!r} is invalid for {option}: {says}"


def unknown_names(environment: Mapping[str, str], known: Collection[str], *, prefix: str = "") -> list[str]:
    """Variables with this prefix that name no known setting.

    Kubernetes sets some in pods with a Service of the program's name; these are left out.
    """
    return sorted(
        name
        for name, value in environment.items()
        if name.upper().startswith(prefix) and name.upper() not in known
        if not _OF_A_SERVICE.search(name) and not value.startswith("tcp://")
    )


_OF_A_SERVICE: Final = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")


def split(found: Any) -> Any:
    """Split a setting at commas."""
    return [each.strip() for each in found.split(",") if each.strip()] if isinstance(found, str) else found


def _listed(found: Any) -> str:
    """A default as the user writes it."""
    return ", ".join(map(str, found)) if isinstance(found, tuple) else str(found)


def services(found: Any) -> Any:
    """Check patterns (fnmatch) of service names.

    Raises:
        ValueError: a pattern matches no service name, or all of them.
    """
    patterns = split(found)
    for pattern in patterns:
        if not _SERVICES.fullmatch(pattern):
            raise ValueError(f"{pattern!r} names no services: wanted are names as 'gpu-worker@*.service', not '*'")
    return patterns


def namespaces(found: Any) -> Any:
    """Check names of Kubernetes namespaces.

    Raises:
        ValueError: a name is invalid.
    """
    names = split(found)
    for name in names:
        if not pods.NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a namespace; expected names as 'tenants', not '*'")
    return names


def engine(found: str, *, words: Collection[str]) -> str:
    """Check a container engine's address, or one of these words.

    Raises:
        ValueError: the address is invalid.
    """
    if found in words:
        return found
    try:
        parts = urlsplit(found)
        if parts.scheme == "unix":
            listens = found.startswith("unix://") and bool(parts.path.strip("/")) and not parts.netloc
        else:  # Docker's client refuses others
            listens = bool(parts.port) and not (parts.query or parts.fragment or parts.username)
    except ValueError:  # invalid port or IPv6 address
        listens = False
    if listens and parts.scheme in ("unix", "tcp", "http", "https"):
        return found
    wanted = f"unix://{found}" if found.startswith("/") else "unix:///PATH of its socket, tcp://HOST:PORT"
    raise ValueError(f"wanted is {', or '.join((wanted, *map(repr, words)))}")


_SERVICES: Final = re.compile(r"[A-Za-z0-9][^/\s]*\.service")


def tables(
    settings: type[BaseSettings], headings: Mapping[str, str], *, level: str = "##", but: Collection[str] = ()
) -> Iterator[str]:
    """The settings as Markdown tables.

    Args:
        settings: the class.
        headings: the first setting under each heading, and the heading.
        level: of the headings.
        but: settings to leave out.
    """
    left, prefix = set(headings), settings.model_config.get("env_prefix", "")
    for name, field in settings.model_fields.items():
        if name in but:
            continue
        if name in headings:
            left.remove(name)
            yield from ("", f"{level} {headings[name]}", "")
            yield from ("| option | environment variable | default | meaning |", "|---|---|---|---|")
        meaning = marked(field.description or "")
        if field.is_required():
            default = "required"
        elif field.default_factory:
            default = DEFAULT_FACTORY_SHOWN
        else:
            default = "none" if field.default in (None, (), "") else f"`{_listed(field.default)}`"
        yield f"| `--{name.replace('_', '-')}` | `{prefix}{name.upper()}` | {default} | {meaning} |"
    if left:
        raise ValueError(f"{', '.join(sorted(left))}: no such setting for a heading")
    yield ""


def write_pages(
    pages: Mapping[str, Callable[[], str]], *, module: str, about: str, docs: Path, argv: list[str] | None = None
) -> int:
    """Write pages that come from the code, or with `--check` compare them; 1 when one lags.

    Args:
        pages: each page's file name, and what gives its text.
        module: the module for `python -m MODULE`.
        about: the sentence that `--help` begins with.
        docs: the folder they belong to.
        argv: the command line, without the program.
    """
    parser = Parser(prog=f"python -m {module}", description=about)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is outdated")
    parser.add_argument("--docs", type=Path, default=docs, help="folder of the pages (default: %(default)s)")
    chosen = parser.parse_args(argv)
    lagging = 0
    for name, page in pages.items():
        path: Path = chosen.docs / name
        text = page()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if chosen.check:
            show(f"{path} is outdated: run python -m {module}", file=sys.stderr)
            lagging = 1
        else:
            path.write_text(text, encoding="utf-8")
    return lagging
