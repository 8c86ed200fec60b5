"""Check the queue's guarantees while workers, sweeper, connections and server die at random."""
