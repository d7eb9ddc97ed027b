"""One conversion on several machines: each file of the output is a task.

`tasks` cuts a plan into tasks and runs one of them, in any process that sees the checkpoint and the output. `execute` keeps the output on
the driver: it starts the tasks, collects their digests, and publishes. `ray_tasks` runs tasks on Ray. May import `api` and what is
below it. Ray is imported by `ray_tasks` alone, when it is used.

A file has one writer: network file systems do not join writes of two machines to one page. The price is that a chunk which several files
need is read by each of their tasks.
"""
