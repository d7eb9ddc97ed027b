"""Grade a derivation: `grades`; `alternatives` that give the same outputs; `ties`; the `proof` with fresh weights. Where the programs differ,
`differences` names the operation, and `resumed` continues behind it."""
