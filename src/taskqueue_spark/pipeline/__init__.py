"""The pipeline: functions from the transitions of a journal to tables, and from tables to tables."""
