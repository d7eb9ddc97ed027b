"""What the proof does not show, in words: limits and choices (`unshown`, with `reach`), rows that no draw reads, whole numbers beyond 32 bits,
weights that a mask leaves, draws that show little (`weak_proof`), and what PyTorch's fast path computes (`fast_path`)."""
