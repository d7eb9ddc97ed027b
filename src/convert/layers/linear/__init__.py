"""Linear layers: the kind, the equations that drafts guess, its probe and its mistakes.

May import `convert.core`, and of `convert.layers` the modules next to the folders and `transforms`.
"""
