"""One queue over several partitions."""
