"""The same tasks in a program that configures logging when it is imported."""

import logging

from tests.worker.logged import tasks

__all__ = ["tasks"]

logging.basicConfig(level=logging.INFO, format="MINE %(message)s")
