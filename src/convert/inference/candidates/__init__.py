"""What a candidate is, and what it is proposed from: the `source`, the target's `replay`, and the `context` of both; `factors` that
are folded into a weight.
"""
