"""Where things of the repository are, for the tests."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
GOLDEN = TESTS / "golden"
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
