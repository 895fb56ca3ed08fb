"""An independent model of a backend, and the state machine that compares both."""
