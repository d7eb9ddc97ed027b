"""The states and gates of loops: from where they begin, when they are read, given on and given out, and in which direction a loop runs."""
