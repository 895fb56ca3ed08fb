"""Running the Lua scripts, and encoding what goes in and out."""
