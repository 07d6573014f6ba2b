"""Who gets how much of every global batch.

Knows examples, seconds and workers; must not know devices, processes, data sets or
JAX. Everything here is a pure function of its arguments, NumPy only, so that the same
code decides in a training job, in a simulator and in a test.
"""
