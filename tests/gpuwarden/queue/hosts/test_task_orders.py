"""Orders to end a task, on both databases: who gets them, and how they end."""

from typing import Any

import pytest

from gpuwarden.queue import JobStore
from gpuwarden.queue.hosts.task_orders import KEPT_S, TAKEN_MAX, Ending, TaskOrder, TaskOutcome, TaskResult
from tests.gpuwarden.queue.builders import NOW

pytestmark = [pytest.mark.both_databases, pytest.mark.behaviour("D7")]

LIFE_S = 600.0


def give(store: JobStore, task_id: int = 123, *, host: str = "box1", now: float = NOW, **its: Any) -> TaskOrder:
    return store.task_orders.give(
        host, task_id, **{"who": "ann", "reason": "hung", "life_s": LIFE_S, **its}, now=now
    )  # fmt: skip


def result(outcome: TaskOutcome, message: str = "2 processes", task_id: int = 123) -> TaskResult:
    return TaskResult(task_id=task_id, outcome=outcome, message=message)


def test_only_the_ordered_host_gets_an_order_until_it_answers(store: JobStore) -> None:
    orders = store.task_orders
    give(store)
    give(store, 124, host="box2")

    assert orders.exchange("box1", [], now=NOW + 1) == [123]
    assert orders.exchange("box1", [], now=NOW + 2) == [123], "the answer may be lost"
    assert orders.exchange("box1", [result(TaskOutcome.ENDED)], now=NOW + 3) == []

    (found,) = orders.of_host("box1", now=NOW + 4)
    assert (found.taken_at, found.settled_at, found.outcome) == (NOW + 1, NOW + 3, TaskOutcome.ENDED)
    assert (found.message, found.ordered_by, found.reason) == ("2 processes", "ann", "hung")
    assert found.is_done
    assert orders.exchange("box2", [], now=NOW) == [124]


def test_first_result_counts_and_one_of_another_host_does_not(store: JobStore) -> None:
    orders = store.task_orders
    give(store)
    give(store, host="box2")
    orders.exchange("box2", [], now=NOW)

    orders.exchange("box1", [result(TaskOutcome.ENDED)], now=NOW)  # it has not taken the order
    assert orders.of_host("box1", now=NOW)[0].outcome is None
    orders.exchange("box1", [result(TaskOutcome.REFUSED, "first")], now=NOW + 1)
    orders.exchange("box1", [result(TaskOutcome.ENDED, "second")], now=NOW + 2)

    (found,) = orders.of_host("box1", now=NOW)
    assert (found.outcome, found.message, found.is_done) == (TaskOutcome.REFUSED, "first", False)
    assert orders.of_host("box2", now=NOW)[0].outcome is None


def test_second_order_about_a_task_is_the_open_one(store: JobStore) -> None:
    first = give(store)

    assert give(store, who="bob", now=NOW + 1) == first
    store.task_orders.withdraw("box1", 123, who="bob", now=NOW + 2)
    assert give(store, who="bob", now=NOW + 3).order_id == first.order_id + 1


def test_withdrawn_order_is_not_taken_and_a_host_that_took_it_may_answer(store: JobStore) -> None:
    orders = store.task_orders
    give(store)
    withdrawn = orders.withdraw("box1", 123, who="bob", now=NOW)
    assert withdrawn is not None
    assert (withdrawn.outcome, withdrawn.message) == (Ending.WITHDRAWN, "by bob")
    assert orders.exchange("box1", [], now=NOW) == []
    assert orders.withdraw("box1", 123, who="bob", now=NOW) is None

    taken = give(store)
    assert orders.exchange("box1", [], now=NOW) == [123]
    orders.withdraw("box1", 123, who="bob", now=NOW)
    orders.exchange("box1", [result(TaskOutcome.ENDED)], now=NOW)

    found = orders.order(taken.order_id, now=NOW)
    assert found is not None
    assert found.outcome is TaskOutcome.ENDED, "what the host did is what counts"


def test_order_expires_if_its_host_does_not_take_it(store: JobStore) -> None:
    order = give(store)

    assert store.task_orders.exchange("box1", [], now=NOW + LIFE_S) == []
    (found,) = store.task_orders.of_host("box1", now=NOW + LIFE_S)
    assert (found.outcome, found.settled_at) == (Ending.EXPIRED, NOW + LIFE_S)
    again = give(store, now=NOW + LIFE_S)
    assert again.order_id > order.order_id
    assert store.task_orders.exchange("box1", [], now=NOW + LIFE_S) == [123]


def test_an_answer_has_a_bounded_number_of_orders(store: JobStore) -> None:
    for number in range(TAKEN_MAX + 1):
        give(store, number)

    first = store.task_orders.exchange("box1", [], now=NOW)
    results = [result(TaskOutcome.GONE, task_id=each) for each in first]

    assert len(first) == TAKEN_MAX
    assert store.task_orders.exchange("box1", results, now=NOW) == [TAKEN_MAX]


def test_old_orders_are_deleted_and_texts_are_storable(store: JobStore) -> None:
    old = give(store, who="a\0\ud800")
    assert old.ordered_by == "a\\x00\\ud800"

    give(store, 124, now=NOW + KEPT_S + 1)

    assert store.task_orders.order(old.order_id, now=NOW + KEPT_S + 1) is None
