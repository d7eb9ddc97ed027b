"""timesfm."""
