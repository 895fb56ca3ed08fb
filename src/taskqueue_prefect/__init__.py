"""Background tasks of Prefect on a shared queue: servers with replicas, unforked, and their workers unchanged.

A plugin of Prefect. In a server's process it puts classes of this package in the place of the queue that Prefect keeps
in memory; everywhere else it does nothing. The way of a task run::

    task.delay() -> a server: `task_queue.TaskQueue` -> `scheduling` -> the backend's publisher
    a worker's socket: `task_queue.MultiQueue` -> `handing_over` -> the backend's subscription, and its ack
    `reconciling`: what the database says is scheduled, and the queue has not, is put in again

`plugin` is where it begins, `replacing` says what is put in the place of what, `host` is what one process shares.
"""
