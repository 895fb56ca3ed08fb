"""The rules that a history must keep, as expressions over the steps of tasks."""
