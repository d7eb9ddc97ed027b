"""Draft a rule file from a tree (`draft_rules`), and survey an unfinished one (`survey.survey_rules`).

`tree_paths` groups the leaves (`path_groups`, `stacked_axes`) -> `companions`, `attention`, `recurrent_cells` and
`equinox_state` find leaves that belong together -> `layer_rules` guesses the kind of each layer, which drafts its rule
(`layers.*.draft`; `kernel_readings` and `axis_letters` give equations and letters) -> `yaml_entry` prints the YAML.

May import `planning` (only `survey` does) and what lies below it.
"""

from convert.drafting.draft import draft_rules

__all__ = ["draft_rules"]
