"""Assign the processes of a shared container to its workers."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.evidence import process_ownership
from exporter.evidence.process_ownership import ProcessOrigin

pytestmark = pytest.mark.pure

INIT, W, V = 10, 20, 30
WORKERS = {"w": W, "v": V}


def born(**changes: int) -> dict[int, ProcessOrigin]:
    """An init with two workers, `w` and `v`, and a child for each given parent: `p40=W`."""
    parents = {INIT: 1, W: INIT, V: INIT}
    parents.update({int(name[1:]): parent for name, parent in changes.items()})
    return {pid: ProcessOrigin(parent=parent, start_ticks=pid) for pid, parent in parents.items()}


def own(
    found: Mapping[int, ProcessOrigin], *, first: int | None = INIT, unread: int | None = None
) -> dict[str, set[int]]:
    readable = {pid: each for pid, each in found.items() if pid != unread}
    return {
        name: set(pids)
        for name, pids in process_ownership.pids_by_worker(found.keys(), readable, WORKERS, first=first).items()
    }


@pytest.mark.parametrize(
    ("found", "of_w", "of_v"),
    [
        pytest.param(born(), {W, INIT}, {V, INIT}, id="only init is shared"),
        pytest.param(born(p40=W, p41=40), {W, 40, 41, INIT}, {V, INIT}, id="descendants of a worker"),
        pytest.param(born(p40=INIT), {W, INIT, 40}, {V, INIT, 40}, id="an orphan is shared"),
        pytest.param(born(p40=1, p41=40), {W, INIT, 40, 41}, {V, INIT, 40, 41},
                     id="processes started from outside are shared"),
        pytest.param(
            {**born(p40=W), V: ProcessOrigin(parent=W, start_ticks=V), 50: ProcessOrigin(parent=V, start_ticks=50)},
            {W, V, 50, 40, INIT}, {V, 50, 40, INIT},
            id="worker below another counts for both, and so do its orphans",
        ),
        pytest.param(
            {**born(p40=15), V: ProcessOrigin(parent=15, start_ticks=V), 15: ProcessOrigin(parent=W, start_ticks=25)},
            {W, V, 15, 40, INIT}, {V, 15, 40, INIT},
            id="between two workers: may be an orphan of the lower one",
        ),
        pytest.param(
            {**born(p40=W), W: ProcessOrigin(parent=INIT, start_ticks=45)}, {W, INIT, 40}, {V, INIT, 40},
            id="a parent that started after its child has a reused pid",
        ),
        pytest.param(
            {**born(p40=W), W: ProcessOrigin(parent=INIT, start_ticks=40)}, {W, INIT, 40}, {V, INIT},
            id="a parent that started in the same tick",
        ),
        pytest.param(
            {**born(), 40: ProcessOrigin(parent=41, start_ticks=40), 41: ProcessOrigin(parent=40, start_ticks=40)},
            {W, INIT, 40, 41}, {V, INIT, 40, 41}, id="a cycle is shared",
        ),
    ],
)  # fmt: skip
def test_process_belongs_to_one_worker_or_to_all(
    found: Mapping[int, ProcessOrigin], of_w: set[int], of_v: set[int]
) -> None:
    assert own(found) == {"w": of_w, "v": of_v}


def test_orphans_may_be_below_a_worker_that_is_the_first_process() -> None:
    started_from_outside = ProcessOrigin(parent=1, start_ticks=V)
    found = {**born(p40=W, p41=V), W: ProcessOrigin(parent=1, start_ticks=W), V: started_from_outside}

    assert own(found, first=W) == {"w": {W, INIT, 40}, "v": {V, INIT, 40, 41}}
    assert own(found) == {"w": {W, INIT, 40}, "v": {V, INIT, 41}}


def test_unknown_first_process_lets_orphans_be_below_any_outside_worker() -> None:
    found = {**born(p40=W, p41=V), W: ProcessOrigin(parent=1, start_ticks=W), V: ProcessOrigin(parent=1, start_ticks=V)}

    assert own(found, first=None) == {"w": {W, INIT, 40, 41}, "v": {V, INIT, 40, 41}}
    assert own(born(p40=W), first=None) == {"w": {W, INIT, 40}, "v": {V, INIT}}


def test_chain_of_thousands_belongs_to_one_worker() -> None:
    chain = {pid: ProcessOrigin(parent=pid - 1, start_ticks=pid) for pid in range(100, 8100)}
    found = {**born(), **chain, 100: ProcessOrigin(parent=W, start_ticks=100)}

    assert own(found) == {"w": {W, INIT, *chain}, "v": {V, INIT}}


def test_descendants_of_an_unreadable_process_are_shared() -> None:
    found = born(p40=W, p41=40)

    assert own(found, unread=40) == {"w": {W, INIT, 40, 41}, "v": {V, INIT, 40, 41}}


@pytest.mark.parametrize("unread", [W, INIT])
def test_unreadable_ancestor_of_a_worker_makes_all_processes_shared(unread: int) -> None:
    found = born(p40=W, p41=V)

    assert own(found, unread=unread) == {"w": set(found), "v": set(found)}


def test_worker_without_its_process_is_left_out() -> None:
    found = {pid: each for pid, each in born(p40=V).items() if pid != W}

    assert own(found) == {"v": {V, INIT, 40}}


def test_process_of_two_workers_counts_for_both() -> None:
    found = process_ownership.pids_by_worker({INIT, W, 40}, born(p40=W), {"w": W, "v": W}, first=INIT)

    assert found == {"w": {INIT, W, 40}, "v": {INIT, W, 40}}


trees = st.dictionaries(
    st.integers(2, 12),
    st.one_of(st.none(), st.builds(lambda parent, ticks: ProcessOrigin(parent=parent, start_ticks=ticks),
                                   st.integers(1, 14), st.integers(0, 4))),
    min_size=2,
)  # fmt: skip


@given(trees, st.data())
def test_every_process_is_assigned_and_each_worker_has_its_own(
    tree: Mapping[int, ProcessOrigin | None], data: st.DataObject
) -> None:
    workers = {
        "w": data.draw(st.sampled_from(sorted(tree))),
        "v": data.draw(st.sampled_from(sorted(tree))),
    }
    read = {pid: each for pid, each in tree.items() if each is not None}

    found = process_ownership.pids_by_worker(tree.keys(), read, workers, first=min(tree))

    assert found.keys() == workers.keys()
    assert frozenset().union(*found.values()) == tree.keys()
    assert all(workers[name] in pids for name, pids in found.items())
