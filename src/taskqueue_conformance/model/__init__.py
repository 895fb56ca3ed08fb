"""An independent model of a backend, and a state machine that compares a backend with the model."""
