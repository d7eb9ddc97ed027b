"""The keys of a rule file and their values, from which the JSON Schema follows.

`file` has the keys of a file, `header` the values of those above the rules, `rule` the keys of a rule.
"""

from __future__ import annotations

from convert.rules.schema.file import ONLY, RULE_FILE, SHARED_HEADER, schema
from convert.rules.schema.header import parse_factors
from convert.rules.schema.rule import rule_record

__all__ = ["ONLY", "RULE_FILE", "SHARED_HEADER", "parse_factors", "rule_record", "schema"]
