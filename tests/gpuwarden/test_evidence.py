"""Answers of `/evidence`: rendering, parsing and checks."""

import json
from dataclasses import MISSING, asdict, fields
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.evidence import (
    FactsError,
    GpuMemoryFacts,
    ServerFacts,
    WorkerFacts,
    parse,
    parse_on_demand,
    parse_server,
    render,
)
from tests.exporter import builders as build

pytestmark = pytest.mark.pure

_FIGURES: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=30),
    bool: st.booleans(),
    int: st.integers(),
    float: st.floats(-1e15, 1e15),
    list[str]: st.lists(st.text(max_size=10), max_size=3),
    dict[str, list[int] | None]: st.dictionaries(
        st.text(max_size=10), st.none() | st.lists(st.integers(0, 2**31), max_size=3), max_size=3
    ),
    dict[str, float]: st.dictionaries(st.text(max_size=10), st.floats(0, 1e15), max_size=3),
    list[GpuMemoryFacts]: st.lists(st.builds(GpuMemoryFacts), max_size=2),
    type(None): st.none(),
}
_HINTS = get_type_hints(WorkerFacts)
facts = st.builds(
    WorkerFacts,
    **{
        name: st.one_of(*(_FIGURES[kind] for kind in ((hint,) if hint in _FIGURES else get_args(hint))))
        for name, hint in _HINTS.items()
        if get_origin(hint) is not ClassVar
    },
)  # fmt: skip

KNOWN: dict[str, Any] = {
    "host": "box1",
    "worker": "w1",
    "sample_age_s": 0.5,
    "worker_incarnation": "i1",
    "dead_after_s": 30.0,
}
NOTHING_ELSE: dict[str, Any] = {field.name: None for field in fields(WorkerFacts)}
SERVER: dict[str, Any] = {field.name: None for field in fields(ServerFacts)} | {
    "host": "box1", "container": "c1", "sample_age_s": 0.5, "unseen": []
}  # fmt: skip
NOTHING_KNOWN = WorkerFacts(**{**NOTHING_ELSE, **KNOWN})


def answer(**changed: object) -> str:
    return json.dumps({**asdict(NOTHING_KNOWN), **changed})


@given(
    st.builds(
        ServerFacts,
        **{
            name: st.one_of(*(_FIGURES[kind] for kind in ((hint,) if hint in _FIGURES else get_args(hint))))
            for name, hint in get_type_hints(ServerFacts).items()
            if get_origin(hint) is not ClassVar
        },
    )
)
def test_server_facts_round_trip(written: ServerFacts) -> None:
    assert parse_server(render(written)) == written


def test_on_demand_facts_round_trip() -> None:
    written = build.on_demand()

    assert parse_on_demand(render(written)) == written


def test_older_answer_without_returning_memory_has_none() -> None:
    before = {"gpu": "GPU-0", "size_bytes": 1, "free_bytes": 1, "floor_bytes": 2, "tie_bytes": 1, "tenants": []}

    (card,) = parse_server(json.dumps(asdict(ServerFacts(**SERVER)) | {"cards": [before]})).cards or []
    assert card.reclaiming_bytes is None


def test_card_without_its_floor_is_refused() -> None:
    lacking = {"gpu": "GPU-0", "size_bytes": 1, "free_bytes": 1, "tie_bytes": 1, "tenants": []}

    with pytest.raises(FactsError, match="lacks 'cards'"):
        parse_server(json.dumps(asdict(ServerFacts(**SERVER)) | {"cards": [lacking]}))


def test_worker_facts_are_not_server_facts() -> None:
    with pytest.raises(FactsError, match="lacks '"):
        parse_server(answer())


@given(facts)
def test_worker_facts_round_trip(written: WorkerFacts) -> None:
    assert parse(render(written)) == written


def test_unknown_is_never_zero() -> None:
    assert parse(render(NOTHING_KNOWN)) == NOTHING_KNOWN


