"""What the package asks of the operating system: `signals`, `process` (garbage collector, memory, exit), `regular_file`.

Imports nothing of the rest of the package.
"""
