"""The cluster as a model of time, driving the real controller and policies.

No JAX, no clock: seconds follow from true time tables, seeded noise and disturbances.
Every policy meets the same ones. Policies must not know that they are simulated.
"""
