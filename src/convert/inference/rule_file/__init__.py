"""Write a derivation as a rule file: layouts as equations, layers as patterns, and the evidence as comments.

`layout` reads the axes of a leaf off the elements of a tensor; `layer` says what kind of layer a module's tensors are; `patterns`
writes the layers that differ in numbers as one rule, and `joined` those that differ in words; `write` prints them; `proof` compares the
plan of the written file with the derivation.
"""
