"""An index with names, ``{s:det,lat}``: its letter, and the modules that a pattern with it names."""

from __future__ import annotations

from convert.inference.rule_file.joining.patterns import INDICES, IndexLetters
from convert.inference.rule_file.proof import is_open


def test_its_letter_is_no_other_of_the_rule_also_where_none_is_left() -> None:
    letters = IndexLetters()
    assert letters.of_names("det,lat", 2, "{det,lat}.norm") == INDICES[0]
    for k in range(len(INDICES)):
        letters.named(f"list_{k}_", 0, 3 + k)
    taken = letters.named("blocks0", 0, 2)
    assert taken in INDICES
    assert letters.of_names("a,b", 2, f"{{a,b}}.blocks.{{{taken}}}") not in ("", taken)
    assert letters.of_names("a,b", 2, f"{{a,b}}.blocks.{{{taken}+1}}") not in ("", taken)


def test_a_pattern_names_the_modules_with_these_names_alone() -> None:
    for name in ("det.norm.0.weight", "lat.norm.12.bias", "lat.norm.1"):
        assert is_open(name, ["{s:det,lat}.norm.{i}"])
    for name in ("s:det.norm.0.weight", "other.norm.0.weight", "det.norm.weight", "lat.norm.0x"):
        assert not is_open(name, ["{s:det,lat}.norm.{i}"])
