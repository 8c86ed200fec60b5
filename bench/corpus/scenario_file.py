"""Read scenarios from YAML files. `scenario` describes the format."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    PROMETHEUS_STATES,
    REMEDIES,
    TELLING,
    UNREAD,
    Doing,
    GpuHealth,
    GpuHealths,
    Process,
    Program,
    Scenario,
    Timeline,
    Told,
    Verdict,
    gpus_of,
)
from exporter.model.gpu import THROTTLE_REASONS
from gpuwarden.job import Condition, JobClass, Phase

SCENARIOS: Final = Path(__file__).with_name("scenarios")


AFTERWARDS_S: Final = 360
"""How much longer a scenario is played than anything happens in it or is due, seconds: longer than others wait."""


class ScenarioError(Exception):
    """A scenario cannot be understood: where, what was found, and what to write instead."""


def read(*places: Path) -> list[Scenario]:
    """Every scenario of these files, and of these folders' files; of those that ship where none is named.

    Raises:
        ScenarioError: one cannot be understood, or two have one name.
    """
    found: list[Scenario] = []
    for place in places or (SCENARIOS,):
        files = sorted((*place.glob("*.yaml"), *place.glob("*.yml"))) if place.is_dir() else [place]
        of_it = [scenario for file in files for scenario in _read_file(file)]
        if not of_it:
            raise ScenarioError(f"{place}: no scenario; write one in a file *.yaml there")
        found += of_it
    seen: dict[str, str] = {}
    for each in found:
        if each.name in seen:
            raise ScenarioError(f"{each.place}: {seen[each.name]} has the same name; say in it what is different")
        seen[each.name] = each.place
    return found


def _read_file(file: Path) -> Iterator[Scenario]:
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ScenarioError(f"{file}: cannot be read ({why}); name a file of scenarios, or a folder of such") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ScenarioError(f"{file.name}:{line}: this is no YAML ({error.problem}); {_hint(error)}") from error
    except yaml.reader.ReaderError as error:
        raise ScenarioError(f"{file.name}:1: this is no YAML ({error.reason}); mend it") from error
    if root is None:
        raise ScenarioError(f"{file.name}:1: there is no scenario in it; begin each with `- name:`")
    if not isinstance(root, yaml.SequenceNode):
        raise ScenarioError(f"{file.name}:1: a list of scenarios is wanted; begin each with `- name:`")
    _check_keys(file.name, root, set())
    for node in root.value:
        yield _scenario(_Reader(file.name, node))


def _hint(error: yaml.MarkedYAMLError) -> str:
    """What to write instead of what is no YAML, by what PyYAML found there."""
    problem = error.problem or ""
    if "tab" in problem:
        return "indent by spaces"
    if "mapping values" in problem:
        return "put a sentence with a colon into quotes, and indent the keys of one scenario alike"
    return "indent the keys of one scenario alike, and close each bracket and quote"


def _check_keys(file: str, node: yaml.Node, seen: set[int]) -> None:
    """Refuse a key that occurs twice, keep `1:0` (an instance of a GPU) from being read as 60, replace old names."""
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
                raise ScenarioError(f"{file}:{key.start_mark.line + 1}: {key.value!r} stands here twice; keep one")
            keys.add(str(key.value))
            _check_keys(file, value, seen)


class _Reader:
    """A mapping of the file: its keys are taken one after another, and those that are left are mistakes."""

    def __init__(self, file: str, node: yaml.Node) -> None:
        self.file = file
        self.line = node.start_mark.line + 1
        if not isinstance(node, yaml.MappingNode):
            empty = isinstance(node, yaml.ScalarNode) and not node.value
            raise self.error(f"`key: value` pairs are wanted here{', and there is nothing' if empty else ''}")
        self._nodes: dict[str, yaml.Node] = {}
        self._lines: dict[str, int] = {}
        for key, value in node.value:
            self._nodes[str(key.value)] = value
            self._lines[str(key.value)] = key.start_mark.line + 1

    def error(self, text: str, line: int | None = None) -> ScenarioError:
        return ScenarioError(f"{self.file}:{line or self.line}: {text}")

    def at(self, key: str, text: str) -> ScenarioError:
        """What is wrong with the value of a key."""
        return self.error(f"{key}: {text}", self._lines.get(key))

    def take(self, key: str) -> Any:
        """The plain value of a key, `None` where it is not there."""
        node = self._nodes.pop(key, None)
        try:
            return None if node is None else _plain(node)
        except (yaml.MarkedYAMLError, ValueError) as error:
            what = getattr(error, "problem", None) or error
            raise self.at(key, f"what stands there cannot be read ({what}); put text in quotes") from error

    def text(self, key: str) -> str:
        value = self.take(key)
        if not isinstance(value, str) or not value.strip():
            raise self.at(key, f"a sentence is wanted, and is {'missing' if value is None else 'something else'}")
        return value.strip()

    def time(self, key: str, default_s: int | None = None) -> int:
        value = self.take(key)
        if value is None and default_s is not None:
            return default_s
        seconds = _seconds(value)
        if seconds is None:
            raise self.at(key, f"{value!r} is no time; write it like 90s, 4m or 1h30m")
        return seconds

    def times(self) -> list[tuple[int, str]]:
        """The keys that are times, with how they are written; each later than the one before."""
        found = [(seconds, key) for key in self._nodes if (seconds := _seconds(key)) is not None]
        for (before_s, _), (after_s, key) in pairwise(found):
            if after_s <= before_s:
                raise self.at(key, "is not later than the one before; put the times in order")
        return found

    def timeline(self, key: str, states: tuple[str, ...]) -> Timeline:
        inner = self.mapping(key)
        found = []
        for seconds, name in inner.times():
            state = inner.take(name)
            if state not in states:
                raise inner.at(name, f"{state!r} is none of: {', '.join(states)}")
            found.append((seconds, str(state)))
        inner.finish("a time, such as 4m")
        return tuple(found)

    def mapping(self, key: str) -> "_Reader":
        return _Reader(self.file, self._nodes.pop(key))

    def mappings(self, key: str) -> "Iterator[tuple[str, _Reader]]":
        """The entries of a mapping of mappings; none where the key is not there."""
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

    def finish(self, wanted: str) -> None:
        for key in self._nodes:
            unit = f" (a time has a unit: {key}s, or {key}m)" if key.isdecimal() else ""
            raise self.at(key, f"is nothing that is known here; wanted is {wanted}{unit}")


def _scenario(reader: _Reader) -> Scenario:
    place = f"{reader.file}:{reader.line}"
    name, why = reader.text("name"), reader.text("why")
    programs = [
        _program(kind, who, inner)
        for kind in ("worker", "tenant", "server")
        for who, inner in reader.mappings(f"{kind}s")
    ]
    names = [each.name for each in programs]
    if twice := [each for each in names if names.count(each) > 1]:
        raise reader.error(f"two are called {twice[0]!r}; give each a name of its own")
    if not programs:
        raise reader.error(f"{name!r} has nobody in it; give it workers, tenants or servers")
    gpus = {}
    if "gpus" in reader:
        inner = reader.mapping("gpus")
        gpus = {name: _conditions(inner, name, {each.host for each in programs}) for name in inner}
    hosts = {}
    if "hosts" in reader:
        inner = reader.mapping("hosts")
        hosts = {host: inner.timeline(host, HOST_STATES) for host in inner}
    prometheus = reader.timeline("prometheus", PROMETHEUS_STATES) if "prometheus" in reader else ()
    verdicts = tuple(_verdicts(reader, _of_whom(programs)))
    told = tuple(_told(reader, _tellable(programs, gpus)))
    scrape_s = reader.time("scrape", 15)
    evaluate_s = reader.time("evaluate", 30)
    if not (scrape_s and evaluate_s):
        raise reader.error("scrape and evaluate are 1s or more")
    lines = [(since_s, "") for each in programs for since_s, _ in each.does]
    last_s = max(
        *(since_s for timeline in (lines, prometheus, *gpus.values(), *hosts.values()) for since_s, _ in timeline),
        *(verdict.due_s for verdict in verdicts),
        *(each.due_s for each in told),
        0,
    )
    plays_s = reader.time("plays", last_s + AFTERWARDS_S)
    not_yet = reader.text("not_yet") if "not_yet" in reader else None
    reader.finish("one of name, why, workers, tenants, servers, gpus, hosts, prometheus, verdict, told, scrape, "
                  "evaluate, plays, not_yet")  # fmt: skip
    if plays_s < last_s:
        raise reader.at("plays", f"it ends before all that happens has, which takes {last_s}s; let it go on")
    return Scenario(
        place=place, name=name, why=why, programs=tuple(programs), gpus=gpus, hosts=hosts, prometheus=prometheus,
        verdicts=verdicts, told=told, scrape_s=scrape_s, evaluate_s=evaluate_s,
        plays_s=-(-plays_s // evaluate_s) * evaluate_s, not_yet=not_yet,
    )  # fmt: skip


def _yes(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("true or false is wanted")
    return value


def _one_of(*known: _T) -> Callable[[Any], _T]:
    def parse(value: Any) -> _T:
        for each in known:
            if value == each:
                return each
        raise ValueError(f"it is none of: {', '.join(map(str, known))}")

    return parse


def _whole(least: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"a whole number is wanted, {least} or more")
        return value

    return parse


def _figure(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("a number is wanted")
    return float(value)


def _amount(value: Any) -> float:
    if (found := _figure(value)) < 0:
        raise ValueError("it is 0 or more")
    return found


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a name is wanted")
    return value


def _gpus(value: Any) -> tuple[str, ...]:
    found = tuple(map(str, value)) if isinstance(value, list) else ("",)
    if not all(_GPU.fullmatch(each) for each in found):
        raise ValueError("a list of their numbers is wanted, such as [0, 1], or [0:1] for an instance")
    if len(set(found)) < len(found):
        raise ValueError("one is there twice")
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
    "protected": (("tenant",), _yes),
    "managed": (("tenant",), _yes),
    "silence_s": (("server",), _amount),
}
"""Which kinds of program a setting is of, and how it is read."""


def _program(kind: str, name: str, reader: _Reader) -> Program:
    settings: dict[str, Any] = {}
    for key, (kinds, parse) in _SETTINGS.items():
        if kind in kinds and key in reader:
            value = reader.take(key)
            try:
                settings[key] = parse(value)
            except (TypeError, ValueError) as error:
                raise reader.at(key, f"{value!r} will not do ({error})") from None
    does = []
    for seconds, key in reader.times():
        does.append((seconds, _doing(reader, key)))
    known = ", ".join(key for key, (kinds, _) in _SETTINGS.items() if kind in kinds)
    reader.finish(f"a time, such as 4m, or a setting of a {kind}: {known}")
    if not does or does[0][0] != 0:
        raise reader.error(f"{name} does nothing at 0s; say what, for instance `0s: waits`")
    for since_s, doing in does:
        if len(doing.gpu_ratio) not in (1, len(settings.get("gpus", (0,)))):
            raise reader.error(
                f"{name} at {since_s}s: gpu_ratio has not one figure for each of its GPUs; write one each"
            )
    settings.setdefault("container", name)
    return Program(kind=kind, name=name, does=tuple(does), **settings)


def _doing(reader: _Reader, key: str) -> Doing:
    value = reader.take(key)
    parts = value if isinstance(value, dict) else {"does": value}
    word = parts.pop("does", None)
    if not isinstance(word, str) or word not in DOINGS:
        raise reader.at(key, f"nobody knows how one {word!r}; known are: {', '.join(DOINGS)}")
    parsed: dict[str, Any] = {}
    for name, said in parts.items():
        if name not in _PARTS:
            raise reader.at(key, f"{name} is no part of what is done; wanted is one of: does, {', '.join(_PARTS)}")
        try:
            parsed[name] = _PARTS[name](said)
        except (TypeError, ValueError) as error:
            raise reader.at(key, f"{name}: {said!r} will not do ({error})") from None
    return replace(DOINGS[word], **parsed)


def _ratios(value: Any) -> tuple[float | None, ...]:
    each = value if isinstance(value, list) else [value]
    found = tuple(None if one == "unknown" else _figure(one) for one in each)
    if any(one is not None and not 0 <= one <= 1 for one in found):
        raise ValueError("it is a ratio, 0 to 1")
    return found


def _unread(value: Any) -> tuple[str, ...]:
    found = tuple(value if isinstance(value, list) else [value])
    if not all(each in UNREAD for each in found):
        raise ValueError(f"wanted is any of: {', '.join(UNREAD)}")
    return found


_OTHER_PARTS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "process": _one_of(*Process),
    "phase": _one_of(*Phase),
    "step_every_s": _whole(1),
    "gpu_ratio": _ratios,
    "ram_mib_per_s": _figure,
    "waits_for_storage": _yes,
    "heartbeat": _yes,
    "heartbeat_cpu": _yes,
    "vram_mib_per_s": _figure,
    "answers": _yes,
    "finishes_every_s": _whole(1),
    "fails_every_s": _whole(1),
    "unread": _unread,
}


_PARTS: Final[Mapping[str, Callable[[Any], Any]]] = {
    each.name: _OTHER_PARTS.get(each.name, _amount) for each in fields(Doing)
}
"""How each part of what is done is read."""


def _of_whom(programs: Sequence[Program]) -> Mapping[str, tuple[str, set[str]]]:
    """Of what kind each remedy's targets are, and who these are."""
    kinds = {remedy: label for remedy, label in REMEDIES.items() if label != "container"}
    kinds |= {"restart_container": "server", "recycle_container": "tenant"}
    names = {kind: {each.name for each in programs if each.kind == kind} for kind in ("worker", "server", "tenant")}
    names["host"] = {each.host for each in programs}
    return {remedy: (kind, names[kind]) for remedy, kind in kinds.items()}


