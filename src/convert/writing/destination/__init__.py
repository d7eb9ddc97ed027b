"""Where an output is written: it appears there complete or not at all.

`permitted` says whether OUT may be written. `local` has the files of a disk, which `atomic` renames at the end; `store` has those of a
bucket, whose uploads end together. `journal` lists what an unfinished output has, so that another run continues it.
"""
