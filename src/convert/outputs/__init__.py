"""What can be asked of converted files alone: are they intact (`integrity`), how do two sets of weights differ
(`difference`), are they what a conversion would write (`completed`), and what can be
signed about them (`attestation`).

May import `api` and what is below it.
"""