def _one_of_these(reader: _Reader, of: str, kind: str, known: set[str]) -> None:
    if of not in known:
        names, called = ", ".join(sorted(known)) or "none that is here", f"called {of!r}" if of else "named"
        raise reader.at("of", f"no {kind} is {called}; wanted is one of: {names}")


def _verdicts(reader: _Reader, known: Mapping[str, tuple[str, set[str]]]) -> Iterator[Verdict]:
    if "verdict" not in reader:
        raise reader.error("no verdict; write `verdict: none`, or what is to be acted on and when")
    node = reader.node("verdict")
    if isinstance(node, yaml.ScalarNode):
        if node.value != "none":
            said = f"{node.value!r} is no verdict" if node.value else "there is none"
            raise reader.at("verdict", f"{said}; write none, or {{condition, remedy, of, since, due}}")
        return
    seen: set[str] = set()
    for each in node.value if isinstance(node, yaml.SequenceNode) else [node]:
        inner = _Reader(reader.file, each)
        condition, remedy = inner.text("condition"), inner.text("remedy")
        if condition not in list(Condition):
            raise inner.at("condition", f"{condition!r} is none of: {', '.join(Condition)}")
        if remedy not in REMEDIES:
            raise inner.at("remedy", f"{remedy!r} is none of: {', '.join(REMEDIES)}")
        said = inner.take("of")
        anybody = [str(one) for one in (said if isinstance(said, list) else [said]) if one is not None] or [""]
        for of in anybody:
            _one_of_these(inner, of, *known[remedy])
            if of in seen:
                raise inner.at(
                    "of", f"{of} has a verdict already; keep the first, for what follows is of the same wedge"
                )
            seen.add(of)
        then = str(inner.take("then") or "")
        if then and (then not in DECIDED or remedy != "wrangle"):
            raise inner.at("then", f"{then!r} will not do; wanted is, of who is to be wrangled, {', '.join(DECIDED)}")
        since_s = inner.time("since")
        verdict = Verdict(
            condition=Condition(condition), remedy=remedy, of=anybody[0], or_of=tuple(anybody[1:]), since_s=since_s,
            due_s=inner.time("due", since_s), then=then,
        )  # fmt: skip
        inner.finish("one of condition, remedy, of, since, due, then")
        if verdict.due_s < since_s:
            raise inner.at("due", "it comes before what went wrong; let it be as late as `since`, or later")
        yield verdict


