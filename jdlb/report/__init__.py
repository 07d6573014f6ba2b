"""What a run did, for people: numbers, tables, figures and TensorBoard scalars.

Made from records alone. Must not know who measured, which policies there are, or that
JAX exists.
"""
