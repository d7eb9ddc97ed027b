"""How the probes and the mistakes of all kinds use what a rule says of a weight: factor, RoPE, flattened map, weight norm."""
