"""Raw parameters, kept as stored, and leaves that are dropped.

May import `convert.core`, and of `convert.layers` the modules next to the folders.
"""
