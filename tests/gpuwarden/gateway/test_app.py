"""What a caller's repeated request gets."""

import asyncio

import pytest

from gpuwarden.gateway.app import SLOT_BOUNDS, Caller
from gpuwarden.gateway.upstream import Answer, failed

DONE = Answer(status=200, content={"result": True}, outcome="done")


@pytest.mark.parametrize(
    ("first", "kept"),
    [
        (DONE, True),
        (failed(409, "ReplacedError", ""), True),
        (failed(429, "rate", ""), False),
        (failed(500, "queue", ""), False),
        (failed(503, "queue", ""), False),
    ],
    ids=["done", "an error of the queue", "too many requests", "an unexpected error", "no answer"],
)
def test_only_what_was_carried_out_is_the_answer_of_a_repetition(first: Answer, kept: bool) -> None:
    caller, answers = Caller(name="w1", host="box1", may_be=lambda _: True, bounds=SLOT_BOUNDS), [first, DONE]

    async def carry_out() -> Answer:
        return answers.pop(0)

    async def twice() -> list[Answer]:
        return [await caller.once("complete 1", carry_out) for _ in range(2)]

    assert asyncio.run(twice()) == [first, first if kept else DONE]


def test_slot_over_its_rate_is_refused() -> None:
    caller = Caller(name="w1", host="box1", may_be=lambda _: True, bounds=SLOT_BOUNDS)

    asked = [caller.may_ask() for _ in range(int(SLOT_BOUNDS.burst) + 500)]

    assert asked[0]
    assert not asked[-1]
