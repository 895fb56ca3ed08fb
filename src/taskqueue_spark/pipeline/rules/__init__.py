"""The rules that a history must keep, as expressions on the steps of tasks."""
