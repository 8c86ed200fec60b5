"""Lines about episodes in the terminal of `gpuwarden up`: seen, decided, done."""

from collections.abc import Callable
from typing import Final

from gpuwarden.errors import GpuwardenError
from gpuwarden.format import format_duration
from remediator.ledger.journal import WAIT
from remediator.ledger.ledger import Ledger
from remediator.ledger.reports import JournalLine
from remediator.reasons import Reason

CHECK_S: Final = 1.0
"""Interval between reads of the journal, seconds."""
RETRY_S: Final = 30.0
"""Interval after a failed read, seconds. `gpuwarden status` names the fault."""
LINES_MAX: Final = 20
"""Most lines of one read."""


class EpisodeLines:
    """Says what happens to each episode, from the journal. It begins with the first entry after its start."""

    def __init__(self, ledger_url: str, *, say: Callable[[str], None]) -> None:
        self._url = ledger_url
        self._say = say
        self._ledger: Ledger | None = None
        self._last = 0
        self._due_s = 0.0
        self._said: dict[int, set[str]] = {}

    def tick(self, now_s: float) -> None:
        """Say the new entries, at most once a second."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + CHECK_S
        try:
            if self._ledger is None:
                self._ledger = Ledger.open(self._url, migrate=False)
                self._last = self._ledger.reports.last_entry()
            found = self._ledger.reports.journal_after(self._last)
        except GpuwardenError:
            self._due_s = now_s + RETRY_S
            return
        texts = list[str]()
        for each in found:
            self._last = each.entry_id
            happened = line(each)
            said = self._said.setdefault(each.episode.episode_id, set())
            if happened is not None and happened[0] not in said:
                said.add(happened[0])
                texts.append(f"episode {each.episode.episode_id} {happened[0]}: {happened[1]}")
            if each.entry.step == "close":
                del self._said[each.episode.episode_id]
        for text in texts[:LINES_MAX]:
            self._say(text)
        if len(texts) > LINES_MAX:
            self._say(f"and {len(texts) - LINES_MAX} more lines: see `gpuwarden ledger list`")

    def close(self) -> None:
        """Close the ledger."""
        if self._ledger is not None:
            self._ledger.close()


def line(found: JournalLine) -> tuple[str, str] | None:
    """What happened, and a text; `None` for an entry that is a detail. The first is said once per episode.

    Pure.
    """
    entry, episode = found.entry, found.episode
    remedy = episode.remedy.replace("_", " ")
    match entry.act, entry.step:
        case "saw", "alert" if entry.state == "firing":
            return "seen", entry.message
        case "would", _:
            return "dry run", f"{entry.message}; `gpuwarden arm` allows it"
        case "decided", "begin":
            return "decided", f"{remedy} {episode.worker}: {entry.message}"
        case "decided", "close":
            took = format_duration(entry.at - episode.opened_at)
            return "done", f"{(entry.state or '').replace('_', ' ')} after {took}: {entry.message}"
        case "decided", name if name == WAIT:
            reason = next((each for each in Reason if each == entry.reason), None)
            if reason is not None and reason.needs_operator and reason is not Reason.DRY_RUN:
                return f"held, {reason}", f"{entry.message}. {reason.advice}"
        case "failed", step:
            return f"failed to {step}", entry.message
    return None
