"""`gpuwarden doctor`: check every link of the chain in order, and say how to repair a broken one.

`sources` read the parts; `checks` are pure functions of `Facts`; `links` has their order.
"""
