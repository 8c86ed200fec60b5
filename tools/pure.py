"""Print the files of the import contract `pure` in pyproject.toml, separated by commas."""

import tomllib
from pathlib import Path
from typing import Final

CHECKOUT: Final = Path(__file__).resolve().parent.parent


def pure_files(checkout: Path = CHECKOUT) -> list[str]:
    """Paths of the pure modules and packages, relative to the checkout."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (each for each in project["tool"]["importlinter"]["contracts"] if each.get("id") == "pure")
    found = []
    for name in contract["source_modules"]:
        path = name.replace(".", "/")
        found.append(f"{path}/*.py" if (checkout / path).is_dir() else f"{path}.py")
    return found


if __name__ == "__main__":
    print(",".join(pure_files()))
