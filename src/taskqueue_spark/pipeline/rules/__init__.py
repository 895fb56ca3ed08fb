"""The rules that a history must keep, as SQL expressions on the steps of tasks."""
