"""The pipeline: functions that compute tables from the transitions of a journal, or from other tables."""
