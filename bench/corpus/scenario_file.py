"""Read scenarios from YAML files. `scenario` describes the format."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import yaml

from bench.corpus.old_names import OLD_NAMES
from bench.corpus.scenario import (
    _T,
    DECIDED,
    DOINGS,
    GPU_STATES,
    HELPERS,
    HOST_STATES,
    INSTANCE_STATES,
    NOTICES,
    PROMETHEUS_STATES,
    REMEDIES,
    UNREAD,
    Doing,
    GpuHealth,
    GpuHealths,
    Notice,
    Process,
    Program,
    Scenario,
    Timeline,
    Verdict,
    gpus_of,
)
from exporter.model.gpu import THROTTLE_REASONS
from gpuwarden.job import Condition, JobClass, Phase

SCENARIOS: Final = Path(__file__).with_name("scenarios")


AFTERWARDS_S: Final = 360
"""Seconds from the last event to the end of a scenario; longer than the timeouts of other policies."""

KEYS: Final = (
    "name", "why", "workers", "tenants", "servers", "gpus", "hosts", "prometheus", "verdict", "told", "scrape",
    "evaluate", "plays", "not_yet",
)  # fmt: skip


class ScenarioError(Exception):
    """A scenario is invalid; the message says where, and what to write."""


def read(*places: Path) -> list[Scenario]:
    """Read every scenario of files and folders; by default ours.

    Raises:
        ScenarioError: one is invalid, or two have the same name.
    """
    found: list[Scenario] = []
    for place in places or (SCENARIOS,):
        files = sorted((*place.glob("*.yaml"), *place.glob("*.yml"))) if place.is_dir() else [place]
        scenarios = [scenario for file in files for scenario in _read_file(file)]
        if not scenarios:
            raise ScenarioError(f"{place}: no scenario; write one in a *.yaml file there")
        found += scenarios
    seen: dict[str, str] = {}
    for each in found:
        if each.name in seen:
            raise ScenarioError(f"{each.place}: {seen[each.name]} has the same name; use another one")
        seen[each.name] = each.place
    return found


def _read_file(file: Path) -> Iterator[Scenario]:
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ScenarioError(f"{file}: cannot read it ({why}); give a file or folder of scenarios") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ScenarioError(f"{file.name}:{line}: invalid YAML ({error.problem}); {_hint(error)}") from error
    except yaml.reader.ReaderError as error:
        raise ScenarioError(f"{file.name}:1: invalid YAML ({error.reason}); correct it") from error
    if root is None:
        raise ScenarioError(f"{file.name}:1: no scenario; begin each with `- name:`")
    if not isinstance(root, yaml.SequenceNode):
        raise ScenarioError(f"{file.name}:1: not a list of scenarios; begin each with `- name:`")
    _check_keys(file.name, root, set())
    for node in root.value:
        yield _scenario(_Reader(file.name, node))


def _hint(error: yaml.MarkedYAMLError) -> str:
    """How to correct a YAML error."""
    problem = error.problem or ""
    if "tab" in problem:
        return "indent by spaces"
    if "mapping values" in problem:
        return "quote a sentence with a colon, and indent all keys of a scenario equally"
    return "indent all keys of a scenario equally, and close each bracket and quote"


def _check_keys(file: str, node: yaml.Node, seen: set[int]) -> None:
    """Refuse duplicate keys, keep `1:0` (a GPU instance) a string instead of 60, replace old names."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        node.value = OLD_NAMES.get(node.value, node.value)
        if ":" in node.value:
            node.tag = "tag:yaml.org,2002:str"
    elif isinstance(node, yaml.SequenceNode):
        for each in node.value:
            _check_keys(file, each, seen)
    elif isinstance(node, yaml.MappingNode):
        keys: set[str] = set()
        for key, value in node.value:
            key.value = OLD_NAMES.get(key.value, key.value)
            if str(key.value) in keys:
                raise ScenarioError(f"{file}:{key.start_mark.line + 1}: duplicate key {key.value!r}; keep one")
            keys.add(str(key.value))
            _check_keys(file, value, seen)


