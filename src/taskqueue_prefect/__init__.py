"""A plugin for Prefect that keeps background tasks in a queue which all replicas of the server share.

It needs no fork of Prefect's server, and workers do not change. In a server process it replaces Prefect's in-memory
queue with classes of this package; in other processes it does nothing. The path of a task run::

    task.delay() -> server: `task_queue.TaskQueue` -> `enqueue` -> the backend's publisher
    a worker's socket: `task_queue.MultiQueue` -> `delivery` -> the backend's subscription, and the ack
    `reconcile`: enqueues scheduled runs again if the database has them but the queue does not

`plugin` is the entry point, `patches` lists the parts of Prefect that are replaced, and `context` has the state of one
event loop.
"""
