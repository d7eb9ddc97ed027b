"""LoRA pairs that no rule names: which leaves of a tree are such a pair (`names`), what their axes are (`forms`), by what their
product is multiplied (`scale`), also by files next to the tree (`stated`, with PEFT's settings in `peft_config`), and the merges that
follow (`attach`). A library that trains adapters adds the same leaves to every model, so they are part of the planner, and no rule
file lists them.
"""
