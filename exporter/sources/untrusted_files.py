"""Files of tenants that are invalid or unreadable."""

import os
from collections import Counter
from pathlib import Path


class InvalidFiles:
    """Files that are invalid or unreadable: counts, and the first one by reason."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first_errors: dict[str, str] = {}

    def add(self, reason: str, which: Path | str, message: Exception | str) -> None:
        """Count one file; only the first of a reason is kept."""
        self.counts[reason] += 1
        if reason not in self.first_errors:
            said = message.strerror if isinstance(message, OSError) else None
            name = os.fsencode(which).decode("utf-8", "backslashreplace")  # other bytes would break the page
            self.first_errors[reason] = f"{name}: {said or message}"
