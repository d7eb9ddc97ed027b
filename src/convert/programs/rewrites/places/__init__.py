"""The places of operations, of parts of a value, of axes and of copies: what is exchanged, or stands in another order."""
