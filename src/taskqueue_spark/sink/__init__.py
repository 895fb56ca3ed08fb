"""Publishing the rows of a DataFrame as tasks; `writer` is the entry point."""
