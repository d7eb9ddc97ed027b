"""The outcome of a check as data, and its forms: JSON, JUnit, HTML and the rows of the model card.

`report` and `facts` define the data. `junit`, `sarif`, `html` (with `plot` and `templates/`) and `card_rows` render it and compare
nothing. May import everything below `verify`.
"""
