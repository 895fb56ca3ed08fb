"""The data pipeline on Spark: a source and sink for tasks and their journal, and reports about them.

This module imports nothing, because Spark imports it for every Python data source.
"""