def _tellable(programs: Sequence[Program], gpus: Mapping[str, GpuHealths]) -> Mapping[str, set[str]]:
    """Of whom something can be told, by the label that knows them."""
    return {
        "worker": {each.name for each in programs if each.kind == "worker"},
        "container": {each.name for each in programs if each.kind == "server"},
        "gpu": {f"{each.host}/{name}" for each in programs for name in gpus_of(each.host, programs, gpus)},
    }


def _told(reader: _Reader, known: Mapping[str, set[str]]) -> Iterator[Told]:
    if "told" not in reader:
        return
    node = reader.node("told")
    seen: set[tuple[str, str]] = set()
    for each in node.value if isinstance(node, yaml.SequenceNode) else [node]:
        inner = _Reader(reader.file, each)
        alert, said = inner.text("alert"), inner.take("of")
        of = "" if said is None else str(said)
        if alert not in TELLING:
            raise inner.at("alert", f"{alert!r} is none of: {', '.join(TELLING)}")
        kind = {"worker": "worker", "container": "server", "gpu": "GPU"}[TELLING[alert]]
        _one_of_these(inner, of, kind, known[TELLING[alert]])
        if (alert, of) in seen:
            raise inner.at("of", f"{alert} tells of {of} already; keep the first")
        seen.add((alert, of))
        told = Told(alert=alert, of=of, due_s=inner.time("due"))
        inner.finish("one of alert, of, due")
        yield told


