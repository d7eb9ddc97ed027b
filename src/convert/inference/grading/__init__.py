"""Grade a derivation: `grades`; `alternatives` that give the same outputs; `ties`; `zeros`, which show nothing; the `proof` with fresh weights, and what it leaves `unshown`, within the `reach` of values.
Where the programs differ, `differences` names the operation, `resumed` continues behind it with values that are `given`, and `in_front` grades what was found."""
