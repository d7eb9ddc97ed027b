"""How sure a derivation is: grades, other ways that give the same outputs, ties, the proof, and where the programs differ."""
