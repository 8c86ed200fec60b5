"""Values built from other values."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def made_from(source: object, kind: type[T], /, **others: Any) -> T:
    """Build a dataclass from equally named attributes of `source`, and `others`."""
    names = [each.name for each in fields(kind) if each.name not in others and hasattr(source, each.name)]
    return kind(**{name: getattr(source, name) for name in names}, **others)
