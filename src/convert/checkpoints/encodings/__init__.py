"""encodings."""
