"""Reading the journal, and keeping it."""
