"""Each command's workflow, one file a command: it runs the parts in order and returns a Report."""
