"""Print rules in the words of the rule language: letters for axes, equations, keys."""
