"""What a caller's repeated request gets, and what is counted."""

import asyncio
import re
from pathlib import Path

import pytest

import gpuwarden.gateway
from gpuwarden.gateway.app import SLOT_BOUNDS, Caller
from gpuwarden.gateway.metrics import OUTCOMES, REASONS
from gpuwarden.gateway.upstream import NOT_HELD, Answer, failed
from gpuwarden.gateway.wire import ERRORS

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


def test_every_reason_and_outcome_is_documented() -> None:
    """Label values of metrics, from the places in the code that make them."""
    code = "".join(path.read_text() for path in Path(gpuwarden.gateway.__path__[0]).glob("*.py"))
    refusals = re.findall(r'RefusedError\(\s*\d+,\s*"(\w+)"', code)
    failures = re.findall(r'failed\(\d+, "(\w+)"', code)

    assert set(REASONS) == {*refusals, NOT_HELD}
    assert set(OUTCOMES) == {"done", NOT_HELD, *ERRORS, *failures}
