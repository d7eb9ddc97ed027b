"""TimesFM 1.0, 2.0 (timesfm_1.py, with praxis' layers in praxis.py) and 2.5 (timesfm_2p5.py).

May import the modules next to the folders of `references`, `convert.planning` and what lies below it.
"""
