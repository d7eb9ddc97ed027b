"""sides."""
