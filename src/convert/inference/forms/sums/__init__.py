"""Sums and products of several terms: `reordered` takes them in other orders, `constants_last` adds constants last, `means_first` subtracts a mean
before its factor, `biases` adds up
the biases of one, `constant_parts` takes apart what multiplies a constant that is joined with data, `stacks` takes parameters apart that
stand in one, `masked_softmaxes` hides scores in front of a softmax, and `masks` leaves out what a softmax hides."""
