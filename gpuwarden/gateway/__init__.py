"""The gateway: a worker's door to the queue, through a socket in its own folder.

`client` is what a worker uses. The other modules are `gpuwarden gateway`.
"""
