"""Code that the demos share: processes, server, view and report. Each demo adds its own plan, job and checks."""
