"""Many conversions, started and reported as one.

`jobs` reads the jobs file, `preflight` finds what can be refused before a byte is read, `run` runs each job as a process of
its own, `report` writes what came of it. May import `api`, `outputs` and `verify`, and what is below them.

A job is a process that runs ``convert run``: the command in a failure's line is the command that failed, one job that runs out
of memory does not end the others, and models of two checks do not share Python modules.
"""
