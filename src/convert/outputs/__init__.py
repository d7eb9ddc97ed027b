"""Questions about converted files, without a check: are they intact (`integrity`), how do two sets of weights differ (`difference`), are
they what a conversion would write (`completed`), and which statement about them can be signed (`attestation`).

May import `api` and what is below it.
"""
