"""The gateway: a worker's door to the queue, through a socket in its own folder.

`client` is what a worker uses. The other modules are `gpuwarden gateway`: that of a host (`sockets`, `batching`), and
the central one (`central`), which serves hosts with tokens and takes reports of hosts that are not scraped (`reports`).
"""
