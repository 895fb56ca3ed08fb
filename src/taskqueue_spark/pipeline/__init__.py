"""The pipeline: plain functions from tables to tables, over the transitions that a journal tells."""