class _Reader:
    """A mapping of the file. Keys that no caller takes are errors."""

    def __init__(self, file: str, node: yaml.Node) -> None:
        self.file = file
        self.line = node.start_mark.line + 1
        if not isinstance(node, yaml.MappingNode):
            empty = isinstance(node, yaml.ScalarNode) and not node.value
            raise self.error(f"expected `key: value` pairs{', found nothing' if empty else ''}")
        self._nodes: dict[str, yaml.Node] = {}
        self._lines: dict[str, int] = {}
        for key, value in node.value:
            self._nodes[str(key.value)] = value
            self._lines[str(key.value)] = key.start_mark.line + 1

    def error(self, text: str, line: int | None = None) -> ScenarioError:
        return ScenarioError(f"{self.file}:{line or self.line}: {text}")

    def at(self, key: str, text: str) -> ScenarioError:
        """Make an error about a key."""
        return self.error(f"{key}: {text}", self._lines.get(key))

    def take(self, key: str) -> Any:
        """Take the value of a key; `None` if it is missing."""
        node = self._nodes.pop(key, None)
        try:
            return None if node is None else _plain(node)
        except (yaml.MarkedYAMLError, ValueError) as error:
            what = getattr(error, "problem", None) or error
            raise self.at(key, f"invalid value ({what}); put text in quotes") from error

    def text(self, key: str) -> str:
        value = self.take(key)
        if not isinstance(value, str) or not value.strip():
            raise self.at(key, f"expected a sentence, found {'nothing' if value is None else 'another value'}")
        return value.strip()

    def time(self, key: str, default_s: int | None = None) -> int:
        value = self.take(key)
        if value is None and default_s is not None:
            return default_s
        seconds = _seconds(value)
        if seconds is None:
            raise self.at(key, f"invalid time {value!r}; write 90s, 4m or 1h30m")
        return seconds

    def times(self) -> list[tuple[int, str]]:
        """The keys that are times, in seconds and as written, in ascending order."""
        found = [(seconds, key) for key in self._nodes if (seconds := _seconds(key)) is not None]
        for (before_s, _), (after_s, key) in pairwise(found):
            if after_s <= before_s:
                raise self.at(key, "not later than the time before it; put the times in order")
        return found

    def timeline(self, key: str, states: Collection[str]) -> Timeline:
        inner = self.mapping(key)
        found = []
        for seconds, name in inner.times():
            state = inner.take(name)
            if state not in states:
                raise inner.at(name, _invalid(state, states))
            found.append((seconds, str(state)))
        inner.finish("a time, such as 4m")
        return tuple(found)

    def mapping(self, key: str) -> "_Reader":
        return _Reader(self.file, self._nodes.pop(key))

    def mappings(self, key: str) -> "Iterator[tuple[str, _Reader]]":
        """The entries of a mapping of mappings; none if the key is missing."""
        if key in self._nodes:
            inner = self.mapping(key)
            for name in inner:
                yield name, inner.mapping(name)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._nodes))

    def __contains__(self, key: str) -> bool:
        return key in self._nodes

    def node(self, key: str) -> yaml.Node:
        return self._nodes.pop(key)

    def finish(self, expected: str) -> None:
        for key in self._nodes:
            unit = f" (a time has a unit: {key}s, or {key}m)" if key.isdecimal() else ""
            raise self.at(key, f"unknown key; use {expected}{unit}")


def _invalid(value: object, known: Iterable[str]) -> str:
    return f"invalid {value!r}; use one of: {', '.join(known)}"


