"""What a job returns, made storable: foreign code may return anything."""

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from gpuwarden.errors import WorkerStopping
from gpuwarden.format import error_text, storable, text_of
from gpuwarden.queue.models import RESULT_MAX_BYTES, Result, ResultError, check_result

DEPTH_MAX: Final = 100
"""Levels of a result that are kept. Deeper values become null."""

INT_BITS_MAX: Final = 8192
"""Largest kept integer. Python refuses to write far larger ones."""


def keep_result(result: Any) -> tuple[Result, str | None]:
    """The storable part of a job's result, and why it is only a part; `None` if it is whole.

    NaN and infinite numbers become null, other objects their text. If the result is too long, the longest values of its
    top level become null.
    """
    try:
        check_result(result)
    except WorkerStopping:
        raise
    except BaseException as error:  # noqa: BLE001 - a dictionary of foreign code
        kept = _Keeper().keep(result, 0)
        if isinstance(kept, dict):
            _shorten(kept)
        try:
            check_result(kept)
        except ResultError:
            kept = None
        return kept, storable(str(error)) if isinstance(error, ResultError) else error_text(error)
    return result, None


class _Keeper:
    """Copies a value of any type as JSON."""

    def __init__(self) -> None:
        self._left = RESULT_MAX_BYTES  # each value takes a byte or more

    def keep(self, value: Any, depth: int) -> Any:
        try:
            return self._keep(value, depth)
        except WorkerStopping:
            raise
        except BaseException:  # noqa: BLE001 - foreign code
            return storable(text_of(value))

    def _keep(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else None
        if isinstance(value, str):
            return value.replace("\0", "\\x00")
        if isinstance(value, int):
            return int(value) if value.bit_length() <= INT_BITS_MAX else None
        if depth == DEPTH_MAX or self._left <= 0:
            return None
        return self._keep_many(value, depth + 1)

    def _keep_many(self, value: Any, depth: int) -> Any:
        if isinstance(value, Mapping):
            kept = {}
            for key, each in value.items():
                if self._left <= 0:
                    break
                kept[text_of(key).replace("\0", "\\x00")] = self.keep(each, depth)
            return kept
        if isinstance(value, list | tuple | set | frozenset):
            items = []
            for each in value:
                if self._left <= 0:
                    break
                items.append(self.keep(each, depth))
            return items
        return self.keep(value.item(), depth)  # a number of NumPy or PyTorch


def _shorten(kept: dict[str, Any]) -> None:
    sizes = {key: len(json.dumps(value)) for key, value in kept.items()}
    size = len(json.dumps(kept))
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        if size <= RESULT_MAX_BYTES:
            return
        size -= sizes[key] - len("null")
        kept[key] = None
