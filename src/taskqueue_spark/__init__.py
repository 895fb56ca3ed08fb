"""The data pipeline on Spark: a data source for tasks and journals, analyses of a journal, and reports.

This module imports nothing, because Spark imports it for every Python data source.
"""
