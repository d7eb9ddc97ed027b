"""Drafts a rule file from a tree: `draft_rules`."""

from convert.drafting.draft import draft_rules

__all__ = ["draft_rules"]
