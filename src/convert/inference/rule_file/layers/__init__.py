"""Say what each module of the target is: a kind of layer, the leaves that it is made of, and their layouts. One `LayerRule` a module."""