_GPU: Final = re.compile(r"(?:0|[1-9]\d*)(?::(?:0|[1-9]\d*))?")
"""A GPU by its number, or an instance of it."""


def _conditions(reader: _Reader, name: str, hosts: set[str]) -> GpuHealths:
    """How a GPU is, from when on."""
    host, slash, number = name.rpartition("/")
    if not _GPU.fullmatch(number) or (slash and host not in hosts):
        known = ", ".join(f"{each}/0" for each in sorted(hosts))
        raise reader.at(
            name, f"is no number of a GPU; write 0, 1 and so on, 0:1 for an instance, or with its host: {known}"
        )
    inner = reader.mapping(name)
    found = [(seconds, _gpu_health(inner, key, instance=":" in number)) for seconds, key in inner.times()]
    inner.finish("a time, such as 4m")
    return tuple(found)


def _gpu_health(reader: _Reader, key: str, *, instance: bool) -> GpuHealth:
    value = reader.take(key)
    parts = value if isinstance(value, dict) else {"state": value}
    parsed: dict[str, Any] = {}
    known = {"state": _state(INSTANCE_STATES)} if instance else _CONDITIONS
    for name, said in parts.items():
        if name not in known:
            raise reader.at(key, f"{name} is no part of how it is; wanted is one of: {', '.join(known)}")
        try:
            parsed[name] = known[name](said)
        except (TypeError, ValueError) as error:
            what = "" if name == "state" else f"{name}: "
            raise reader.at(key, f"{what}{said!r} {error}") from None
    return GpuHealth(**parsed)


def _state(known: tuple[str, ...]) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in known:
            raise ValueError(f"is none of: {', '.join(known)}")
        return str(value)

    return parse


def _throttled(value: Any) -> tuple[str, ...]:
    found = tuple(value if isinstance(value, list) else [value])
    if not all(each in THROTTLE_REASONS for each in found):
        raise ValueError(f"will not do (wanted is any of: {', '.join(THROTTLE_REASONS)})")
    return found


def _count(value: Any) -> int:
    try:
        return _whole(1)(value)
    except ValueError as error:
        raise ValueError(f"will not do ({error})") from None


_CONDITIONS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "state": _state(GPU_STATES),
    "xid": _count,
    "ecc_uncorrected": _count,
    "throttled": _throttled,
}
"""How each part of how a GPU is is read."""


_TIME: Final = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def _seconds(value: object) -> int | None:
    found = _TIME.fullmatch(value) if isinstance(value, str) and value else None
    if found is None:
        return None
    hours, minutes, seconds = (int(each or 0) for each in found.groups())
    return hours * 3600 + minutes * 60 + seconds


def _plain(node: yaml.Node) -> Any:
    """The value of a node, as YAML makes it."""
    return yaml.SafeLoader("").construct_object(node, deep=True)
