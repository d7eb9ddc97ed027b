"""Raw parameters, kept as stored, and leaves that are dropped."""
