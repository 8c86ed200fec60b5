"""The worker: claims jobs, loads, arms, runs, renews, and stops itself when it no longer owns its job.

The job's own code is a *body*: a function `load(job, report)` that loads what the job needs and returns the function
that does the work. Between the two the worker sends the arming beat (A3). What the work returns is kept as the job's
result. The body runs in the main thread; another thread renews the lease and watches the claim, and ends the process at
once when the claim is gone (A11), because the body may be deaf. A body must be idempotent on its output: an attempt can
end at any instruction and another begin. A body that keeps a model loaded between jobs says so in an attribute
`loaded_model`, and jobs that need it come first. `gpuwarden.Queue` is such a body.

At its start it registers with the queue, which settles what the incarnation before it held. An incarnation that is
over, because another has registered or because it is being ended, claims nothing and ends with the same exit code.

SIGTERM and SIGINT interrupt a body and nothing else: between a claim and its job's first line, or while a result is
being written, a stop waits, so that no claim is left behind.

A queue that does not answer is asked again, and a result waits for it up to a lease. Whether the job works on meanwhile
depends on who else can reach the queue. On PostgreSQL others may, and give the job away once its lease has run out: a
worker that could not renew for a whole lease stops itself at once, by a clock that counts suspended time. On SQLite
nobody else reaches it either, and the worker works on.
"""
