"""Answer a draft's questions about the target from the target itself: its names, shapes and types of modules.

`target` describes a PyTorch model without torch; `readings` asks the planner what each answer would make; `similarity` compares
names; `assign` matches layers with modules; `answers` writes what is certain into the draft (`rule_writer`, with `habits` of
matrices and `module_patterns`), and lists what is not.
"""
