"""Jobs as functions.

    from gpuwarden import Queue, current

    queue = Queue()                                   # $GPUWARDEN_QUEUE_DB, else that of `gpuwarden up`

    @queue.model("sdxl")
    def load():                                       # the worker keeps it loaded
        return DiffusionPipeline.from_pretrained("stabilityai/stable-diffusion-xl-base-1.0").to("cuda")

    @queue.job(model="sdxl")
    def paint(pipeline, prompt, out):
        pipeline(prompt, callback_on_step_end=current().on_step).images[0].save(out)
        return {"picture": out}

    paint.submit("a cat", out="/data/cat.png")        # in any program; .result() waits for what it returns

`gpuwarden worker run tasks` runs them: a `Queue` is a worker's handler. A job may run twice, so its output must be
safe to write again.
"""

import functools
import gc
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, Never, ParamSpec, Self, TypeVar

import structlog

from gpuwarden.db.errors import NoAnswerError
from gpuwarden.errors import GpuwardenError
from gpuwarden.format import error_text, printable, trace_lines, trace_of
from gpuwarden.gateway.client import GatewayStore
from gpuwarden.job import FINAL, LEASE_S, ItemState, JobClass, JobId, Phase, State
from gpuwarden.queue import (
    PRIORITY,
    Item,
    Job,
    Result,
    ResultError,
    Submission,
    SubmissionError,
    keep_result,
)
from gpuwarden.queue.models import PAYLOAD_MAX_BYTES, check_json
from gpuwarden.queue.open import created, default_store
from gpuwarden.queue.outcomes.fatal_errors import Hook, is_fatal
from gpuwarden.reporter import Reporter

if TYPE_CHECKING:
    from gpuwarden.queue import JobStore

log: Final = structlog.get_logger("job")

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E")

_Kind: Final = inspect.Parameter

RETRY_S: Final = 1.0
"""Seconds between retries while the queue does not answer."""

LOOK_S: Final = 1.0
"""Seconds between checks of a job that is waited for."""


class TaskError(GpuwardenError):
    """An unknown function, or one that cannot be a job."""


class ItemsFailedError(GpuwardenError):
    """Items of a run failed."""


class JobFailedError(GpuwardenError):
    """The job failed or was cancelled."""

    def __init__(self, job: Job) -> None:
        traceback = "" if job.traceback is None else "\n".join(["", "", *trace_lines(job.traceback)])
        reason = printable(job.reason or "no reason given")
        super().__init__(f"job {job.job_id} {job.state}: {reason}{traceback}")
        self.job = job


class JobTimeoutError(GpuwardenError):
    """The job has not ended in time."""


class ArgumentError(SubmissionError, TypeError):
    """Arguments that do not fit a job's function, or are not JSON."""


class TakenItem:
    """An item of this attempt. `with item:` reports its outcome; an exception fails it."""

    def __init__(self, name: str, settle: Callable[[str, Result, str | None], bool], fatal: Hook = None) -> None:
        self.name = name
        self.result: Result = None
        self.failed: str | None = None
        self._settle = settle
        self._fatal = fatal

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if error is not None and (not isinstance(error, Exception) or is_fatal(error, self._fatal)):
            return False  # the worker stops, or the job fails: the item goes back
        if error is None:
            self.result, lost = keep_result(self.result)
            if lost is not None:
                log.warning("result kept in part", item=self.name, reason=lost)
        else:
            self.failed = error_text(error)
            log.error("item failed", item=self.name, reason=self.failed, exception=trace_of(error))
        if not self._settle(self.name, self.result, self.failed):
            raise TaskError(f"item {self.name!r} no longer belongs to this attempt")
        return True


