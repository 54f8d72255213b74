"""Each command's workflow, one file a command: calls the rooms in order and returns a Report."""
