"""The program: its processes, ports and signals."""
