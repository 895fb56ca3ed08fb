"""Running the Lua scripts, and encoding their arguments and answers."""
