"""What the package asks of the operating system: `signals`, `process` (garbage collector, memory, exit), `regular_file`, `file_calls`.

Imports nothing of the rest of the package.
"""
