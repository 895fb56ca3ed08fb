"""The demo of the dispatcher, which runs jobs on simulated GPU servers, injects faults and checks the outcome."""
