"""What a gateway refuses of a request."""

import json
from typing import Any
from unittest.mock import Mock

import pytest
from pydantic import ValidationError

from gpuwarden.format import error_text, trace_end
from gpuwarden.gateway.operations import Complete, Fail, FailItem, NotHeldError

CLAIM: dict[str, Any] = {"worker": "w1", "job_id": 1, "attempt": 1, "incarnation": "i1"}


def test_reason_with_nul_is_refused() -> None:
    for its in ({"reason": "a\0b"}, {"reason": "a", "traceback": "a\0b"}):
        with pytest.raises(ValidationError):
            Fail(**CLAIM, **its)


def test_reason_and_traceback_of_any_error_are_taken() -> None:
    error = RuntimeError("a\0b\udc80\n" * 10_000)
    reason, traceback = error_text(error), trace_end(error)

    Fail.model_validate_json(json.dumps({**CLAIM, "reason": reason, "traceback": traceback}))
    FailItem.model_validate_json(json.dumps({**CLAIM, "item": "a", "reason": reason}))


def test_refused_completion_is_tried_once() -> None:
    store = Mock()
    store.claims.complete.return_value = False

    store.claims.is_of.return_value = True
    assert Complete(**CLAIM).run(store, "box1") is False
    store.claims.is_of.return_value = False
    with pytest.raises(NotHeldError):
        Complete(**CLAIM).run(store, "box1")

    assert [call.kwargs["of"] for call in store.claims.complete.call_args_list] == [("box1", "w1")] * 2
