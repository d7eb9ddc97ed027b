"""Commands of a release pipeline: `batch`, `verify`, `diff`."""
