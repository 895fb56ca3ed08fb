"""The demo of the dispatcher: simulated GPU servers, a crash and a false report, and a report at the end."""
