"""Linear layers: the kind, the equations that drafts guess, its probe and its mistakes."""
