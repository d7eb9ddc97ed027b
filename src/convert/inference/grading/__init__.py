"""Grade a derivation: `grades`; `alternatives` that give the same outputs; `ties`; `zeros`, which show nothing; the `proof` with fresh weights, and what it leaves `unshown`.
Where the programs differ, `differences` names the operation, `resumed` continues behind it, and `in_front` grades what was found."""
