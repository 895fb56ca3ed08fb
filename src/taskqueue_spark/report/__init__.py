"""The report: every table of the pipeline made and kept, one page for people and the same figures as JSON.

`build` makes the tables, `gathering` takes of them what a page has room for, `verdict` says in plain sentences what
they come to, and `page` draws them, with `plots` of its own.
"""
