"""Reading the journal of state changes, and saving it to a file."""
