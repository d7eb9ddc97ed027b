"""Compare the hyperparameters that no weight holds: activations, epsilons, factors of norms, RoPE base, strides.

Order: `declared` lists the facts of the source; `compare` compares them with ``config.json`` (`hf_config` asks transformers
about other keys, `generation` compares what only ``generate()`` reads) and with the live module (`meta_module`); `impact`
bounds the effect of a difference. `judge` compares the facts of the plan with what does not come from the rules. May import
`coverage` and `report`, and everything below `verify`.
"""
