"""What the settings of every program have in common: how a bad one is told to the person who set it."""

from collections.abc import Iterator

from pydantic import ValidationError
from pydantic_settings import BaseSettings


def complaints(error: ValidationError, settings: type[BaseSettings]) -> Iterator[str]:
    """What is wrong with the settings, a line each: the option, its environment variable, and what was wanted."""
    for found in error.errors():
        if not found["loc"]:
            yield found["msg"]
            continue
        name = str(found["loc"][0])
        option = f"--{name.replace('_', '-')} (or {settings.model_config.get('env_prefix', '')}{name.upper()})"
        if found["type"] == "missing":
            yield f"{option} is wanted: {settings.model_fields[name].description}"
        else:
            yield f"{found['input']!r} will not do for {option}: {found['msg']}"
