"""Readers of journals: their interface (`contract`), and a module for each kind of store."""
