"""Commands of a release pipeline: `verify`, `diff`."""
