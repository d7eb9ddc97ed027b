"""What can be asked of converted files alone: are they intact (`integrity`), and how do two sets of weights differ (`difference`).

May import `api` and what is below it.
"""
