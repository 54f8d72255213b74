"""Values as a tree of JSON that names no code but by its name, and back: nothing in it is ever executed."""
