"""Machines: who takes part in a job, how processes start, how fast they may be."""
