"""What chaos runs need here too."""

from tests.chaos.conftest import folder

__all__ = ["folder"]
