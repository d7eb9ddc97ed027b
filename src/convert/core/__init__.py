"""Building blocks that know no model, framework or file layout of a checkpoint.

- Errors as data: `findings`, `errors`. Suggestions: `similarity` (names), `option_text` (options of the command line).
- Rule files as text: `yaml_quotes`, `yaml_nodes` (YAML with positions) -> `fields` (values of keys, JSON Schema).
- Paths of leaves: `path_pattern` -> `path_index`. Equations: `einsum`.
- Tensors: `tensor_spec` -> `ops` (layout), `value_ops`, `weight_norm_ops`; `safetensors_header` reads and writes headers.
- User code: `user_code` (functions that the user names). The operating system: `system`.

Imports nothing of the rest of the package.
"""
