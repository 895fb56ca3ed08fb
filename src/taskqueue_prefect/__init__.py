"""Prefect's background tasks on a shared queue, for servers with replicas. Servers need no fork, workers no change.

A plugin for Prefect. In a server process it replaces Prefect's in-memory queue by classes of this package; in other
processes it does nothing. The path of a task run::

    task.delay() -> server: `task_queue.TaskQueue` -> `enqueue` -> the backend's publisher
    a worker's socket: `task_queue.MultiQueue` -> `delivery` -> the backend's subscription, and the ack
    `reconcile`: enqueue again what is scheduled in the database and missing in the queue

`plugin` is the entry point, `patches` lists what is replaced, and `context` is the state of one process.
"""
