"""A step of a loop as data: what can be run again without the loop."""
