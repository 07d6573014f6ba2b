"""Which examples every worker computes, and bringing them into memory.

Knows allocations (`jdlb.balance`) and NumPy; must not know JAX, devices, processes or
the network: who is local, and which shares hold, are arguments.
"""
