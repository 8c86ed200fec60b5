"""Jobs as functions: what a team writes to use the queue.

    from gpuwarden import Queue, current

    queue = Queue()                                   # $GPUWARDEN_QUEUE_DB, else an SQLite file of this user

    @queue.model("sdxl")
    def load():                                       # kept loaded by the worker from job to job
        return DiffusionPipeline.from_pretrained("stabilityai/stable-diffusion-xl-base-1.0").to("cuda")

    @queue.job(model="sdxl")
    def paint(pipeline, prompt, out):
        pipeline(prompt, callback_on_step_end=current().on_step).images[0].save(out)
        return {"picture": out}

    paint.submit(prompt="a cat", out="/data/cat.png")  # in any program; .wait() gives the result

and `gpuwarden worker run tasks` runs them. A `Queue` is a worker's *body* (`gpuwarden.worker`), and nothing more:
what it does could be written by hand against that. A job may be run twice (its worker may die at any instruction), so a
function must be able to write its output again.
"""

import functools
import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, ParamSpec, Self, TypeVar

import structlog

from gpuwarden.db.engine import NoAnswerError
from gpuwarden.errors import GpuwardenError
from gpuwarden.format import kept
from gpuwarden.job import FINAL, LEASE_S, ItemState, JobClass, JobId, Phase, State
from gpuwarden.queue import PRIORITY, Item, Job, JobStore, Result, ResultError, Submission, check_result
from gpuwarden.queue.open import default_store
from gpuwarden.reporter import Reporter

log: Final = structlog.get_logger("job")

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E")

RETRY_S: Final = 1.0
"""How long a job waits before it asks a queue again that did not answer, seconds."""

LOOK_S: Final = 1.0
"""Whoever waits for a job looks at it this often, seconds: on PostgreSQL not every end of one is told."""


class TaskError(GpuwardenError):
    """A job names no function of this queue, or a function cannot be one."""


class ItemsFailedError(GpuwardenError):
    """A run has nothing left to do, and some of it could not be done."""


class JobFailedError(GpuwardenError):
    """The job that was waited for has failed, or was cancelled; the message says why."""


class JobTimeoutError(GpuwardenError):
    """The job that was waited for is not over yet."""


class TakenItem:
    """An item that this attempt has: `with item:` does it, and tells how that ended.

    What is raised inside fails the item and goes no further; the next item may be well. `result` may be set.
    """

    def __init__(self, name: str, settle: Callable[[str, Result, str | None], bool]) -> None:
        self.name = name
        self.result: Result = None
        self.failed: str | None = None
        self._settle = settle

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if error is not None and not isinstance(error, Exception):
            return False  # the worker is told to stop: the item goes back with its job
        if error is None:
            try:
                check_result(self.result)
            except ResultError as wrong:
                error = wrong
        if error is not None:
            self.failed = kept(f"{type(error).__name__}: {error}")
            log.error("item failed", item=self.name, because=self.failed, exc_info=error)
        if not self._settle(self.name, self.result, self.failed):
            raise TaskError(f"item {self.name!r} is not this attempt's any more")
        return True


