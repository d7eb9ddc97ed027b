"""Join layers that a person writes as one rule: they differ in numbers (`patterns`), or in words or parts (`joined`)."""
