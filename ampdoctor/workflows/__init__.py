"""The order in which the rooms are used, one file a command; each returns a Report."""