@dataclass(frozen=True, kw_only=True)
class Current:
    """The attempt that runs in this process: how it tells that it lives, and what it takes from its run."""

    job: Job
    report: Reporter
    store: JobStore

    def items(self) -> Iterator[TakenItem]:
        """The items of the job's run that are left, one after the other; other jobs of the run take theirs meanwhile.

        Each is to be done in a `with`. A step is reported after each.

        Raises:
            ItemsFailedError: at the end, where none is left and some of the run have failed for good.
        """
        done = failed = 0
        claim: dict[str, Any] = {"attempt": self.job.attempt, "incarnation": self.job.claimed_by}

        def settle(name: str, result: Result, because: str | None) -> bool:
            how: dict[str, Any] = {**claim, "item": name, "now": self.store.now()}
            if because is None:
                return self.store.items.finish(self.job.job_id, **how, result=result)
            return self.store.items.fail(self.job.job_id, **how, because=because)

        def take() -> Item | None:
            return self.store.items.take(self.job.job_id, **claim, now=self.store.now())

        while taken := self._answer(take):
            item = TakenItem(taken.item, lambda *told: self._answer(lambda: settle(*told)))
            yield item
            done, failed = done + (item.failed is None), failed + (item.failed is not None)
            self.report.items(done=done, failed=failed)
            self.report.step()
        if self.job.run_id is not None:
            run_id = self.job.run_id
            counts = self._answer(lambda: self.store.items.counts(run_id))
            if counts[ItemState.FAILED] and counts[ItemState.FAILED] + counts[ItemState.DONE] == counts.total():
                raise ItemsFailedError(f"{counts[ItemState.FAILED]} of the run's {counts.total()} items have failed")

    def _answer(self, ask: Callable[[], E]) -> E:
        """What the queue answers, asked again for as long as a claim may last without being renewed."""
        give_up_s = time.monotonic() + LEASE_S
        while True:
            try:
                return ask()
            except NoAnswerError as error:
                if time.monotonic() >= give_up_s:
                    raise
                log.warning("queue does not answer; asking again", because=str(error))
                self.report.phase(Phase.STEP)  # a beat: this worker is not wedged, whatever its GPU does meanwhile
                time.sleep(RETRY_S)

    def step(self) -> None:
        """One step is done; costs under a microsecond."""
        self.report.step()

    def steps(self, over: Iterable[E]) -> Iterator[E]:
        """Go over something, a step after each."""
        for each in over:
            yield each
            self.report.step()

    def on_step(self, _pipeline: object, _step: int, _timestep: object, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """A step, in the shape of diffusers' `callback_on_step_end`."""
        self.report.step()
        return kwargs

    def ranks(self) -> list[Job]:
        """The ranks of this job, in order, with the host of each as soon as it has one: for their rendezvous."""
        return [self.job] if self.job.gang is None else self.store.queries.of_gang(self.job.gang)

    def phase(self, phase: Phase | str, *, timeout_s: float | None = None) -> None:
        """What it does now: `load`, `step`, `eval`, `checkpoint`, `save` or `idle`; each has its own signs of life.

        `timeout_s` is how long it may show none of them in this phase, seconds, held to be 30 where it is less.
        """
        self.report.phase(Phase(phase), timeout_s=timeout_s)


_running: list[Current] = []


def current() -> Current:
    """The job that this process runs.

    Raises:
        TaskError: it runs none: the function was called outside a worker.
    """
    if not _running:
        raise TaskError("no job runs in this process: current() is for functions that a worker calls")
    return _running[-1]


@dataclass(frozen=True, kw_only=True)
class Handle:
    """A job that was submitted."""

    job_id: JobId
    _queue: "Queue" = field(repr=False)

    def job(self) -> Job:
        """As the queue has it now."""
        return self._queue.store.job(self.job_id)

    @property
    def state(self) -> State:
        """Where it stands."""
        return self.job().state

    def wait(self, timeout_s: float | None = None) -> Result:
        """What the job returned, once it is done.

        Args:
            timeout_s: how long to wait, seconds; without end when not given.

        Raises:
            JobFailedError: it failed, or was cancelled.
            JobTimeoutError: it is not over in time.
        """
        job = self._queue.await_end(self.job_id, timeout_s)
        if job.state is not State.COMPLETED:
            raise JobFailedError(f"job {job.job_id} {job.state}: {job.because or 'nobody said why'}")
        return job.result

    def cancel(self, because: str = "cancelled by its submitter") -> bool:
        """End it, if it is not over; its worker stops within a second."""
        return self._queue.store.admin.cancel(self.job_id, because=because, now=self._queue.store.now())


class Task(Generic[P, R]):
    """A function that can be a job. Called, it runs here and now, as it is."""

    def __init__(self, queue: "Queue", function: Callable[P, R], template: Submission) -> None:
        self.name = function.__name__
        self.template = template
        self._queue = queue
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The function itself, in this process and now."""
        return self.function(*args, **kwargs)

    def submit(self, **kwargs: Any) -> Handle:
        """Put it in the queue, with these arguments: what JSON can hold, by name."""
        return self._queue.submit(self, kwargs)

    def submission(self, **kwargs: Any) -> Submission:
        """What `submit` would put in the queue: for `store.runs.submit_run`, or with other settings (`dataclasses`)."""
        return self._queue.submission(self, kwargs)


class Queue:
    """Functions that are jobs of one queue, and the models that they need.

    Args:
        url: the queue's database; `default_store()` when not given. It is opened when it is first used.
        name: the queue that jobs are put in, unless their function says another.
        models_max: how many models a worker keeps loaded; the one that was used last stays.
    """

    def __init__(self, url: str | None = None, *, name: str = "gpu", models_max: int = 1) -> None:
        if models_max < 1:
            raise TaskError(f"models_max {models_max} will not do: a worker that keeps no model cannot run a job")
        self._url = url
        self._store: JobStore | None = None
        self.name = name
        self._models_max = models_max
        self._loaders: dict[str, Callable[[], Any]] = {}
        self._tasks: dict[str, Task[Any, Any]] = {}
        self._loaded: dict[str, Any] = {}

    @property
    def store(self) -> JobStore:
        """The queue itself, opened."""
        if self._store is None:
            self._store = JobStore.open(self.url)
        return self._store

    def serve_from(self, store: JobStore) -> None:
        """Go by the queue that a worker has opened, wherever this one would have looked."""
        self._store = store

    @property
    def url(self) -> str:
        """Its database's URL."""
        return self._url or default_store()

    @property
    def loaded_model(self) -> str | None:
        """The model that was used last and is kept loaded, which the worker tells the queue."""
        return next(iter(reversed(list(self._loaded))), None)  # a list: another thread asks while models change

    def model(self, name: str) -> Callable[[Callable[[], E]], Callable[[], E]]:
        """Say how a model is loaded. Jobs that need it are handed what the function returns, as their first argument.

        Raises:
            TaskError: that model has a loader.
        """

        def register(load: Callable[[], E]) -> Callable[[], E]:
            if name in self._loaders:
                raise TaskError(f"model {name!r} has a loader already: {self._loaders[name].__name__}")
            self._loaders[name] = load
            return load

        return register

    def job(
        self,
        *,
        model: str | None = None,
        queue: str | None = None,
        job_class: JobClass | str | None = None,
        reports_steps: bool = True,
        priority: int = PRIORITY,
        budget_s: float | None = None,
        stall_timeout_s: float | None = None,
        ranks: int = 1,
    ) -> Callable[[Callable[P, R]], Task[P, R]]:
        """Make a function a job; the settings are those of `Submission`.

        A `model` that has a loader is handed to the function before its own arguments.

        Raises:
            TaskError: the queue has a job of that name, or there is no such class.
        """
        if job_class is not None and job_class not in list(JobClass):
            raise TaskError(f"no class of jobs is called {job_class!r}: there are {', '.join(JobClass)}")
        template = Submission(
            queue=queue or self.name,
            job_class=None if job_class is None else JobClass(job_class),
            model=model,
            reports_steps=reports_steps,
            priority=priority,
            budget_s=budget_s,
            stall_timeout_s=stall_timeout_s,
            ranks=ranks,
        )

        def register(function: Callable[P, R]) -> Task[P, R]:
            task = Task(self, function, template)
            if task.name in self._tasks:
                raise TaskError(f"two jobs of one queue are called {task.name!r}: give one of them another name")
            self._tasks[task.name] = task
            return task

        return register

    def submission(self, task: Task[Any, Any], kwargs: Mapping[str, Any]) -> Submission:
        """A job of a function with these arguments."""
        told = {name: getattr(task.template, name) for name in Submission.__dataclass_fields__ if name != "payload"}
        return Submission(**told, payload={"task": task.name, "arguments": dict(kwargs)})

    def submit(self, task: Task[Any, Any], kwargs: Mapping[str, Any]) -> Handle:
        """Put a job in the queue."""
        return Handle(job_id=self.store.runs.submit(self.submission(task, kwargs), now=self.store.now()), _queue=self)

    def await_end(self, job_id: JobId, timeout_s: float | None) -> Job:
        """The job once it is over.

        Raises:
            JobTimeoutError: not in time.
        """
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
        """A worker's body: load what the job needs, and return its work."""
        name = job.payload.get("task")
        task = self._tasks.get(name) if isinstance(name, str) else None
        if task is None:
            known = ", ".join(sorted(self._tasks)) or "none"
            raise TaskError(f"job {job.job_id} asks for {name!r}, which is no job of this queue: there are {known}")
        before = () if task.template.model not in self._loaders else (self._model(task.template.model),)

        def work() -> Result:
            _running.append(Current(job=job, report=report, store=self.store))
            try:
                return task.function(*before, **job.payload.get("arguments", {}))
            finally:
                _running.pop()

        return work

    def _model(self, name: str) -> Any:
        """The model, loaded if it is not; others go first, so that both need not fit."""
        if name in self._loaded:
            self._loaded[name] = self._loaded.pop(name)
        else:
            while len(self._loaded) >= self._models_max:
                del self._loaded[next(iter(self._loaded))]
                _free_memory()
            self._loaded[name] = self._loaders[name]()
        return self._loaded[name]


def _free_memory() -> None:
    """What was dropped is given back to the GPU now, where PyTorch keeps it for itself."""
    gc.collect()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()
