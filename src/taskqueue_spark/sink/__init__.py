"""Publishing rows of a DataFrame as tasks: `writing` first, then what it is made of."""
