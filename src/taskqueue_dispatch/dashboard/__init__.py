"""The dashboard's page about the dispatcher: models, endpoints, slots and running jobs."""

from taskqueue_dispatch.dashboard.pages import LINKS, PAGES, TEMPLATES

__all__ = ["LINKS", "PAGES", "TEMPLATES"]
