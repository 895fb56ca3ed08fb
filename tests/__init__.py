"""The project's tests, one folder for each area."""
