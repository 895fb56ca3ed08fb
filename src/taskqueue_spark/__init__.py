"""The data pipeline on Spark: a source and sink of tasks and their journal, and what can be learnt from it.

Nothing is imported here: Spark looks into this package whenever any Python source is used.
"""