def _scenario(reader: _Reader) -> Scenario:
    place = f"{reader.file}:{reader.line}"
    name, why = reader.text("name"), reader.text("why")
    programs = [
        _program(kind, program, inner)
        for kind in ("worker", "tenant", "server")
        for program, inner in reader.mappings(f"{kind}s")
    ]
    names = [each.name for each in programs]
    if duplicates := [each for each in names if names.count(each) > 1]:
        raise reader.error(f"duplicate name {duplicates[0]!r}; give each program another one")
    if not programs:
        raise reader.error(f"{name!r} has no program; add workers, tenants or servers")
    gpus = {}
    if "gpus" in reader:
        inner = reader.mapping("gpus")
        gpus = {name: _gpu_healths(inner, name, {each.host for each in programs}) for name in inner}
    hosts = {}
    if "hosts" in reader:
        inner = reader.mapping("hosts")
        hosts = {host: inner.timeline(host, HOST_STATES) for host in inner}
    prometheus = reader.timeline("prometheus", PROMETHEUS_STATES) if "prometheus" in reader else ()
    verdicts = tuple(_verdicts(reader, _remedy_targets(programs, gpus)))
    notices = tuple(_notices(reader, _notice_targets(programs, gpus)))
    scrape_s = reader.time("scrape", 15)
    evaluate_s = reader.time("evaluate", 30)
    if not (scrape_s and evaluate_s):
        raise reader.error("scrape and evaluate must be 1s or more")
    lines = [(since_s, "") for each in programs for since_s, _ in each.does]
    last_s = max(
        *(since_s for timeline in (lines, prometheus, *gpus.values(), *hosts.values()) for since_s, _ in timeline),
        *(verdict.due_s for verdict in verdicts),
        *(each.due_s for each in notices),
        0,
    )
    plays_s = reader.time("plays", last_s + AFTERWARDS_S)
    not_yet = reader.text("not_yet") if "not_yet" in reader else None
    reader.finish(f"one of {', '.join(KEYS)}")
    if plays_s < last_s:
        raise reader.at("plays", f"ends before the last event at {last_s}s; let it play longer")
    return Scenario(
        place=place, name=name, why=why, programs=tuple(programs), gpus=gpus, hosts=hosts, prometheus=prometheus,
        verdicts=verdicts, notices=notices, scrape_s=scrape_s, evaluate_s=evaluate_s,
        plays_s=-(-plays_s // evaluate_s) * evaluate_s, not_yet=not_yet,
    )  # fmt: skip


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("expected true or false")
    return value


def _one_of(*known: _T) -> Callable[[Any], _T]:
    def parse(value: Any) -> _T:
        for each in known:
            if value == each:
                return each
        raise ValueError(f"use one of: {', '.join(map(str, known))}")

    return parse


def _whole(least: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"expected a whole number, {least} or more")
        return value

    return parse


def _figure(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("expected a number")
    return float(value)


def _amount(value: Any) -> float:
    if (found := _figure(value)) < 0:
        raise ValueError("expected 0 or more")
    return found


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("expected a name")
    return value


def _gpus(value: Any) -> tuple[str, ...]:
    found = tuple(map(str, value)) if isinstance(value, list) else ("",)
    if not all(_GPU.fullmatch(each) for each in found):
        raise ValueError("expected a list such as [0, 1], or [0:1] for an instance")
    if len(set(found)) < len(found):
        raise ValueError("duplicate number")
    return found


_SETTINGS: Final[Mapping[str, tuple[tuple[str, ...], Callable[[Any], Any]]]] = {
    "host": (("worker", "tenant", "server"), _name),
    "container": (("worker",), _name),
    "gpus": (("worker", "tenant", "server"), _gpus),
    "job_class": (("worker",), _one_of(*JobClass)),
    "budget_s": (("worker",), _amount),
    "stall_timeout_s": (("worker",), _amount),
    "ran_s": (("worker",), _whole(0)),
    "ranks": (("worker",), _whole(1)),
    "gang": (("worker",), _name),
    "rank": (("worker",), _whole(0)),
    "attempt": (("worker",), _whole(1)),
    "run": (("worker",), _name),
    "works_in": (("worker",), _one_of(*HELPERS[1:])),
    "asked_every_s": (("worker",), _whole(1)),
    "budget_mib": (("tenant",), _whole(0)),
    "protected": (("tenant",), _boolean),
    "managed": (("tenant",), _boolean),
    "silence_s": (("server",), _amount),
}
"""Settings, with their kinds of program and their parsers."""


def _program(kind: str, name: str, reader: _Reader) -> Program:
    settings: dict[str, Any] = {}
    for key, (kinds, parse) in _SETTINGS.items():
        if kind in kinds and key in reader:
            value = reader.take(key)
            try:
                settings[key] = parse(value)
            except (TypeError, ValueError) as error:
                raise reader.at(key, f"invalid {value!r} ({error})") from None
    does = []
    for seconds, key in reader.times():
        does.append((seconds, _doing(reader, key)))
    known = ", ".join(key for key, (kinds, _) in _SETTINGS.items() if kind in kinds)
    reader.finish(f"a time, such as 4m, or a setting of a {kind}: {known}")
    if not does or does[0][0] != 0:
        raise reader.error(f"{name} does nothing at 0s; add an activity such as `0s: waits`")
    for since_s, doing in does:
        if len(doing.gpu_ratio) not in (1, len(settings.get("gpus", (0,)))):
            raise reader.error(f"{name} at {since_s}s: gpu_ratio needs one number, or one for each of its GPUs")
    settings.setdefault("container", name)
    return Program(kind=kind, name=name, does=tuple(does), **settings)


def _doing(reader: _Reader, key: str) -> Doing:
    value = reader.take(key)
    parts = value if isinstance(value, dict) else {"does": value}
    word = parts.pop("does", None)
    if not isinstance(word, str) or word not in DOINGS:
        raise reader.at(key, f"unknown activity {word!r}; use one of: {', '.join(DOINGS)}")
    parsed: dict[str, Any] = {}
    for name, value in parts.items():
        if name not in _PARTS:
            raise reader.at(key, f"unknown part {name}; use one of: does, {', '.join(_PARTS)}")
        try:
            parsed[name] = _PARTS[name](value)
        except (TypeError, ValueError) as error:
            raise reader.at(key, f"{name}: invalid {value!r} ({error})") from None
    return replace(DOINGS[word], **parsed)


def _ratios(value: Any) -> tuple[float | None, ...]:
    each = value if isinstance(value, list) else [value]
    found = tuple(None if one == "unknown" else _figure(one) for one in each)
    if any(one is not None and not 0 <= one <= 1 for one in found):
        raise ValueError("expected a ratio, 0 to 1")
    return found


def _unread(value: Any) -> tuple[str, ...]:
    found = tuple(value if isinstance(value, list) else [value])
    if not all(each in UNREAD for each in found):
        raise ValueError(f"use any of: {', '.join(UNREAD)}")
    return found


_OTHER_PARTS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "process": _one_of(*Process),
    "phase": _one_of(*Phase),
    "step_every_s": _whole(1),
    "gpu_ratio": _ratios,
    "ram_mib_per_s": _figure,
    "waits_for_storage": _boolean,
    "heartbeat": _boolean,
    "heartbeat_cpu": _boolean,
    "vram_mib_per_s": _figure,
    "answers": _boolean,
    "finishes_every_s": _whole(1),
    "fails_every_s": _whole(1),
    "unread": _unread,
}


_PARTS: Final[Mapping[str, Callable[[Any], Any]]] = {
    each.name: _OTHER_PARTS.get(each.name, _amount) for each in fields(Doing)
}
"""Parsers of the parts of `Doing`."""


def _remedy_targets(programs: Sequence[Program], gpus: Mapping[str, GpuHealths]) -> Mapping[str, tuple[str, set[str]]]:
    """Kind and names of each remedy's possible targets."""
    kinds = {remedy: label for remedy, label in REMEDIES.items() if label != "container"}
    kinds |= {"restart_container": "server", "recycle_container": "tenant"}
    names = {kind: {each.name for each in programs if each.kind == kind} for kind in ("worker", "server", "tenant")}
    names["host"] = {each.host for each in programs}
    names["gpu"] = _notice_targets(programs, gpus)["gpu"]
    return {remedy: (kind, names[kind]) for remedy, kind in kinds.items()}


def _check_target(reader: _Reader, of: str, kind: str, known: set[str]) -> None:
    if of not in known:
        names = ", ".join(sorted(known)) or "(there is none)"
        raise reader.at("of", f"{f'unknown {kind} {of!r}' if of else f'no {kind}'}; use one of: {names}")


def _verdicts(reader: _Reader, known: Mapping[str, tuple[str, set[str]]]) -> Iterator[Verdict]:
    if "verdict" not in reader:
        raise reader.error("no verdict; write `verdict: none`, or the expected action")
    node = reader.node("verdict")
    if isinstance(node, yaml.ScalarNode):
        if node.value != "none":
            problem = f"invalid {node.value!r}" if node.value else "empty"
            raise reader.at("verdict", f"{problem}; write none, or {{condition, remedy, of, since, due}}")
        return
    seen: set[str] = set()
    for each in node.value if isinstance(node, yaml.SequenceNode) else [node]:
        inner = _Reader(reader.file, each)
        condition, remedy = inner.text("condition"), inner.text("remedy")
        if condition not in list(Condition):
            raise inner.at("condition", _invalid(condition, Condition))
        if remedy not in REMEDIES:
            raise inner.at("remedy", _invalid(remedy, REMEDIES))
        value = inner.take("of")
        targets = [str(one) for one in (value if isinstance(value, list) else [value]) if one is not None] or [""]
        for of in targets:
            _check_target(inner, of, *known[remedy])
            if of in seen:
                raise inner.at("of", f"{of} has a verdict already; keep the first, which covers the same fault")
            seen.add(of)
        then = str(inner.take("then") or "")
        if then and (then not in DECIDED or remedy != "wrangle"):
            raise inner.at("then", f"invalid {then!r}; with remedy wrangle use one of: {', '.join(DECIDED)}")
        since_s = inner.time("since")
        verdict = Verdict(
            condition=Condition(condition), remedy=remedy, of=targets[0], or_of=tuple(targets[1:]), since_s=since_s,
            due_s=inner.time("due", since_s), then=then,
        )  # fmt: skip
        inner.finish("one of condition, remedy, of, since, due, then")
        if verdict.due_s < since_s:
            raise inner.at("due", "earlier than `since`; write the same time or a later one")
        yield verdict


def _notice_targets(programs: Sequence[Program], gpus: Mapping[str, GpuHealths]) -> Mapping[str, set[str]]:
    """Possible targets of notices by their label."""
    return {
        "worker": {each.name for each in programs if each.kind == "worker"},
        "container": {each.name for each in programs if each.kind == "server"},
        "gpu": {f"{each.host}/{name}" for each in programs for name in gpus_of(each.host, programs, gpus)},
    }


def _notices(reader: _Reader, known: Mapping[str, set[str]]) -> Iterator[Notice]:
    if "told" not in reader:
        return
    node = reader.node("told")
    seen: set[tuple[str, str]] = set()
    for each in node.value if isinstance(node, yaml.SequenceNode) else [node]:
        inner = _Reader(reader.file, each)
        alert, target = inner.text("alert"), inner.take("of")
        of = "" if target is None else str(target)
        if alert not in NOTICES:
            raise inner.at("alert", _invalid(alert, NOTICES))
        kind = {"worker": "worker", "container": "server", "gpu": "GPU"}[NOTICES[alert]]
        _check_target(inner, of, kind, known[NOTICES[alert]])
        if (alert, of) in seen:
            raise inner.at("of", f"duplicate {alert} of {of}; keep the first")
        seen.add((alert, of))
        notice = Notice(alert=alert, of=of, due_s=inner.time("due"))
        inner.finish("one of alert, of, due")
        yield notice


_GPU: Final = re.compile(r"(?:0|[1-9]\d*)(?::(?:0|[1-9]\d*))?")
"""Number of a GPU or of its instance."""


def _gpu_healths(reader: _Reader, name: str, hosts: set[str]) -> GpuHealths:
    host, slash, number = name.rpartition("/")
    if not _GPU.fullmatch(number) or (slash and host not in hosts):
        known = ", ".join(f"{each}/0" for each in sorted(hosts))
        raise reader.at(name, f"invalid GPU number; write 0, or 0:1 for an instance, or with its host: {known}")
    inner = reader.mapping(name)
    found = [(seconds, _gpu_health(inner, key, instance=":" in number)) for seconds, key in inner.times()]
    inner.finish("a time, such as 4m")
    return tuple(found)


def _gpu_health(reader: _Reader, key: str, *, instance: bool) -> GpuHealth:
    value = reader.take(key)
    parts = value if isinstance(value, dict) else {"state": value}
    parsed: dict[str, Any] = {}
    known = {"state": _one_of(*INSTANCE_STATES)} if instance else _HEALTH_PARTS
    for name, part in parts.items():
        if name not in known:
            raise reader.at(key, f"unknown part {name}; use one of: {', '.join(known)}")
        try:
            parsed[name] = known[name](part)
        except (TypeError, ValueError) as error:
            what = "" if name == "state" else f"{name}: "
            raise reader.at(key, f"{what}invalid {part!r} ({error})") from None
    return GpuHealth(**parsed)


def _throttled(value: Any) -> tuple[str, ...]:
    found = tuple(value if isinstance(value, list) else [value])
    if not all(each in THROTTLE_REASONS for each in found):
        raise ValueError(f"use any of: {', '.join(THROTTLE_REASONS)}")
    return found


_HEALTH_PARTS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "state": _one_of(*GPU_STATES),
    "xid": _whole(1),
    "ecc_uncorrected": _whole(1),
    "throttled": _throttled,
    "quarantined": _boolean,
}
"""Parsers of the parts of `GpuHealth`."""


_TIME: Final = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def _seconds(value: object) -> int | None:
    found = _TIME.fullmatch(value) if isinstance(value, str) and value else None
    if found is None:
        return None
    hours, minutes, seconds = (int(each or 0) for each in found.groups())
    return hours * 3600 + minutes * 60 + seconds


def _plain(node: yaml.Node) -> Any:
    """The Python value of a node."""
    return yaml.SafeLoader("").construct_object(node, deep=True)
