"""Settings of the services, checked as the services check them."""

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pydantic import ValidationError
from pydantic_settings import BaseSettings

from deploy.doctor.facts import Place, Runs, Settings
from deploy.doctor.sources.addresses import Addresses
from deploy.doctor.sources.rights import is_denied
from exporter.settings import Settings as ExporterSettings
from gpuwarden.errors import GpuwardenError
from gpuwarden.format import nearest
from gpuwarden.http.web_config import WebConfig
from gpuwarden.settings import complaints, unknown_names
from remediator.commands.notify import FILE_ENV as NOTIFY_FILE_ENV
from remediator.settings.notify_file import read as read_notify_file
from remediator.settings.policy_file import PolicyFile
from remediator.settings.settings import ExecuteSettings, ServeSettings

_CLASSES: Final[tuple[type[BaseSettings], ...]] = (ExporterSettings, ServeSettings, ExecuteSettings)
_PREFIXES: Final = ("GPUWARDEN_EXPORTER_", "GPUWARDEN_REMEDIATOR_", "GPUWARDEN_GATEWAY_")
_PREFIX: Final = "GPUWARDEN_"
NEAR: Final = 0.75
"""Similarity of a misspelt name, a ratio."""
_SHARED: Final = frozenset({"GPUWARDEN_RUNTIME_DIR", "GPUWARDEN_QUEUE_DB", "GPUWARDEN_GATEWAY"})
"""Variables of the services without such a prefix. Workers have others."""
_OF_GATEWAYS: Final = frozenset(
    f"GPUWARDEN_GATEWAY_{of}_{name}" for of in ("HOST", "CENTRAL") for name in ("LISTEN", "PORT", "WEB_CONFIG_FILE")
)
WEB_CONFIG: Final = "remediator-web.yml"


def read(addresses: Addresses) -> Settings:
    """Check variables, the environment file, the policy file and the web configuration files."""
    place, checked = addresses.place, []
    problems: list[tuple[str, str]] = []
    unreadable: list[str] = []
    ours = {name: value for name, value in addresses.variables.items() if name.startswith("GPUWARDEN_")}
    if place.env_file is not None:
        checked.append(str(place.env_file))
    elif place.runs is Runs.UP:
        checked.append("those of `gpuwarden up`")
    elif ours:
        checked.append("the environment")
    problems += _unknown(addresses, place)
    problems += _invalid(ours, place)
    for path, read_file in _files(addresses):
        if is_denied(path):
            unreadable.append(str(path))
            continue
        try:
            read_file(path)
            checked.append(path.name)
        except GpuwardenError as error:
            problems.append((str(error), f"correct {path}"))
        except OSError as error:
            problems.append((f"{path} cannot be read: {error.strerror}", f"check {path}"))
    return Settings(checked=checked, problems=problems, unreadable=unreadable)


def _unknown(addresses: Addresses, place: Place) -> Iterator[tuple[str, str]]:
    """Names with a prefix of the services that name no setting, and misspelt shared names in the file."""
    fields = {
        f"{each.model_config.get('env_prefix', '')}{name.upper()}" for each in _CLASSES for name in each.model_fields
    }
    known = fields | _OF_GATEWAYS
    mine = {name: value for name, value in addresses.variables.items() if name.startswith(_PREFIXES)}
    for name in unknown_names(mine, known):
        yield f"unknown key {name} is ignored{nearest(name, known)}", place.settings(name)
    shared = {each.removeprefix(_PREFIX): each for each in _SHARED}
    for name in addresses.file:
        rest = name.removeprefix(_PREFIX)
        if name.startswith(_PREFIX) and not name.startswith(_PREFIXES) and rest not in shared:
            for near in difflib.get_close_matches(rest, shared, n=1, cutoff=NEAR):
                yield f"unknown key {name} is ignored; did you mean {shared[near]}?", place.settings(name)


def _invalid(variables: Mapping[str, str], place: Place) -> Iterator[tuple[str, str]]:
    """Invalid values. What a unit gives on its command line may be missing here."""
    said = set[str]()
    with _environment(variables):
        for settings in _CLASSES:
            try:
                settings()
            except ValidationError as error:
                said |= {line for line in complaints(error, settings) if not line.startswith("missing ")}
    for line in sorted(said):
        yield line, place.settings("it")


def _files(addresses: Addresses) -> Iterator[tuple[Path, Callable[[Path], object]]]:
    """Each file that the settings name, and what reads it."""
    variables, place = addresses.variables, addresses.place
    folder = place.env_file.parent if place.env_file else place.data
    if folder is not None and os.access(folder / WEB_CONFIG, os.F_OK):
        yield folder / WEB_CONFIG, _read_webhook_access
    if path := variables.get("GPUWARDEN_EXPORTER_WEB_CONFIG_FILE"):
        yield Path(path), WebConfig
    if path := variables.get("GPUWARDEN_REMEDIATOR_POLICY"):
        yield Path(path), PolicyFile
    if path := variables.get(NOTIFY_FILE_ENV):
        yield Path(path), read_notify_file


def _read_webhook_access(path: Path) -> WebConfig:
    return WebConfig(path, credentials_required=True)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """These variables in the environment, for pydantic."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
