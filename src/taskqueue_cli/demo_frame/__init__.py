"""The frame of a demo: processes, server, view and report. A demo adds its plan, its job and its checks."""
