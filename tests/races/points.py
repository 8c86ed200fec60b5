"""Points at which a program can be interrupted: before and after each commit, request and action, counted by kind.

SQLAlchemy events catch every commit and every autocommit statement. `write` and `read` are commits, `look` and `about`
are requests to the engine and the exporter, and `stop` and `start` are actions.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

from sqlalchemy import Connection, Engine, event

Kind = Literal["write", "read", "look", "about", "stop", "start"]
KINDS: Final[tuple[Kind, ...]] = ("write", "read", "look", "about", "stop", "start")

Harm = Literal["killed before", "killed after", "refused", "unacknowledged", "meanwhile"]
HARMS: Final[tuple[Harm, ...]] = ("killed before", "killed after", "refused", "unacknowledged", "meanwhile")


class Killed(BaseException):
    """The process ends here, as by SIGKILL."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """A fault at the `nth` point of a kind. `meanwhile` names what other programs do directly after it."""

    kind: Kind
    nth: int
    harm: Harm
    meanwhile: str = ""

    def __str__(self) -> str:
        return f"{self.harm} {self.kind} {self.nth}" + (f": {self.meanwhile}" if self.meanwhile else "")


class Points:
    """Counts the points of the current program and injects its fault."""

    def __init__(self, meanwhile: Callable[[str], None]) -> None:
        self.actor: Any = None
        self.hits = 0
        self._meanwhile = meanwhile
        self._trouble: Trouble | None = None
        self._counts: Counter[Kind] = Counter()

    @contextmanager
    def program(self, actor: Any, trouble: Trouble | None = None) -> Iterator[None]:
        """Run a block as the program `actor`, with the fault `trouble`."""
        before = self.actor, self._trouble, self._counts
        self.actor, self._trouble, self._counts = actor, trouble, Counter()
        try:
            yield
        finally:
            self.actor, self._trouble, self._counts = before

    def around(self, kind: Kind, act: Callable[[], Any], refusal: Exception | type[Exception]) -> Any:
        """Do something at a point. The program sees a failure as `refusal`."""
        harm = self.before(kind, refusal)
        found = act()
        self.after(harm, refusal)
        return found

    def before(self, kind: Kind, refusal: Exception | type[Exception]) -> Harm | None:
        """Reach a point. Returns the argument of `after`."""
        harm = self._next(kind)
        if harm == "killed before":
            raise Killed
        if harm == "refused":
            raise refusal
        return harm

    def after(self, harm: Harm | None, refusal: Exception | type[Exception]) -> None:
        """Leave a point, after its action."""
        if harm == "killed after":
            raise Killed
        if harm == "unacknowledged":
            raise refusal
        if harm == "meanwhile" and (trouble := self._trouble) is not None:
            with self.program(None):
                self._meanwhile(trouble.meanwhile)

    def _next(self, kind: Kind) -> Harm | None:
        trouble = self._trouble
        self._counts[kind] += 1
        if trouble is None or trouble.kind != kind or trouble.nth != self._counts[kind]:
            return None
        self.hits += 1
        return trouble.harm


def watch_commits(engine: Engine, points: Points, on_write: Callable[[Any], None]) -> Callable[[], None]:
    """Make every commit a point, and call `on_write` with the program after each write. Returns the undo."""
    stops = [watch(engine, points, on_write) for watch in (_watch_transactions, _watch_autocommit)]

    def stop() -> None:
        for each in reversed(stops):
            each()

    return stop


def _watch_transactions(engine: Engine, points: Points, on_write: Callable[[Any], None]) -> Callable[[], None]:
    dialect: Any = engine.dialect
    commit: Callable[[Any], None] = dialect.do_commit

    def on_begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        connection.connection.info["writes"] = options.get("writes", False)
        connection.connection.info["autocommit"] = options.get("autocommit", False)

    def do_commit(borrowed: Any) -> None:
        writes: bool = borrowed.info.get("writes", False)

        def act() -> None:
            commit(borrowed)
            if writes:
                on_write(points.actor)

        if borrowed.info.get("autocommit", False):
            commit(borrowed)  # an empty commit
        else:
            points.around("write" if writes else "read", act, _refusal(engine))

    event.listen(engine, "begin", on_begin)
    dialect.do_commit = do_commit

    def stop() -> None:
        event.remove(engine, "begin", on_begin)
        del dialect.do_commit

    return stop


def _watch_autocommit(engine: Engine, points: Points, on_write: Callable[[Any], None]) -> Callable[[], None]:
    """Watch statements that run in autocommit."""

    def before_execute(connection: Connection, *_: Any) -> None:
        if connection.get_execution_options().get("autocommit", False):
            connection.info["harm"] = points.before("write", _refusal(engine))

    def after_execute(connection: Connection, *_: Any) -> None:
        if connection.get_execution_options().get("autocommit", False):
            on_write(points.actor)
            points.after(connection.info["harm"], _refusal(engine))

    event.listen(engine, "before_cursor_execute", before_execute)
    event.listen(engine, "after_cursor_execute", after_execute)

    def stop() -> None:
        event.remove(engine, "before_cursor_execute", before_execute)
        event.remove(engine, "after_cursor_execute", after_execute)

    return stop


def _refusal(engine: Engine) -> Exception:
    dialect: Any = engine.dialect
    refusal: Exception = dialect.dbapi.OperationalError("played: no answer")
    return refusal
