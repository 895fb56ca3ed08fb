"""Publishing the rows of a DataFrame as tasks. `writer` has the public functions."""
