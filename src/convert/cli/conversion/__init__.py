"""``convert MODEL CKPT OUT``: one command, three ways.

`command` has the options and makes a `Request` of them. `to_pytorch`, `to_jax` (``--to orbax``) and `to_peft` (``--adapter peft``)
each plan, write and report one. `push` uploads what was written.
"""
