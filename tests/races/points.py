"""Where a program can be cut short: before and after every commit, every look and every act, each counted by its kind.

A commit is caught where SQLAlchemy hands it to the driver, or a statement is handed past it, so that none is forgotten.
`write` and `read` are commits; `look` and `about` are questions to the engine and the exporter; `stop` and `start` are
acts.
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
    """The process ended here, as by SIGKILL."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """What happens to a program at its `nth` point of a kind; `meanwhile` names what others do just after it."""

    kind: Kind
    nth: int
    harm: Harm
    meanwhile: str = ""

    def __str__(self) -> str:
        return f"{self.harm} {self.kind} {self.nth}" + (f": {self.meanwhile}" if self.meanwhile else "")


class Points:
    """Counts the points of the program at work and lets happen what was asked for."""

    def __init__(self, meanwhile: Callable[[str], None]) -> None:
        self.actor: Any = None
        self.hits = 0
        self._meanwhile = meanwhile
        self._trouble: Trouble | None = None
        self._counts: Counter[Kind] = Counter()

    @contextmanager
    def program(self, actor: Any, trouble: Trouble | None = None) -> Iterator[None]:
        """Inside, what commits and acts is `actor`, and `trouble` awaits it."""
        before = self.actor, self._trouble, self._counts
        self.actor, self._trouble, self._counts = actor, trouble, Counter()
        try:
            yield
        finally:
            self.actor, self._trouble, self._counts = before

    def around(self, kind: Kind, act: Callable[[], Any], refusal: Exception | type[Exception]) -> Any:
        """Do something at a point; `refusal` is what a failure of it looks like to the program."""
        harm = self.before(kind, refusal)
        found = act()
        self.after(harm, refusal)
        return found

    def before(self, kind: Kind, refusal: Exception | type[Exception]) -> Harm | None:
        """A point is come to; what is to be told to `after`."""
        harm = self._next(kind)
        if harm == "killed before":
            raise Killed
        if harm == "refused":
            raise refusal
        return harm

    def after(self, harm: Harm | None, refusal: Exception | type[Exception]) -> None:
        """What was to be done there is done."""
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
    """Make every commit of `engine` a point, and tell after each that wrote whose it was; what is returned ends it."""
    stops = [watch(engine, points, on_write) for watch in (_watch_transactions, _watch_autocommit)]

    def stop() -> None:
        for each in reversed(stops):
            each()

    return stop


def _watch_transactions(engine: Engine, points: Points, on_write: Callable[[Any], None]) -> Callable[[], None]:
    dialect: Any = engine.dialect
    commit: Callable[[Any], None] = dialect.do_commit

    def begun(connection: Connection) -> None:
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
            commit(borrowed)  # of nothing
        else:
            points.around("write" if writes else "read", act, _refusal(engine))

    event.listen(engine, "begin", begun)
    dialect.do_commit = do_commit

    def stop() -> None:
        event.remove(engine, "begin", begun)
        del dialect.do_commit

    return stop


def _watch_autocommit(engine: Engine, points: Points, on_write: Callable[[Any], None]) -> Callable[[], None]:
    """The statements that are transactions of their own."""

    def comes(connection: Connection, *_: Any) -> None:
        if connection.get_execution_options().get("autocommit", False):
            connection.info["harm"] = points.before("write", _refusal(engine))

    def is_done(connection: Connection, *_: Any) -> None:
        if connection.get_execution_options().get("autocommit", False):
            on_write(points.actor)
            points.after(connection.info["harm"], _refusal(engine))

    event.listen(engine, "before_cursor_execute", comes)
    event.listen(engine, "after_cursor_execute", is_done)

    def stop() -> None:
        event.remove(engine, "before_cursor_execute", comes)
        event.remove(engine, "after_cursor_execute", is_done)

    return stop


def _refusal(engine: Engine) -> Exception:
    dialect: Any = engine.dialect
    refusal: Exception = dialect.dbapi.OperationalError("played: it does not answer")
    return refusal
