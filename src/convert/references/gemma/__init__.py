"""Gemma 1, 2 and 3 (text.py), Gemma 3 with images and PaliGemma (images.py), π0 and π0-FAST (openpi.py), on the equations of jax_model.py.

May import the modules next to the folders of `references`, `convert.planning` and what lies below it.
"""
