"""The worker: claims a job, loads, runs it, renews its lease, and stops once it has lost the job.

A *handler* `load(job, report)` loads what a job needs and returns the function that does the work. The worker sends the
first step beat between the two (A3). The handler runs in the main thread. Another thread watches the claim and ends the
process once it is lost (A11), since a handler may hang. An attempt can end at any instruction, so its output must be
safe to write again. The attribute `loaded_model` names the model that a handler keeps loaded, and
`fatal(error)` whether the process cannot survive an error. `gpuwarden.Queue` is a
handler.

SIGTERM and SIGINT interrupt only the handler: a claim is never left behind.

While the queue does not answer, the worker retries and keeps its result for up to a lease. On PostgreSQL a worker stops
itself after a lease without renewal, by a clock that counts suspended time: others may reclaim the job. On SQLite no
other host can, and it works on.
"""