@dataclass(frozen=True, kw_only=True)
class Current:
    """The attempt that runs in this process."""

    job: Job
    report: Reporter
    store: "JobStore | GatewayStore"
    fatal: Hook = None

    def items(self) -> Iterator[TakenItem]:
        """The items of the job's run, one by one, each for a `with` block.

        Raises:
            ItemsFailedError: at the end, if items failed.
        """
        done = failed = 0
        claim: dict[str, Any] = {"attempt": self.job.attempt, "incarnation": self.job.claimed_by}

        def settle(name: str, result: Result, reason: str | None) -> bool:
            how: dict[str, Any] = {**claim, "item": name, "now": self.store.now()}
            if reason is None:
                return self.store.items.finish(self.job.job_id, **how, result=result)
            return self.store.items.fail(self.job.job_id, **how, reason=reason)

        def take() -> Item | None:
            return self.store.items.take(self.job.job_id, **claim, now=self.store.now())

        while taken := self._answer(take):
            item = TakenItem(taken.item, lambda *outcome: self._answer(lambda: settle(*outcome)), self.fatal)
            yield item
            done, failed = done + (item.failed is None), failed + (item.failed is not None)
            self.report.items(done=done, failed=failed)
            self.report.step()
        if self.job.run_id is not None:
            counts = self._answer(lambda: self.store.item_counts(self.job))
            if counts[ItemState.FAILED] and counts[ItemState.FAILED] + counts[ItemState.DONE] == counts.total():
                raise ItemsFailedError(f"{counts[ItemState.FAILED]} of the run's {counts.total()} items have failed")

    def _answer(self, ask: Callable[[], E]) -> E:
        """Ask the queue, with retries for a lease's length."""
        give_up_s = time.monotonic() + LEASE_S
        while True:
            try:
                return ask()
            except NoAnswerError as error:
                if time.monotonic() >= give_up_s:
                    raise
                log.warning("queue does not answer; asking again", reason=str(error))
                self.report.step_beat()  # it is not stalled
                time.sleep(RETRY_S)

    def step(self) -> None:
        """Report a step; takes under a microsecond."""
        self.report.step()

    def steps(self, over: Iterable[E]) -> Iterator[E]:
        """Iterate, with a step after each element."""
        for each in over:
            yield each
            self.report.step()

    def on_step(self, _pipeline: object, _step: int, _timestep: object, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """A step, as diffusers' `callback_on_step_end`."""
        self.report.step()
        return kwargs

    def ranks(self) -> list[Job]:
        """The ranks of this job in order, with their hosts once claimed."""
        return [self.job] if self.job.gang is None else self._answer(lambda: self.store.ranks(self.job))

    def phase(self, phase: Phase | str, *, timeout_s: float | None = None, busy_timeout_s: float | None = None) -> None:
        """Set the phase: `load`, `step`, `eval`, `checkpoint`, `save` or `idle`.

        The job may be inactive in it for `timeout_s`, at least 30 s, and in `step` busy for `busy_timeout_s`.
        """
        self.report.phase(Phase(phase), timeout_s=timeout_s, busy_timeout_s=busy_timeout_s)


_running: list[Current] = []


def current() -> Current:
    """The job of this process.

    Raises:
        TaskError: the process has none.
    """
    if not _running:
        raise TaskError("no job runs in this process: call current() in a function that a worker runs")
    return _running[-1]


@dataclass(frozen=True, kw_only=True)
class Handle:
    """A submitted job."""

    job_id: JobId
    _queue: "Queue" = field(repr=False)

    def job(self) -> Job:
        """The job as it is now."""
        return self._queue.store.job(self.job_id)

    @property
    def state(self) -> State:
        """The job's state."""
        return self.job().state

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait, and return what the function returned, as JSON.

        Raises:
            ResultError: only a part of it could be stored.
            JobFailedError: as in `wait`.
            JobTimeoutError: as in `wait`.
        """
        job = self._ended(timeout_s)
        if job.reason is not None:
            raise ResultError(f"job {job.job_id} completed: {printable(job.reason)}; wait() returns the part")
        return job.result

    def wait(self, timeout_s: float | None = None) -> Result:
        """Wait, and return what was stored of the result.

        Raises:
            JobFailedError: the job failed or was cancelled.
            JobTimeoutError: it has not ended after `timeout_s` seconds.
        """
        return self._ended(timeout_s).result

    def _ended(self, timeout_s: float | None) -> Job:
        job = self._queue.await_end(self.job_id, timeout_s)
        if job.state is not State.COMPLETED:
            raise JobFailedError(job)
        return job

    def cancel(self, reason: str = "cancelled by its submitter") -> bool:
        """Cancel the job; its worker stops within a second."""
        return self._queue.store.admin.cancel(self.job_id, reason=reason, now=self._queue.store.now())


class Task(Generic[P, R]):
    """A function that can be a job. A call runs it here and now."""

    def __init__(
        self,
        queue: "Queue",
        function: Callable[P, R],
        template: Submission,
        retry_on: tuple[type[BaseException], ...] = (Exception,),
    ) -> None:
        self.name = function.__name__
        self.template = template
        self.retry_on = retry_on
        self._queue = queue
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function in this process."""
        return self.function(*args, **kwargs)

    def submit(self, *args: Any, **kwargs: Any) -> Handle:
        """Submit a call of the function; a model is not an argument.

        Raises:
            ArgumentError: an argument does not fit the signature, or is not JSON.
        """
        return self._queue.submit(self.submission(*args, **kwargs))

    def submission(self, *args: Any, **kwargs: Any) -> Submission:
        """The submission, for `store.runs.submit_run` or changes by `dataclasses`; raises as `submit`."""
        its = {name: getattr(self.template, name) for name in Submission.__dataclass_fields__ if name != "payload"}
        return Submission(**its, payload={"task": self.name, **self._call(args, kwargs)})

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The call as JSON, with arguments by name where the function allows it."""
        signature = inspect.signature(self.function)
        model = (None,) if self._queue.loads(self.template.model) else ()
        try:
            bound = signature.bind(*model, *args, **kwargs)
        except TypeError as error:
            raise ArgumentError(f"{self.name}{signature}: {error}") from None
        for name, value in bound.arguments.items():
            check_json(value, f"argument {name!r} of {self.name}()", PAYLOAD_MAX_BYTES, ArgumentError)
        kinds = {name: signature.parameters[name].kind for name in bound.arguments}
        of_call = [*bound.arguments][len(model) :]
        if _Kind.VAR_POSITIONAL in kinds.values() or any(kinds[name] is _Kind.POSITIONAL_ONLY for name in of_call):
            return {"arguments": bound.kwargs, "positional": list(bound.args[len(model) :])}
        named = {name: bound.arguments[name] for name in of_call if kinds[name] is _Kind.POSITIONAL_OR_KEYWORD}
        return {"arguments": {**named, **bound.kwargs}}


class Queue:
    """Functions that are jobs of one queue, and their models.

    Args:
        url: the queue's database; default `default_store()`.
        name: default queue of the jobs.
        models_max: models that a worker keeps loaded.
        fatal: whether the worker's process cannot survive this exception of a job.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        name: str = "gpu",
        models_max: int = 1,
        fatal: Hook = None,
    ) -> None:
        if models_max < 1:
            raise TaskError(f"models_max {models_max} is invalid: use 1 or more")
        self._url = url
        self._store: JobStore | None = None
        self._served: GatewayStore | None = None
        self.name = name
        self.fatal = fatal
        self._models_max = models_max
        self._loaders: dict[str, Callable[[], Any]] = {}
        self._tasks: dict[str, Task[Any, Any]] = {}
        self._loaded: dict[str, Any] = {}

    @property
    def store(self) -> "JobStore":
        """The open queue.

        Raises:
            TaskError: this worker has a gateway, which takes no new jobs.
        """
        if self._served is not None:
            raise TaskError("a worker behind a gateway submits no jobs: submit them from a program with a database")
        if self._store is None:
            self._store = created(self.url)
        return self._store

    def serve_from(self, store: "JobStore | GatewayStore") -> None:
        """Use the queue that a worker has opened."""
        self._store, self._served = (None, store) if isinstance(store, GatewayStore) else (store, None)

    @property
    def url(self) -> str:
        """The database URL."""
        return self._url or default_store()

    @property
    def loaded_model(self) -> str | None:
        """The loaded model that was used last."""
        return next(iter(reversed(list(self._loaded))), None)  # a list: another thread may change it

    def model(self, name: str) -> Callable[[Callable[[], E]], Callable[[], E]]:
        """Register a model's loader. Jobs get its result as first argument.

        Raises:
            TaskError: the model has a loader.
        """

        def register(load: Callable[[], E]) -> Callable[[], E]:
            if name in self._loaders:
                raise TaskError(f"model {name!r} has a loader already: {self._loaders[name].__name__}")
            self._loaders[name] = load
            return load

        return register

    def job(  # noqa: PLR0913 - named arguments, each with its own meaning
        self,
        *bare: Never,
        model: str | None = None,
        queue: str | None = None,
        job_class: JobClass | str | None = None,
        reports_steps: bool = True,
        priority: int = PRIORITY,
        budget_s: float | None = None,
        stall_timeout_s: float | None = None,
        busy_timeout_s: float | None = None,
        ranks: int = 1,
        retries: int = 0,
        retry_on: type[BaseException] | tuple[type[BaseException], ...] = Exception,
    ) -> Callable[[Callable[P, R]], Task[P, R]]:
        """Register a function as a job; see `Submission`.

        Raises:
            TaskError: the name is taken, or an argument is invalid.
        """
        if bare:
            raise TaskError("a job needs parentheses: write @queue.job()")
        kinds = retry_on if isinstance(retry_on, tuple) else (retry_on,)
        if not all(isinstance(each, type) and issubclass(each, BaseException) for each in kinds):
            raise TaskError(f"retry_on {retry_on!r} is invalid: use an exception class or a tuple of them")
        if job_class is not None and job_class not in list(JobClass):
            raise TaskError(f"unknown job class {job_class!r}: use one of {', '.join(JobClass)}")
        template = Submission(
            queue=queue or self.name,
            job_class=None if job_class is None else JobClass(job_class),
            model=model,
            reports_steps=reports_steps,
            priority=priority,
            budget_s=budget_s,
            stall_timeout_s=stall_timeout_s,
            busy_timeout_s=busy_timeout_s,
            ranks=ranks,
            retries_max=retries,
        )

        def register(function: Callable[P, R]) -> Task[P, R]:
            task = Task(self, function, template, kinds)
            if task.name in self._tasks:
                raise TaskError(f"two jobs of the queue are named {task.name!r}: rename one")
            self._tasks[task.name] = task
            return task

        return register

    def loads(self, model: str | None) -> bool:
        """Whether jobs of this model get it as first argument."""
        return model in self._loaders

    def submit(self, submission: Submission) -> Handle:
        """Submit a job."""
        return Handle(job_id=self.store.runs.submit(submission, now=self.store.now()), _queue=self)

    def await_end(self, job_id: JobId, timeout_s: float | None) -> Job:
        """Wait until the job is over; see `Handle.wait`."""
        give_up_s = None if timeout_s is None else time.monotonic() + timeout_s
        changes = self.store.changes()
        try:
            while (job := self.store.job(job_id)).state not in FINAL:
                left_s = LOOK_S if give_up_s is None else give_up_s - time.monotonic()
                if left_s <= 0:
                    raise JobTimeoutError(f"job {job_id} is {job.state}, after {timeout_s:g} s")
                changes.wait(min(left_s, LOOK_S))
        finally:
            changes.close()
        return job

    def __call__(self, job: Job, report: Reporter) -> Callable[[], Result]:
        """A worker's handler: load the job's model and return its work."""
        name = job.payload.get("task")
        task = self._tasks.get(name) if isinstance(name, str) else None
        if task is None:
            known = ", ".join(sorted(self._tasks)) or "none"
            raise TaskError(f"job {job.job_id} names the unknown function {name!r}: this queue has {known}")
        before = (self._model(str(task.template.model)),) if self.loads(task.template.model) else ()

        def work() -> Result:
            _running.append(Current(job=job, report=report, store=self._served or self.store, fatal=self.fatal))
            try:
                return task.function(*before, *job.payload.get("positional", ()), **job.payload.get("arguments", {}))
            finally:
                _running.pop()

        return work

    def is_retried(self, job: Job, error: BaseException) -> bool:
        """Whether `retry_on` of the job's function names this exception."""
        task = self._tasks.get(str(job.payload.get("task")))
        return task is not None and isinstance(error, task.retry_on)

    def _model(self, name: str) -> Any:
        """The model, loaded after others are dropped."""
        if name in self._loaded:
            self._loaded[name] = self._loaded.pop(name)
        else:
            while len(self._loaded) >= self._models_max:
                del self._loaded[next(iter(self._loaded))]
                _free_memory()
            self._loaded[name] = self._loaders[name]()
        return self._loaded[name]


def _free_memory() -> None:
    """Return PyTorch's cache to the GPU."""
    gc.collect()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()
