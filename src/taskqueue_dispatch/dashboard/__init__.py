"""The dashboard's page about the dispatcher: its models, endpoints, slots, and the jobs that run."""

from taskqueue_dispatch.dashboard.pages import LINKS, PAGES, TEMPLATES

__all__ = ["LINKS", "PAGES", "TEMPLATES"]
