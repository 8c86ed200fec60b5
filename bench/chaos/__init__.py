"""A queue whose workers, sweeper, connections and server die at random, and what must come of its jobs all the same."""
