"""Projections: the kind, its equations as drafts guess them, its probe and its mistakes."""
