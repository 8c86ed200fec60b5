"""Checks of Prometheus: it scrapes this host under its key, and has this version's rules. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from deploy.doctor.facts import Facts, Rule, Runs
from deploy.doctor.finding import Finding, Unread, failed, ok, unknown, unread, warning
from gpuwarden.format import count_of

NAMED_MAX: Final = 3
"""Rules that one line names."""

_PREFIX: Final = "Gpuwarden"
_LINK: Final = "runbook_url"
"""This annotation depends on the installation."""


def prometheus(facts: Facts) -> Finding | None:
    """Prometheus answers, and sends to an Alertmanager."""
    found = facts.prometheus
    if isinstance(found, Unread):
        return None if found.skipped else unread(found, facts.host.place.restart("prometheus"))
    if not found.alertmanagers:
        return failed("it sends alerts to no Alertmanager", "add one under `alerting:` in prometheus.yml")
    there = ", ".join(each.split("://")[-1] for each in found.alertmanagers)
    return ok(f"{found.url} sends to {there}")


def host_label(facts: Facts) -> Finding | None:
    """Prometheus scrapes this host's exporter with the host key as label `host`."""
    key, found = facts.host.key, facts.prometheus
    if isinstance(found, Unread):
        return unknown(found.why)
    if isinstance(key, Unread):
        return unknown(key.why)
    hosts = {each.get("host", "") for each in found.exporters if each.get("nodename") == key}
    target = "the exporter's target in prometheus.yml"
    if not hosts:
        return failed(
            f"Prometheus has no series of this host's exporter ({key})", f'add {target}, with the label host="{key}"'
        )
    if wrong := sorted(hosts - {key}):
        return failed(
            f'the exporter is scraped as host="{wrong[0]}", but the host key is {key}: its alerts are refused',
            f'set the label host="{key}" on {target}, then reload Prometheus',
        )
    return ok(f'scraped as host="{key}"')


def targets(facts: Facts) -> Finding | None:
    """Prometheus can scrape gpuwarden's parts on this host, also gateways."""
    key, found = facts.host.key, facts.prometheus
    if isinstance(found, Unread):
        return unknown(found.why)
    if isinstance(key, Unread):
        return unknown(key.why)
    if down := [each for each in found.down if each.host == key and each.job.startswith("gpuwarden")]:
        says = f"Prometheus cannot scrape {down[0].job} of {key}: {down[0].error}"
        return failed(says, "start that part, or correct its address in prometheus.yml")
    return ok("scraped without errors")


def rules(facts: Facts) -> Finding | None:
    """Prometheus has this version's rules and can evaluate them."""
    found = facts.prometheus
    if isinstance(found, Unread):
        return unknown(found.why)
    fix = "install the rules of this version (`gpuwarden init` writes them), then reload Prometheus"
    if facts.host.place.runs is Runs.UP:
        fix = "restart `gpuwarden up`, which writes the rules of this version"
    if not any(each.name.startswith(_PREFIX) for each in found.loaded):
        return failed("Prometheus has no rule of gpuwarden", f"{fix}; rule_files must name them")
    if broken := [each for each in found.loaded if each.error and each.name.startswith(_PREFIX)]:
        return failed(f"{broken[0].name} cannot be evaluated: {broken[0].error}", fix)
    differ = list(differences(found.shipped, found.loaded))
    acting = [says for rule_acts, says in differ if rule_acts]
    if acting or differ:
        named = "; ".join((acting or [says for _, says in differ])[:NAMED_MAX])
        more = f" ({len(differ)} in all)" if len(differ) > NAMED_MAX else ""
        return (failed if acting else warning)(f"{named}{more}", fix)
    return ok(f"{count_of(len(found.shipped), 'rule')} of this version, all evaluated")


def differences(shipped: Sequence[Rule], loaded: Sequence[Rule]) -> Iterator[tuple[bool, str]]:
    """Differences by rule: whether detection or repairs suffer, and what differs."""
    wanted, there = _by_name(shipped), _by_name(loaded)
    for name, rules_ in wanted.items():
        acts = any(each.acts for each in rules_)
        if name not in there:
            yield True, f"rule {name[1]} is missing"
        elif Counter(map(_signature, rules_)) != Counter(map(_signature, there[name])):
            yield acts, f"rule {name[1]} differs from this version's"
        elif _texts(rules_) != _texts(there[name]):
            yield False, f"the texts of rule {name[1]} differ from this version's"
    for name in there.keys() - wanted.keys():
        if name[1].startswith(_PREFIX):
            yield any(each.acts for each in there[name]), f"rule {name[1]} is not of this version"


def _by_name(found: Sequence[Rule]) -> Mapping[tuple[str, str], Sequence[Rule]]:
    grouped = defaultdict[tuple[str, str], list[Rule]](list)
    for each in found:
        grouped[each.group, each.name].append(each)
    return grouped


def _signature(rule: Rule) -> tuple[object, ...]:
    return rule.query, rule.for_s, tuple(sorted(rule.labels.items()))


def _texts(found: Sequence[Rule]) -> list[list[tuple[str, str]]]:
    return sorted(sorted((name, text) for name, text in each.annotations.items() if name != _LINK) for each in found)
