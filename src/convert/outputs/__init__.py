"""What can be asked of converted files alone: are they intact (`integrity`), how do two sets of weights differ
(`difference`), and are they what a conversion would write (`completed`).

May import `api` and what is below it.
"""
