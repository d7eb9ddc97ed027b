"""Write a derivation as a rule file: layouts as equations, layers as patterns, and the evidence as comments.

`layers` says what each module is, `joining` makes one rule of many, `printing` prints it, and `write` puts the file together;
`computed` and `attention` try rules that a plan must confirm; `proof` compares the plan of the written file with the derivation.
"""
