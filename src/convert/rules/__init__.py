"""The rule language: from the text of a rule file to checked `RuleFile`s.

`library` finds a file -> `core.yaml_nodes` -> `multi_model` (one file per model) -> `parse` (reads values as `schema/`
declares them; expands `attention_macro`; handles `placeholders`) -> `checks` (lists every problem) -> `file.RuleFile`.
For a given tree, `enclosed`, `path_variants` and `copies` rewrite the rules before they are matched.

May import `convert.core` and `convert.layers`.
"""