def test_unreadable_gpu_differs_from_a_gpu_without_processes() -> None:
    assert parse(answer(gpu_pids={"GPU-0": [], "GPU-1": None})).gpu_pids == {"GPU-0": [], "GPU-1": None}


def test_fields_of_a_later_version_are_ignored() -> None:
    assert parse(answer(colour="blue")) == NOTHING_KNOWN


@pytest.mark.parametrize("name", [field.name for field in fields(WorkerFacts) if field.default is MISSING])
def test_missing_field_is_refused_by_name(name: str) -> None:
    found = json.loads(answer())
    del found[name]

    with pytest.raises(FactsError, match=f"lacks '{name}': is it of another version"):
        parse(json.dumps(found))


def test_fields_that_an_older_exporter_lacks_are_unknown() -> None:
    found = json.loads(answer(worker_pid=7))
    del found["worker_pid"]

    assert parse(json.dumps(found)).worker_pid is None


def test_integer_is_a_duration() -> None:
    assert parse(answer(gpu_idle_s=120)).gpu_idle_s == 120.0


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        pytest.param("worker", None, "None for 'worker'", id="null for a required field"),
        pytest.param("sample_age_s", None, "None for 'sample_age_s'", id="null for a required age"),
        pytest.param("dead_after_s", None, "None for 'dead_after_s'", id="null for a required limit"),
        pytest.param("sample_age_s", "1", "'1' for 'sample_age_s'", id="a number as a string"),
        pytest.param("sample_age_s", True, "True for 'sample_age_s'", id="a boolean for a float"),
        pytest.param("job_id", True, "True for 'job_id'", id="a boolean for a whole number"),
        pytest.param("job_id", 1.5, "1.5 for 'job_id'", id="a fraction for a whole number"),
        pytest.param("alive", 1, "1 for 'alive'", id="a number for a boolean"),
        pytest.param("alive", "yes", "'yes' for 'alive'", id="a word for a boolean"),
        pytest.param("gpus", "GPU-0", "'GPU-0' for 'gpus'", id="a string for a list"),
        pytest.param("gpus", [1], "1 for 'gpus'", id="numbers in a list of strings"),
        pytest.param("gpu_pids", [1], ".* for 'gpu_pids'", id="a list for pids by GPU"),
        pytest.param("gpu_pids", {"GPU-0": ["1"]}, ".* for 'gpu_pids'", id="a pid as a string"),
        pytest.param("gpu_pids", {"GPU-0": [True]}, ".* for 'gpu_pids'", id="a boolean for a pid"),
        pytest.param("gpu_pids", {"GPU-0": 1}, ".* for 'gpu_pids'", id="a pid for a list of pids"),
        pytest.param("host", {"a": 1}, ".* for 'host'", id="an object for a string"),
        pytest.param("host", [[]], ".* for 'host'", id="a list for a string"),
        pytest.param("ram_idle_s", 10**400, ".* for 'ram_idle_s'", id="a number past every float"),
    ],
)
def test_field_of_another_type_is_refused_by_name(name: str, value: object, says: str) -> None:
    with pytest.raises(FactsError, match=f"the exporter's evidence has {says}"):
        parse(answer(**{name: value}))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("", "Invalid JSON", id="nothing"),
        pytest.param("<html>", "Invalid JSON", id="another page"),
        pytest.param(answer(sample_age_s=float("nan")), "nan for 'sample_age_s'", id="NaN, which looks fresh"),
        pytest.param(answer(sample_age_s=0).replace(": 0,", ": 1e999,"), "inf for 'sample_age_s'", id="infinity"),
        pytest.param("[" * 100_000, "Invalid JSON", id="nested too deep"),
        pytest.param("[]", "should be an? .*object", id="a list"),
    ],
)
def test_invalid_answer_is_refused(text: str, says: str) -> None:
    with pytest.raises(FactsError, match=says):
        parse(text)
