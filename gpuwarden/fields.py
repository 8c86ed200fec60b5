"""Values that are made of others with the same names."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def made_from(source: object, kind: type[T], /, **others: Any) -> T:
    """A dataclass whose fields are the attributes of the same names; `others` are given, and not looked for.

    A field that the source does not have keeps its default.
    """
    names = [each.name for each in fields(kind) if each.name not in others and hasattr(source, each.name)]
    return kind(**{name: getattr(source, name) for name in names}, **others)
