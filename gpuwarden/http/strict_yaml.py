"""YAML in which no key is repeated."""

from collections.abc import Hashable
from typing import Any

import yaml

from gpuwarden.errors import GpuwardenError


class RepeatedError(GpuwardenError):
    """A key is repeated in a mapping. YAML readers keep the last one."""


class NotYamlError(GpuwardenError):
    """The text is not YAML. `where` is empty, or ` in line N`."""

    def __init__(self, where: str) -> None:
        super().__init__(f"not valid YAML{where}")


def parse(text: bytes) -> Any:
    """Parse one document.

    Raises:
        RepeatedError: a key is repeated.
        NotYamlError: it is not YAML.
    """
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - it is a SafeLoader
    except RepeatedError:
        raise
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        # PyYAML raises any of these for a bad tag. Its text repeats parts of the file.
        mark = getattr(error, "problem_mark", None)
        raise NotYamlError(f" in line {mark.line + 1}" if mark else "") from None


class _Loader(yaml.SafeLoader):
    """Refuses a repeated key: the first of two sections would protect nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        if isinstance(node, yaml.MappingNode):  # else the parent class reports it
            self.flatten_mapping(node)
            seen: set[Any] = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if not isinstance(key, Hashable):
                    break  # the parent class reports it
                if key in seen:
                    where = f"once more in line {key_node.start_mark.line + 1}"
                    raise RepeatedError(f"{ascii(key)[:40]} is written twice, {where}: remove one")
                seen.add(key)
        return super().construct_mapping(node, deep)
