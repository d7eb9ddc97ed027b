"""The fault catalogue: what is planted, in which models, and what the check must say."""
