"""Grade a derivation: `grades`; `alternatives` that give the same outputs; `ties`, and their order where fresh draws show it (`reordered_ties`); `zeros`, which show nothing; the `proof` with fresh weights, and `notes` of what it does not show.
`differences` has what is done where the programs differ."""
