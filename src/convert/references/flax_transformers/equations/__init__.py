"""The equations of each model in plain JAX: a module per model, and `layers` with what they share.

Imports of `references` nothing but `protocol`.
"""
