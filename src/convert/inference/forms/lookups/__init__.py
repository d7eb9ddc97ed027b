"""Rows of one table at a time: `tables` where several stand in a stack, `offsets` where they stand below each other, `one_hot` where a
product takes the rows. `zeroed_rows` masks behind the lookup what code sets to zero in a table."""
